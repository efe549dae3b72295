"""Placement on replicas whose running pass makes way."""

import pytest

from router.core import RouterCore, RouterLimits
from router.fleet.prefill_replica import PlacedJob, PrefillReplica
from router.messages import Placed, PlacementRequested, Rejected
from router.placement.policies import LeastSlackLoss
from slo.errors import RejectionReason
from slo.objectives import Objective
from slo.predict.prefill_time import PrefillPredictor
from slo.queue.slack import NO_DEADLINE
from slo.reports import DecodeReported, OutstandingJob, PrefillReported
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, PREMIUM, STANDARD, TierPolicy

LINE = PrefillPredictor(per_token_s=0.001, fixed_s=0.0)
WEIGHTS = {PREMIUM: 4.0, STANDARD: 2.0, BACKGROUND: 1.0}
POLICIES = {tier: TierPolicy(None, None, sheddable=True, weight=weight) for tier, weight in WEIGHTS.items()}
LONG = OutstandingJob(JobId("long"), BACKGROUND, 10_000, None)


def replica(*jobs, running="long", preemptible_in_s=0.1):
    """A replica that has been computing 10,000 tokens since 0 s, and has these (name, tokens, due, tier)."""
    known = PrefillReplica(ReplicaId("prefill-0"), LINE, 0.0, WEIGHTS)
    placed = [PlacedJob(JobId("long"), BACKGROUND, 10_000, NO_DEADLINE, 0.0)]
    placed += [PlacedJob(JobId(name), tier, tokens, due_s, 0.0) for name, tokens, due_s, tier in jobs]
    known.preemptible_in_s = preemptible_in_s
    known.replace(placed, JobId(running) if running else None, 0.0, 0.0)
    return known


def core(**reports):
    """A router that knows replicas by how soon their running pass of 10,000 tokens makes way."""
    router = RouterCore(POLICIES, LeastSlackLoss(), RouterLimits(stale_after_s=100.0))
    for name, preemptible_in_s in reports.items():
        report(router, name, preemptible_in_s)
    router.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0), 0.0)
    return router


def report(router, name, preemptible_in_s, *jobs, now_s=0.0, running_for_s=0.0):
    long = OutstandingJob(JobId(f"long-{name}"), LONG.tier, LONG.tokens, None)
    router.prefill_reported(
        PrefillReported(ReplicaId(name), LINE, (long, *jobs), long.job_id, running_for_s, preemptible_in_s),
        now_s,
    )


def urgent(tokens=100, ttft_s=0.5, number=1):
    return PlacementRequested(JobId(f"job-{number}"), Objective(PREMIUM, ttft_s, None), True, tokens, 0)


# One replica


@pytest.mark.parametrize(
    ("preemptible_in_s", "due_s", "end_s"),
    [
        (None, 0.5, 10.1),
        (0.1, 0.5, 0.2),
        (0.1, 0.2, 0.2),
        (0.1, 0.19, 10.1),
        (0.1, 10.1, 10.1),
        (0.1, 60.0, 10.1),
        (0.1, NO_DEADLINE, 10.1),
    ],
    ids=[
        "it does not make way",
        "it makes way",
        "just in time",
        "too late even so",
        "in time even behind it",
        "with time to spare",
        "without a deadline",
    ],
)
def test_a_running_pass_makes_way_for_what_would_be_late_and_can_be_met(preemptible_in_s, due_s, end_s):
    known = replica(preemptible_in_s=preemptible_in_s)
    assert known.end_s(100, due_s, 0.0) == pytest.approx(end_s)
    fit = known.fit(100, due_s, 4.0, 0.0)
    assert fit.end_s == pytest.approx(end_s)
    assert fit.lateness_s == pytest.approx(4.0 * max(0.0, end_s - due_s) if due_s < NO_DEADLINE else 0.0)


def test_a_pass_that_ends_sooner_than_it_would_make_way_is_waited_for():
    assert replica(preemptible_in_s=0.5).end_s(100, 10.15, 9.9) == pytest.approx(10.1)


def test_those_before_it_in_the_queue_run_before_it_too():
    known = replica(("first", 200, 0.4, PREMIUM))
    assert known.end_s(100, 0.5, 0.0) == pytest.approx(0.1 + 0.2 + 0.1)
    assert known.end_s(100, 0.35, 0.0) == pytest.approx(0.1 + 0.1)


def test_an_idle_replica_has_nothing_that_would_make_way():
    idle = replica(running=None)
    assert idle.end_s(100, 0.5, 0.0) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("due_s", "harm"),
    [(10.25, 2.0 * 0.05), (10.4, 0.0), (NO_DEADLINE, 0.0), (5.0, 2.0 * 0.1)],
    ids=["it is made late", "it has room", "it has no deadline", "it is late anyway and gets later"],
)
def test_the_harm_to_those_behind_it_counts_as_if_it_had_waited(due_s, harm):
    """The work is the same in whatever order: who waits behind the stopped pass ends later by the new one."""
    known = replica(("behind", 200, due_s, STANDARD))
    fit = known.fit(100, 0.5, 4.0, 0.0)
    assert fit.end_s == pytest.approx(0.2)
    assert fit.lateness_s == pytest.approx(harm)


def test_the_harm_to_the_pass_that_makes_way_counts_too():
    known = replica()
    runner = PlacedJob(JobId("runner"), STANDARD, 1_000, 1.05, 0.0)
    known.replace([runner], runner.job_id, 0.0, 0.0)
    fit = known.fit(200, 0.5, 4.0, 0.0)
    assert fit.end_s == pytest.approx(0.3)
    assert fit.lateness_s == pytest.approx(2.0 * 0.15), "it ends at 1.2 s"


# The router


def test_a_short_deadline_is_feasible_behind_a_long_prefill_that_makes_way():
    refused = core(stubborn=None).place(urgent(), 0.0)
    assert isinstance(refused, Rejected)
    assert refused.reason is RejectionReason.DEADLINE_INFEASIBLE
    placed = core(yielding=0.1).place(urgent(), 0.0)
    assert isinstance(placed, Placed)
    assert placed.predicted_ttft_s == pytest.approx(0.2)


def test_of_two_busy_replicas_the_one_that_makes_way_is_chosen():
    assert core(stubborn=None, yielding=0.1).place(urgent(), 0.0).prefill_replica == "yielding"


def test_what_even_a_stop_would_not_save_is_refused():
    assert isinstance(core(yielding=0.1).place(urgent(tokens=450), 0.0), Rejected)


def test_the_last_report_is_the_word_that_counts():
    router = core(changing=0.1)
    report(router, "changing", None)
    assert isinstance(router.place(urgent(), 0.0), Rejected)
    report(router, "changing", 0.2)
    assert router.place(urgent(), 0.0).predicted_ttft_s == pytest.approx(0.3)


def test_a_second_urgent_request_queues_behind_the_first():
    router = core(yielding=0.1)
    router.place(urgent(tokens=200, number=1), 0.0)
    second = router.place(urgent(tokens=100, ttft_s=0.6, number=2), 0.0)
    assert second.predicted_ttft_s == pytest.approx(0.1 + 0.2 + 0.1)
