"""A request that goes on after a loss brings its tokens along, and what of its prompt was cached."""

import asyncio
from contextlib import aclosing

import msgspec
import pytest
from played_replicas import (
    ANSWER,
    FIRST,
    PROMPT,
    SECOND,
    STREAMED,
    THIRD,
    A,
    B,
    Counts,
    Play,
    Request,
    context,
    orchestrated,
    serve,
)

from decode_node.answers import Piece
from decode_node.rendering import LocalReason
from decode_node.requests.local_prefills import LocalPrefills
from sampling.carried import CARRIED_XARG, CacheUse, Carried
from slo.replacement import FailureCause, Replaced
from slo.request import Party
from slo.tiers import STANDARD


@pytest.mark.parametrize("local", [None, LocalPrefills(1)], ids=["prefill", "here"])
async def test_what_goes_on_after_a_loss_tells_what_its_first_prefill_found_cached(local):
    """The second one has found what the first has computed, and some of the answer with it."""
    steps = Play({A: [[THIRD]]})
    steps.at_home = [[THIRD]]
    carried = msgspec.to_builtins(Carried([FIRST, SECOND], cache=CacheUse(16, 80)))
    why = "" if local is None else LocalReason.NO_PREFILL_REPLICA.value
    request = Request(vllm_xargs={CARRIED_XARG: carried})
    await serve(steps, request=request, local=local, local_prefill=why, attempt=100)
    assert set(steps.cached) == {(16, 80)}


@pytest.mark.parametrize("local", [None, LocalPrefills(1)], ids=["prefill", "here"])
async def test_the_ingress_hears_what_of_the_prompt_was_cached_for_who_goes_on_after_a_loss(local):
    class Chosen(Play):
        async def completions(self, request, info):
            async for event in super().completions(request, info):
                yield 'data: {"choices":[{"text":"' + event + '"}]}'

    steps = Chosen({A: ANSWER})
    steps.at_home = ANSWER
    why = "" if local is None else LocalReason.NO_PREFILL_REPLICA.value
    served, call = orchestrated(steps, local=local)
    async with aclosing(served.run(call, context(local_prefill=why))) as pieces:
        told = [piece.cache async for piece in pieces if isinstance(piece, Piece)]
    assert told[0] == (CacheUse(len(PROMPT) - 1, 0) if local else CacheUse(64, 32))


async def test_the_router_hears_how_much_is_prefilled_of_what_goes_on_after_a_loss():
    steps = Play({A: FailureCause.REPLICA_DIED, B: [[THIRD]]}, [Replaced(B, 0.0)])
    request = Request(vllm_xargs={CARRIED_XARG: msgspec.to_builtins(Carried([FIRST] * 3000))})
    await serve(steps, request=request, attempt=100)
    assert [asked.tokens for asked in steps.asked] == [3099]
    assert [len(prompt) for prompt in steps.prompts] == [3099, 3099]


@pytest.mark.parametrize("why", ["", LocalReason.NO_PREFILL_REPLICA.value])
async def test_what_lacks_no_token_any_more_has_nothing_computed_and_waits_for_no_turn(why):
    """Its decode replica has died between its last token and its end."""
    steps, counts, local = Play({}), Counts(), LocalPrefills(1)
    request = Request(vllm_xargs={CARRIED_XARG: msgspec.to_builtins(Carried(ANSWER, None, "length"))})
    async with local.claimed(Party("other", STANDARD)) as claim, local.turn(claim, 5000), asyncio.timeout(1):
        answer = await serve(steps, counts, request=request, local=local, local_prefill=why, attempt=100)
    assert answer == STREAMED, "the layer leaves out what the client has where it sees choices"
    assert (steps.prompts, counts) == ([], {})


async def test_a_request_that_brings_tokens_along_goes_on_from_them():
    steps = Play({A: ANSWER})
    brought = msgspec.to_builtins(Carried([FIRST, SECOND]))
    await serve(steps, request=Request(vllm_xargs={CARRIED_XARG: brought}))
    assert steps.prompts == [[*PROMPT, FIRST]]
    assert steps.carried == [FIRST, SECOND]


async def test_an_answer_that_had_ended_needs_no_prefill():
    steps = Play({A: ANSWER})
    brought = msgspec.to_builtins(Carried(ANSWER, finish_reason="length"))
    assert (await serve(steps, request=Request(vllm_xargs={CARRIED_XARG: brought})))[-1] == STREAMED[-1]
    assert steps.prompts == []
    assert steps.pulls == [None]
