"""A prompt that decode computes itself, for want of a prefill replica or as nobody else can."""

import asyncio

import pytest
from played_replicas import (
    ABORTS,
    ANSWER,
    CASES,
    FAILED,
    FIRST,
    PROMPT,
    STREAMED,
    A,
    Counts,
    Play,
    Request,
    called,
    context,
    orchestrator,
    read,
    serve,
)
from vllm import SamplingParams

from decode_node.answers import REQUEST_FAILED, Piece
from decode_node.requests.local_prefills import LocalPrefills
from decode_node.requests.only_here import admitted
from decode_node.requests.underway import Amount
from slo.errors import Rejected, RejectionReason
from slo.replacement import FailureCause, Replaced
from slo.request import Party
from slo.tiers import STANDARD


@pytest.mark.parametrize("lost", [FailureCause.REPLICA_DIED, [FAILED]])
@pytest.mark.parametrize("place", [Replaced(None, 0.0), Rejected(RejectionReason.NO_REPLICA, 1.0)])
@CASES
async def test_without_another_prefill_replica_decode_computes_the_prompt(request_, answer, lost, place):
    counts, local = Counts(), LocalPrefills(1)
    steps = Play({A: lost}, [place])
    steps.at_home = ANSWER
    assert await serve(steps, counts, request=request_, local=local) == answer
    assert counts[("replica_died" if lost is not None and lost != [FAILED] else "pull_failed", "local")] == 1
    assert counts[("no_prefill_replica",)] == 1
    assert steps.pulls[-1] is None
    assert (local.computing, local.outstanding.total()) == (0, 0)


@CASES
async def test_a_request_that_was_placed_on_decode_alone_asks_for_no_prefill(request_, answer):
    steps = Play({})
    steps.at_home = ANSWER
    places = {"prefill_replica": None, "local_prefill": "cheaper_on_decode"}
    counts = Counts()
    assert await serve(steps, counts, request=request_, local=LocalPrefills(1), **places) == answer
    assert steps.prompts == []
    assert counts[("cheaper_on_decode",)] == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_what_only_decode_can_compute_waits_for_its_turn(stream):
    local, who = LocalPrefills(1), Party("", STANDARD)
    steps = Play({})
    steps.at_home = ANSWER
    served, pieces = orchestrator(steps, local=local), []

    async def answer():
        async with admitted(local, context(), 1, 60.0) as here:
            call = called(Request(stream=stream))
            answered = served.run_here(call, context(), here, "several_sequences")
            pieces.extend([piece.text if isinstance(piece, Piece) else piece async for piece in answered])

    async with local.claimed(who) as claim, local.turn(claim, 1):
        task = asyncio.create_task(answer())
        await asyncio.sleep(0.01)
        assert steps.given == [], "the engine has not heard of it"
    await task
    assert pieces == (STREAMED if stream else [ANSWER])
    assert (local.computing, local.outstanding, served._here) == (0, {}, {})


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_what_only_decode_can_compute_fails_with_the_engine_that_gives_it_up(stream, n):
    """And is no answer that was cut: another replica begins it anew."""
    steps = Play({})
    steps.at_home = [[FIRST], ABORTS]
    served = orchestrator(steps, local=LocalPrefills(n))
    async with admitted(LocalPrefills(n), context(), n, 60.0) as here:
        call = called(Request(stream=stream, n=n))
        pieces = await read(served.run_here(call, context(), here, "several_sequences"))
    assert set(pieces[:-1]) == ({STREAMED[0]} if stream else set())
    assert pieces[-1].error.type == REQUEST_FAILED


async def test_the_steps_of_a_beam_search_are_known_without_a_name():
    """vLLM's search asks its engine with parameters of its own, in tasks of its own."""
    local, heard, steps = LocalPrefills(1), [], Play({})
    steps.at_home = ANSWER
    served = orchestrator(steps, local=local)

    async def collected(outputs):
        return [each async for each in outputs]

    async def search(request, info):
        for beams in (1, 2):
            made = [
                steps._engine_client.generate(
                    {"prompt_token_ids": PROMPT}, SamplingParams(extra_args={}), "step"
                )
                for _ in range(beams)
            ]
            await asyncio.gather(*(asyncio.create_task(collected(one)) for one in made))
            heard.append((local.computing, local.outstanding.total()))
        yield ANSWER

    steps.completions = search
    request, amount = Request(stream=False), Amount()
    async with admitted(local, context(), 1, 60.0) as here:
        call = called(request.model_copy(update={"use_beam_search": True}), amount)
        assert [piece async for piece in served.run_here(call, context(), here, "several_sequences")] == [
            ANSWER
        ]
    assert heard == [(1, 0), (1, 0)], "the search counts as computing to its end"
    assert amount.tokens >= 3
    assert (local.computing, local.outstanding) == (0, {})
    assert local.given_up_after < 0, "all of it has been computed"
    assert (
        len(await collected(steps._engine_client.generate({}, SamplingParams(extra_args={}), "other"))) == 3
    )
