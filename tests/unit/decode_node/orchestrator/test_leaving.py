"""A request that leaves an engine without memory goes on elsewhere, or is computed here."""

import asyncio

import pytest
from played_replicas import (
    ANSWER,
    FIRST,
    LEAVES,
    PROMPT,
    SECOND,
    STREAMED,
    WHOLE,
    A,
    B,
    C,
    Counts,
    D,
    Play,
    Request,
    refusal,
    serve,
)
from waiting import until

from decode_node.carrying import PRESSURE_SCHEDULER, SCHEDULER
from decode_node.requests.leaving import MAY_LEAVE_XARG
from decode_node.requests.local_prefills import LocalPrefills
from slo.errors import Rejected, RejectionReason
from slo.replacement import FailureCause, Replaced
from slo.request import DECODE_SINCE_XARG

LEAVING = pytest.mark.parametrize("more", [[], [SECOND]], ids=["alone", "with a token"])


@LEAVING
@pytest.mark.parametrize(("request_", "answer"), [(Request(), STREAMED), (WHOLE, [ANSWER])], ids=str)
async def test_one_that_leaves_the_engine_goes_on_after_its_last_token(request_, answer, more):
    counts = Counts()
    plays = {A: [[SECOND], (LEAVES, [])] if not more else [(LEAVES, more)], B: ANSWER}
    steps = Play(plays, [Replaced(B, 0.2)], scheduler=PRESSURE_SCHEDULER)
    budgets = {"ttft_budget_s": 2.0, "explicit_e2e_s": 8.0}
    assert await serve(steps, counts, request=request_, leaves=True, **budgets) == answer
    assert steps.prompts == [PROMPT, [*PROMPT, FIRST]], "all but the token that is computed next"
    assert steps.carried == [FIRST, SECOND]
    (asked,) = steps.asked
    assert (asked.cause, asked.failed_replicas, asked.lost_replica) == (FailureCause.LEFT, (), None)
    assert (asked.tokens, asked.ttft_budget_s, asked.explicit_deadline) == (101, 2.0, False)
    assert asked.explicit_e2e_s is None
    assert len(steps.prompts[-1]) == 101, "decode computes the last token that it carries"
    assert [one.attempt_id for one in steps.contexts] == ["job", "job#1"]
    assert steps.pulls == [{"at": A}, {"at": B}]
    assert steps.released == [], "it had been pulled"
    first, back = (given[DECODE_SINCE_XARG] for given in steps.given)
    assert first < back, "its engine knows of the time before, or has forgotten it"
    assert counts == {("left", "router"): 1}


async def test_leaving_is_no_failure_and_may_happen_more_often_than_one_is_placed_again():
    leaves = [(LEAVES, [])]
    steps = Play({A: leaves, B: leaves, C: leaves}, [Replaced(B, 0.1), Replaced(C, 0.1), Replaced(D, 0.1)])
    steps.plays[D] = ANSWER
    assert await serve(steps, limit=1, leaves=True) == STREAMED


@pytest.mark.parametrize("place", [Rejected(RejectionReason.NO_REPLICA, 1.0), Replaced(None, 0.0)])
@pytest.mark.parametrize("local", [None, LocalPrefills(1)], ids=["may not", "may"])
async def test_one_that_leaves_and_that_nobody_takes_is_computed_here(place, local):
    counts = Counts()
    steps = Play({A: [(LEAVES, [])]}, [place])
    steps.again = ANSWER
    assert await serve(steps, counts, leaves=True, local=local) == STREAMED
    assert steps.pulls[-1] is None
    assert steps.prompts == [PROMPT], "no prefill replica was asked"
    assert counts["left", "local"] == 1


@pytest.mark.parametrize("request_", [Request(), WHOLE], ids=str)
async def test_one_that_has_left_counts_as_computed_here_until_its_first_token(request_):
    steps, local = Play({A: [(LEAVES, [])]}, [Rejected(RejectionReason.NO_REPLICA, 1.0)]), LocalPrefills(1)
    steps.again = [1.0, [SECOND], None]
    task = asyncio.create_task(serve(steps, request=request_, leaves=True, local=local))
    await until(lambda: len(steps.pulls) == 2)
    assert (local.computing, local.outstanding.total()) == (1, 0)
    await until(lambda: local.computing == 0)
    assert not task.done(), "its answer goes on"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert local.computing == 0


async def test_one_that_has_left_and_whose_client_leaves_does_not_count_any_more():
    steps, local = Play({A: [(LEAVES, [])]}, [Rejected(RejectionReason.NO_REPLICA, 1.0)]), LocalPrefills(1)
    steps.again = [None]
    task = asyncio.create_task(serve(steps, leaves=True, local=local))
    await until(lambda: local.computing == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert local.computing == 0


@pytest.mark.parametrize(
    "fails", [FailureCause.REPLICA_DIED, FailureCause.REQUEST_FAILED, refusal(404)], ids=str
)
async def test_whatever_fails_after_it_has_left_decode_computes_it(fails):
    counts = Counts()
    steps = Play({A: [(LEAVES, [])], B: fails}, [Replaced(B, 0.1)])
    steps.again = ANSWER
    assert await serve(steps, counts, limit=0, leaves=True) == STREAMED
    assert steps.pulls[-1] is None
    assert counts[("left",)] == 1


async def test_only_what_can_be_carried_may_leave():
    for asked, scheduler, leaves, expected in (
        (Request(), PRESSURE_SCHEDULER, True, True),
        (Request(), PRESSURE_SCHEDULER, False, False),
        (Request(), SCHEDULER, True, False),
        (Request(json_object=True), PRESSURE_SCHEDULER, True, False),
    ):
        steps = Play({A: ANSWER}, scheduler=scheduler)
        await serve(steps, request=asked, leaves=leaves)
        assert bool(steps.given[0].get(MAY_LEAVE_XARG)) is expected
