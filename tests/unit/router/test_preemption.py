"""Placement on replicas whose running pass can be preempted."""

import pytest

from router.core import RouterCore
from router.fleet.prefill_replica import PlacedJob, PrefillView
from router.fleet.view import RouterLimits
from router.messages import Placed, PlacementRequested
from router.placement.least_harm import LeastHarm
from router.placement.policies import NewPrefill
from slo.errors import Rejected, RejectionReason
from slo.objectives import Objective
from slo.predict.prefill_time import PrefillPredictor
from slo.queue.slack import NO_DEADLINE
from slo.reports import DecodeReported, OutstandingJob, PrefillReported
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, TierPolicy

LINE = PrefillPredictor(per_token_s=0.001, fixed_s=0.0)
WEIGHTS = DEFAULT_TIERS.weights
POLICIES = {tier: TierPolicy(None, None, sheddable=True, weight=weight) for tier, weight in WEIGHTS.items()}
LONG = OutstandingJob(JobId("long"), BACKGROUND, 10_000, None)


def replica(*jobs, running="long", preemptible_in_s=0.1):
    """A replica that has been computing 10,000 tokens since 0 s, and has these (name, tokens, due, tier)."""
    known = PrefillView(ReplicaId("prefill-0"), LINE, 0.0, WEIGHTS)
    placed = [PlacedJob(JobId("long"), BACKGROUND, 10_000, NO_DEADLINE, 0.0)]
    placed += [PlacedJob(JobId(name), tier, tokens, due_s, 0.0) for name, tokens, due_s, tier in jobs]
    known.preemptible_in_s = preemptible_in_s
    known.replace(placed, JobId(running) if running else None, 0.0)
    return known


def core(**reports):
    """A router that knows replicas by how soon their running pass of 10,000 tokens can be stopped."""
    router = RouterCore(POLICIES, LeastHarm(), RouterLimits(stale_after_s=100.0))
    for name, preemptible_in_s in reports.items():
        report(router, name, preemptible_in_s)
    router.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0), 0.0)
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


def chosen(known, due_s, now_s=0.0):
    """What is predicted of 100 tokens more."""
    return LeastHarm().choose(NewPrefill(100, due_s, 4.0), [known], now_s)


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
        "it is not preempted",
        "it is preempted",
        "just in time",
        "too late even so",
        "in time even behind it",
        "with time to spare",
        "without a deadline",
    ],
)
def test_a_running_pass_is_preempted_for_what_would_be_late_and_is_feasible(preemptible_in_s, due_s, end_s):
    known = replica(preemptible_in_s=preemptible_in_s)
    assert chosen(known, due_s).end_s == pytest.approx(end_s)


def test_a_pass_that_ends_sooner_than_it_could_be_stopped_is_waited_for():
    assert chosen(replica(preemptible_in_s=0.5), 10.15, 9.9).end_s == pytest.approx(10.1)


def test_those_before_it_in_the_queue_run_before_it_too():
    known = replica(("first", 200, 0.4, PREMIUM))
    assert chosen(known, 0.5).end_s == pytest.approx(0.1 + 0.2 + 0.1)
    assert chosen(known, 0.35).end_s == pytest.approx(0.1 + 0.1)


def test_an_idle_replica_has_nothing_to_preempt():
    idle = replica(running=None)
    assert chosen(idle, 0.5).end_s == pytest.approx(0.1)


# The router


def test_a_short_deadline_is_feasible_behind_a_long_prefill_that_is_preempted():
    refused = core(stubborn=None).place(urgent(), 0.0)
    assert isinstance(refused, Rejected)
    assert refused.reason is RejectionReason.DEADLINE_INFEASIBLE
    placed = core(preemptible=0.1).place(urgent(), 0.0)
    assert isinstance(placed, Placed)
    assert placed.predicted_ttft_s == pytest.approx(0.2)


def test_of_two_busy_replicas_the_one_that_can_be_preempted_is_chosen():
    assert core(stubborn=None, preemptible=0.1).place(urgent(), 0.0).prefill_replica == "preemptible"


def test_what_even_a_stop_would_not_save_is_refused():
    assert isinstance(core(preemptible=0.1).place(urgent(tokens=450), 0.0), Rejected)


def test_the_last_report_is_the_word_that_counts():
    router = core(changing=0.1)
    report(router, "changing", None)
    assert isinstance(router.place(urgent(), 0.0), Rejected)
    report(router, "changing", 0.2)
    assert router.place(urgent(), 0.0).predicted_ttft_s == pytest.approx(0.3)


def test_a_second_urgent_request_queues_behind_the_first():
    router = core(preemptible=0.1)
    router.place(urgent(tokens=200, number=1), 0.0)
    second = router.place(urgent(tokens=100, ttft_s=0.6, number=2), 0.0)
    assert second.predicted_ttft_s == pytest.approx(0.1 + 0.2 + 0.1)
