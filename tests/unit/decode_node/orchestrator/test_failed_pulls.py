"""A pull that fails is placed again and repeats nothing; one that has ended needs its replica no more."""

import asyncio
import time

import pytest
from played_replicas import (
    ANSWER,
    CASES,
    FAILED,
    FIRST,
    RESAMPLED,
    SECOND,
    STREAMED,
    THIRD,
    A,
    B,
    Counts,
    D,
    Play,
    Request,
    serve,
)

from decode_node.requests import local_decode
from decode_node.requests.local_prefills import LocalPrefills
from router.core import RouterCore
from router.messages import PlacementRequested
from router.placement.least_harm import LeastHarm
from slo.errors import Rejected
from slo.predict.prefill_time import PrefillPredictor
from slo.replacement import FailureCause, Replaced
from slo.reports import DecodeReported, PrefillReported, ReplicaGone
from slo.request import DECODE_SINCE_XARG
from slo.tiers import STANDARD, TierPolicy


@CASES
async def test_once_its_kv_has_come_it_does_not_need_the_prefill_replica_any_more(
    request_, answer, monkeypatch
):
    monkeypatch.setattr(local_decode, "PULLED_S", 0.0)
    asked_for = []

    async def dies(replica):
        asked_for.append(replica)
        return FailureCause.REPLICA_DIED

    own = [[FIRST], [SECOND]] if request_ is RESAMPLED else [[SECOND]]
    steps = Play({A: [*own, 0.2, [THIRD]]})
    assert await serve(steps, request=request_, ask=dies) == answer
    assert steps.asked == []
    assert steps.released == []


@CASES
async def test_a_failed_pull_is_placed_again_and_repeats_nothing(request_, answer):
    counts = Counts()
    steps = Play({A: [FAILED], B: ANSWER}, [Replaced(B, 0.1)])
    assert await serve(steps, counts, request=request_) == answer
    assert counts[("pull_failed", "router")] == 1
    (asked,) = steps.asked
    assert (asked.lost_replica, asked.failed_replicas, asked.avoided_replicas) == (None, (), (A,))
    assert steps.contexts[1].failed_replicas == (A,), "Serve would rather choose another one, too"
    first, again = (given[DECODE_SINCE_XARG] for given in steps.given)
    assert first == again <= time.monotonic(), "it keeps its place, and its pace counts from the same token"
    assert steps.released == [(A, "job")]


@pytest.mark.parametrize("request_", [Request(), Request(json_object=True)], ids=["free", "grammar"])
@pytest.mark.parametrize("ails", [FailureCause.REPLICA_DIED, RuntimeError("lost"), None], ids=str)
async def test_a_failed_pull_is_the_replicas_fault_if_it_does_not_say_that_it_serves(ails, request_):
    async def ask(replica):
        if replica != A or "failed" not in steps.engine:
            return None
        if ails is None:
            await asyncio.Event().wait()
        if isinstance(ails, Exception):
            raise ails
        return ails

    steps = Play({A: [FAILED], B: ANSWER}, [Replaced(B, 0.1)])
    assert await serve(steps, request=request_, ask=ask) == STREAMED
    (asked,) = steps.asked
    assert (asked.lost_replica, asked.failed_replicas, asked.avoided_replicas) == (A, (A,), ())
    assert asked.cause is FailureCause.PULL_FAILED


def routed(*prefill):
    """A router that has heard of these replicas, and answers as the real one does."""
    tier = TierPolicy(2.0, None, sheddable=True, weight=1.0)
    core = RouterCore({STANDARD: tier}, LeastHarm())
    for name in prefill:
        core.prefill_reported(PrefillReported(name, PrefillPredictor(1e-4, 0.0), (), None, 0.0), 0.0)
    core.view.decode_reported(DecodeReported(D, 0.0, 0), 0.0)

    class Router(Play):
        async def place(self, request):
            self.asked.append(request)
            if request.lost_replica is not None:
                core.view.replica_gone(ReplicaGone(request.lost_replica))
            placed = core.place(PlacementRequested.again(request), 0.0)
            if isinstance(placed, Rejected):
                return placed
            return Replaced(placed.prefill_replica, placed.handoff_s)

    return core, Router


@CASES
async def test_the_only_prefill_replica_is_used_again_after_one_failed_pull_and_stays_with_the_router(
    request_, answer
):
    core, router = routed(A)
    steps = router({A: [FAILED]})
    steps.again = ANSWER
    assert await serve(steps, request=request_, local=LocalPrefills(1)) == answer
    assert [one.prefill_replica for one in steps.contexts] == [A, A]
    assert list(core.view.prefill) == [A]


async def test_with_a_grammar_too_the_only_prefill_replica_is_used_again_after_one_failed_pull():
    """Though it may have been the grammar that failed, which vLLM reports alike."""
    _, router = routed(A)
    steps = router({A: [FAILED]})
    steps.again = ANSWER
    assert await serve(steps, request=Request(json_object=True)) == STREAMED
    assert [one.prefill_replica for one in steps.contexts] == [A, A]


@CASES
async def test_after_two_failed_pulls_from_the_only_prefill_replica_decode_computes_the_prompt(
    request_, answer
):
    core, router = routed(A)
    counts, steps = Counts(), router({A: [FAILED]})
    steps.at_home = ANSWER
    assert await serve(steps, counts, request=request_, local=LocalPrefills(1)) == answer
    assert [one.prefill_replica for one in steps.contexts] == [A, A]
    assert counts["pull_failed", "router"] == counts["pull_failed", "local"] == 1
    assert list(core.view.prefill) == [A]


async def test_another_replica_is_preferred_to_one_that_a_pull_has_failed_from():
    core, router = routed(A, B)
    steps = router({A: [FAILED], B: ANSWER})
    assert await serve(steps) == STREAMED
    assert [one.prefill_replica for one in steps.contexts] == [A, B]
    assert list(core.view.prefill) == [A, B]


@CASES
async def test_attempts_on_one_replica_have_names_of_their_own(request_, answer):
    steps = Play({A: [FAILED]}, [Replaced(A, 0.1), Replaced(B, 0.1)])
    steps.plays[B] = ANSWER
    assert await serve(steps, request=request_) == answer
    assert [one.attempt_id for one in steps.contexts] == ["job", "job#1", "job#2"]
    assert steps.released == [(A, "job"), (A, "job#1")]
