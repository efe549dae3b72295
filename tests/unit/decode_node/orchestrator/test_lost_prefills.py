"""Until its KV cache is here, a request whose prefill is lost is prefilled elsewhere, within its limits."""

import asyncio

import pytest
from played_replicas import ANSWER, CASES, FAILED, STREAMED, A, B, C, Counts, D, Play, serve

from decode_node.requests.local_prefills import LocalPrefills
from slo.errors import Rejected, RejectionReason
from slo.replacement import FailureCause, Replaced
from slo.tiers import PREMIUM


@CASES
@pytest.mark.parametrize("lost", [FailureCause.REPLICA_DIED, FailureCause.ENGINE_DIED])
async def test_before_or_during_the_prefill_the_router_finds_another_place(request_, answer, lost):
    counts = Counts()
    steps = Play({A: lost, B: ANSWER}, [Replaced(B, 0.3)])
    assert await serve(steps, counts, request=request_) == answer
    assert [one.prefill_replica for one in steps.contexts] == [A, B]
    assert counts[(lost.value, "router")] == 1
    (asked,) = steps.asked
    assert (asked.failed_replicas, asked.cause, asked.decode_replica, asked.tokens) == ((A,), lost, D, 100)
    assert asked.lost_replica == A
    assert asked.ttft_budget_s == pytest.approx(2.0, abs=0.2)
    again = steps.contexts[1]
    assert (again.handoff_s, again.failed_replicas, again.prompt_bytes) == (0.3, (A,), 0)
    assert again.ttft_budget_s <= asked.ttft_budget_s


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("cause", [FailureCause.ENGINE_DIED, FailureCause.REPLICA_DIED])
async def test_without_a_router_the_dead_replica_that_serve_chooses_again_is_not_the_requests_fault(
    cause, limit
):
    counts, steps = Counts(), Play({A: cause}, [TimeoutError(), TimeoutError()], serve=A)
    steps.at_home = ANSWER
    assert await serve(steps, counts, limit=limit, local=LocalPrefills(1)) == STREAMED
    assert (counts[(cause.value, "serve")], counts[(cause.value, "local")]) == (1, 1)
    assert len(steps.asked) == 2


@CASES
async def test_a_replica_that_fails_one_request_is_not_lost_to_others(request_, answer):
    counts = Counts()
    steps = Play({A: FailureCause.REQUEST_FAILED, B: ANSWER}, [Replaced(B, 0.1)])
    assert await serve(steps, counts, request=request_) == answer
    (asked,) = steps.asked
    assert (asked.failed_replicas, asked.lost_replica) == ((A,), None)


@CASES
async def test_without_the_router_serve_chooses_and_avoids_the_lost_replica(request_, answer):
    counts = Counts()
    steps = Play({A: FailureCause.REPLICA_DIED, B: ANSWER}, [RuntimeError("the router has died")])
    assert await serve(steps, counts, request=request_) == answer
    again = steps.contexts[1]
    assert (again.prefill_replica, again.failed_replicas) == (None, (A,))
    assert counts[("replica_died", "serve")] == 1


async def test_a_router_that_has_just_started_or_would_let_nobody_in_does_not_end_an_admitted_request():
    for reason in (RejectionReason.NOT_SETTLED, RejectionReason.OVER_SHARE):
        steps = Play({A: FailureCause.REPLICA_DIED, B: ANSWER}, [Rejected(reason, 1.0)])
        assert await serve(steps) == STREAMED


@pytest.mark.parametrize("limit", [0, 1, 2])
async def test_it_is_placed_again_so_many_times_and_then_refused(limit):
    counts = Counts()
    dying = dict.fromkeys((A, B, C), FailureCause.REPLICA_DIED)
    steps = Play(dying, [Replaced(B, 0.1), Replaced(C, 0.1)])
    (refused,) = await serve(steps, counts, limit=limit)
    assert (refused.error.code, refused.error.type) == (503, "prefill_failed")
    assert "try again" in refused.error.message
    assert len(steps.contexts) == limit + 1
    assert counts[("replica_died", "limit")] == 1
    assert [request.failed_replicas for request in steps.asked] == [(A,), (A, B)][:limit]


