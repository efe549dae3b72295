"""Whether a step makes way or goes on, why, for which step, and how fast that is decided."""

import dataclasses
import statistics
import time

import pytest
from governors import BOUNDARIES, LONG, NOTHING_REACHED, URGENT, governor, job, view
from hypothesis import given
from hypothesis import strategies as st
from published import running, suspended

from prefill_node.board.messages import Reached
from slo.preemption.types import Keep, KeepReason, Preempt, PreemptionMode, PreemptReason
from slo.queue.order import QueueOrder
from slo.request import JobId
from slo.tiers import DEFAULT_TIERS, PREMIUM


def test_a_long_step_makes_way_for_a_waiter_that_would_be_late():
    decision = governor(LONG, URGENT).decide(view(running("long")), NOTHING_REACHED, 0.0)
    assert decision == Preempt(7, JobId("urgent"), PreemptReason.RESCUE)


@pytest.mark.parametrize(
    ("step", "accepted", "reason"),
    [
        (running("long"), (LONG,), KeepReason.NOBODY_WAITS),
        (None, (LONG, URGENT), KeepReason.IDLE),
        (running("long", stoppable=False), (LONG, URGENT), KeepReason.NOT_STOPPABLE),
        (running(stoppable=False), (LONG, URGENT), KeepReason.NOT_STOPPABLE),
        (running("urgent"), (LONG, URGENT), KeepReason.WAITERS_IN_TIME),
        (running("long"), (LONG, job("lost", 400, deadline_s=0.3)), KeepReason.WAITERS_INFEASIBLE),
    ],
    ids=[
        "nobody waits",
        "nothing runs",
        "it cannot stop",
        "its members are not known",
        "none has a deadline",
        "it would be late anyway",
    ],
)
def test_a_step_goes_on_and_says_why(step, accepted, reason):
    decision = governor(*accepted).decide(view(step), NOTHING_REACHED, 0.0)
    assert isinstance(decision, Keep)
    assert decision.reason is reason


def test_nothing_is_decided_before_the_scheduler_has_published_anything():
    assert governor(LONG, URGENT).decide(None, NOTHING_REACHED, 0.0) == Keep(KeepReason.IDLE)


@pytest.mark.parametrize(
    "off", [{"mode": PreemptionMode.OFF}, {"boundaries": 0}], ids=["mode off", "no boundaries"]
)
def test_a_governor_that_is_off_stops_nothing(off):
    idle = governor(LONG, URGENT, **off)
    idle.ledger.ended(JobId("long"), abandoned=True)
    assert not idle.is_on
    assert idle.decide(view(running("long")), NOTHING_REACHED, 0.0) == Keep(KeepReason.OFF)
    assert idle.preemptible_in_s(view(running("long")), NOTHING_REACHED, 0.0) is None


def test_a_governor_that_has_failed_stops_nothing_nor_says_that_anything_makes_way():
    failed = governor(LONG, URGENT)
    failed.has_failed = True
    assert not failed.is_on
    assert failed.preemptible_in_s(view(running("long")), NOTHING_REACHED, 0.0) is None


def test_a_step_of_no_job_makes_way_for_anybody():
    """Such as a measurement, or one whose client has left while others of it are still there."""
    decision = governor(URGENT).decide(view(running("")), NOTHING_REACHED, 0.0)
    assert decision == Preempt(7, JobId("urgent"), PreemptReason.RESCUE)


def test_a_step_that_waits_for_the_waiter_is_not_what_the_waiter_is_stopped_for():
    """`long` was preempted for `urgent`, so `urgent` is not stopped for `long`, however urgent that is."""
    urgent = job("urgent", 1000, deadline_s=60.0)
    long = job("long", 100, deadline_s=0.5, tier=PREMIUM)
    stopped = suspended("long", tokens=100, preempted_by="urgent")
    decision = governor(urgent, long).decide(view(running("urgent"), stopped), NOTHING_REACHED, 0.0)
    assert isinstance(decision, Keep)
    assert decision.reason is KeepReason.PROTECTED


def test_a_suspended_step_can_itself_be_rescued():
    """Nobody whom it was preempted for is left, and its deadline comes close."""
    rescued = job("rescued", 1000, deadline_s=0.7, tier=PREMIUM)
    stopped = suspended("rescued", boundary=8)
    decision = governor(LONG, rescued).decide(view(running("long"), stopped), NOTHING_REACHED, 0.0)
    assert decision == Preempt(7, JobId("rescued"), PreemptReason.RESCUE)


def test_a_step_is_ordered_once_and_the_next_one_anew():
    two = governor(LONG, URGENT)
    first = view(running("long", step_id=7))
    assert isinstance(two.decide(first, NOTHING_REACHED, 0.0), Preempt)
    assert two.decide(first, NOTHING_REACHED, 0.0) == Keep(KeepReason.IDLE)
    again = two.decide(view(running("long", step_id=8)), NOTHING_REACHED, 0.0)
    assert again == Preempt(8, JobId("urgent"), PreemptReason.RESCUE)


@given(
    shown=st.integers(1, 1 << 39),
    reached=st.builds(Reached, st.integers(0, 1 << 39), st.integers(0, BOUNDARIES - 1)),
    late_s=st.floats(0.0, 0.4),
)
def test_an_order_never_names_another_step_than_the_one_that_was_published(shown, reached, late_s):
    """So a view that is out of date can only produce an id that matches nothing any more."""
    decision = governor(LONG, URGENT).decide(view(running("long", step_id=shown)), reached, late_s)
    if isinstance(decision, Preempt):
        assert decision.step_id == shown


def test_a_decision_takes_less_than_a_millisecond_with_a_hundred_waiting():
    waiting = [
        job(f"job-{n}", 100 + n, 60.0 + n % 37, DEFAULT_TIERS.names[n % 3], arrived_s=n * 1e-3)
        for n in range(100)
    ]
    many = governor(LONG, *waiting, order=QueueOrder.FEASIBLE_SET)
    shown = view(running("long"), suspended("job-1", "job-2"), suspended("job-3"))
    took_s = []
    for _ in range(200):
        started_s = time.perf_counter()
        many.decide(shown, Reached(7, 3), 0.0)
        took_s.append(time.perf_counter() - started_s)
    median_us = statistics.median(took_s) * 1e6
    print(f"median decision with 100 waiting: {median_us:.0f} µs")  # noqa: T201 - shown with pytest -s
    assert median_us < 5 * 200


def test_deciding_changes_nothing_that_was_accepted():
    two = governor(LONG, URGENT)
    before = dataclasses.replace(two.ledger, accepted=dict(two.ledger.accepted))
    two.decide(view(running("long"), suspended("other")), NOTHING_REACHED, 0.0)
    assert two.ledger.accepted == before.accepted
