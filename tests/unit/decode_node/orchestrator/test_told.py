"""What the engine, the router and the ingress are told of a request that nothing happens to."""

import asyncio
import time

from played_replicas import (
    ANSWER,
    CASES,
    FAILED,
    PROMPT,
    RESAMPLED,
    SECOND,
    STREAMED,
    THIRD,
    A,
    B,
    Counts,
    Play,
    Request,
    called,
    context,
    orchestrator,
    serve,
)
from vllm import SamplingParams
from waiting import until

from decode_node.rendering import LocalReason
from decode_node.requests.local_prefills import LocalPrefills
from decode_node.requests.only_here import admitted
from decode_node.requests.underway import Amount
from slo.replacement import Replaced
from slo.request import (
    DECODE_SINCE_XARG,
    FIRST_DUE_XARG,
    SEARCH_STEP_XARG,
    TENANT_XARG,
    TIER_XARG,
    TPOT_XARG,
)
from slo.tiers import PREMIUM, STANDARD


@CASES
async def test_a_request_that_nothing_happens_to_passes_untouched(request_, answer):
    steps, counts = Play({A: ANSWER}), Counts()
    assert await serve(steps, counts, request=request_) == answer
    assert steps.asked == []
    assert steps.released == []
    assert steps.prompts == [PROMPT]
    assert steps.pulls == [{"at": A}]
    assert steps.came == 1
    assert set(steps.cached) == {(64, 32)}, "what prefill found and made, not what was pulled"
    assert counts == ({("seed",): 1} if request_ is RESAMPLED else {})


async def test_only_a_kv_cache_that_comes_from_a_prefill_replica_is_told_as_pulled():
    steps = Play({A: [FAILED], B: ANSWER}, [Replaced(B, 0.1)])
    assert await serve(steps) == STREAMED
    assert (len(steps.pulls), steps.came) == (2, 1)
    steps = Play({})
    steps.at_home = ANSWER
    why = LocalReason.NO_PREFILL_REPLICA.value
    assert await serve(steps, local=LocalPrefills(1), local_prefill=why) == STREAMED
    assert steps.came == 0


@CASES
async def test_the_engines_scheduler_learns_the_objective(request_, answer):
    steps = Play({A: ANSWER})
    await serve(steps, request=request_, tier=PREMIUM, tenant="a", tpot_s=0.03)
    await serve(steps, request=request_)
    with_objective, without = steps.given
    assert with_objective[TIER_XARG] == PREMIUM
    assert with_objective[TENANT_XARG] == "a"
    assert with_objective[TPOT_XARG] == 0.03
    assert without[TIER_XARG] == STANDARD
    assert TPOT_XARG not in without


async def test_the_engines_scheduler_learns_whose_search_a_step_is_of():
    """vLLM's search asks its engine with parameters of its own, the same ones for all its steps."""
    local, steps, params = LocalPrefills(1), Play({}), SamplingParams(extra_args={})
    steps.at_home = ANSWER
    served = orchestrator(steps, local=local)

    async def search(request, info):
        for _ in range(2):
            outputs = steps._engine_client.generate({"prompt_token_ids": PROMPT}, params, "step")
            assert [each async for each in outputs]
        yield ANSWER

    steps.completions = search
    whose, before_s = context(tier=PREMIUM, tenant="a", tpot_s=0.03), time.monotonic()
    call = called(Request(stream=False).model_copy(update={"use_beam_search": True}))
    async with admitted(local, whose, 1, 60.0) as here:
        pieces = [piece async for piece in served.run_here(call, whose, here, "several_sequences")]
    assert pieces == [ANSWER]
    first, later = steps.given
    assert before_s + 2.0 <= first.pop(FIRST_DUE_XARG) <= time.monotonic() + 2.0
    assert (first.pop(SEARCH_STEP_XARG), later.pop(SEARCH_STEP_XARG)) == (False, True)
    assert before_s <= (since_s := first[DECODE_SINCE_XARG]) <= time.monotonic()
    assert first == later == {TIER_XARG: PREMIUM, TENANT_XARG: "a", DECODE_SINCE_XARG: since_s}
    assert params.extra_args == {}


@CASES
async def test_how_much_was_generated_is_known_when_the_client_leaves(request_, answer):
    steps, amount = Play({A: [[SECOND], 0.0, [THIRD], None]}), Amount()
    task = asyncio.create_task(serve(steps, request=request_, amount=amount))
    await until(lambda: amount.tokens >= 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert amount.tokens in {2, 3}
    amount = Amount()
    assert await serve(Play({A: ANSWER}), request=request_, amount=amount) == answer
    assert amount.tokens == 3