@pytest.mark.parametrize(
    ("reason", "code", "kind", "retry_after"),
    [
        (RejectionReason.NO_REPLICA, 503, "prefill_failed", "10"),
        (RejectionReason.DEADLINE_INFEASIBLE, 429, "deadline_passed", None),
    ],
)
async def test_it_is_refused_for_what_the_router_says(reason, code, kind, retry_after):
    steps = Play({A: FailureCause.REPLICA_DIED}, [Rejected(reason, 1.0)])
    (refused,) = await serve(steps)
    assert (refused.error.code, refused.error.type, refused.error.param) == (code, kind, retry_after)


async def test_with_a_first_token_no_deadline_for_it_ends_the_answer():
    steps = Play({A: [FAILED], B: ANSWER}, [Rejected(RejectionReason.DEADLINE_INFEASIBLE, 1.0)])
    assert await serve(steps, ttft_budget_s=-1.0, explicit_deadline=True) == STREAMED


async def test_a_named_deadline_that_has_passed_is_not_even_asked_for():
    steps = Play({A: FailureCause.REPLICA_DIED})
    (refused,) = await serve(steps, ttft_budget_s=-1.0, explicit_deadline=True)
    assert "x-slo-ttft-ms" in refused.error.message
    assert steps.asked == []


async def test_an_end_of_the_clients_own_counts_with_what_is_left_of_it():
    steps = Play({A: FailureCause.REPLICA_DIED, B: ANSWER}, [Replaced(B, 0.1)])
    assert await serve(steps, explicit_e2e_s=9.0) == STREAMED
    (asked,) = steps.asked
    assert 8.0 < asked.explicit_e2e_s < 9.0
    steps = Play({A: FailureCause.REPLICA_DIED})
    (refused,) = await serve(steps, explicit_e2e_s=0.0)
    assert refused.error.type == "deadline_passed"
    assert "x-slo-e2e-ms" in refused.error.message
    assert steps.asked == []


async def test_nor_does_it_end_an_answer_with_a_first_token():
    steps = Play({A: [FAILED], B: ANSWER}, [Replaced(B, 0.1)])
    assert await serve(steps, explicit_e2e_s=-1.0) == STREAMED
    (asked,) = steps.asked
    assert asked.explicit_e2e_s is None


@pytest.mark.parametrize("given", [{"tier": PREMIUM, "ttft_budget_s": -1.0}, {"ttft_budget_s": None}])
async def test_those_who_may_not_be_shed_or_have_no_deadline_are_always_placed_again(given):
    steps = Play({A: FailureCause.REPLICA_DIED, B: ANSWER}, [Replaced(B, 0.1)])
    assert await serve(steps, explicit_deadline=True, **given) == STREAMED


@pytest.mark.parametrize("stuck", [None, [None]])
async def test_a_replica_that_falls_silent_in_prefill_or_pull_is_left(stuck):
    async def silent(replica):
        if replica == A:
            await asyncio.Event().wait()

    counts = Counts()
    steps = Play({A: stuck, B: ANSWER}, [Replaced(B, 0.1)])
    assert await asyncio.wait_for(serve(steps, counts, ask=silent), 3) == STREAMED
    assert counts == {("silent", "router"): 1}
    assert steps.released == [(A, "job")], "it may live, and then has the work for nothing"


async def test_nobody_there_at_all():
    async def nobody(_):
        return FailureCause.NO_REPLICA

    steps = Play({B: None}, [None])
    (refused,) = await serve(steps, ask=nobody, prefill_replica=None)
    assert refused.error.type == "no_replica"
    assert "no prefill replica is running" in refused.error.message


async def test_nobody_there_any_more_after_the_one_that_had_it():
    """What was begun and lost may have ended its replica; who sends it again must know."""

    async def nobody(_):
        return FailureCause.NO_REPLICA

    steps = Play({A: FailureCause.REPLICA_DIED, B: None}, [None, None])
    (refused,) = await serve(steps, ask=nobody)
    assert [one.prefill_replica for one in steps.contexts] == [A, None]
    assert refused.error.type == "prefill_failed"


@pytest.mark.parametrize("where", [None, [None]])
async def test_a_client_that_leaves_releases_the_prefill(where):
    steps = Play({A: where})
    task = asyncio.create_task(serve(steps))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps.released == [(A, "job")]
