"""Whether a step is preempted when one waiter at a time is compared with it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preemption_steps import asked, step
from queued_prefills import job

from slo.preemption.types import Keep, KeepReason, Preempt, PreemptionMode, PreemptionPolicy, PreemptReason
from slo.request import JobId

CONSERVATIVE, AGGRESSIVE = COMPARING = (PreemptionPolicy.CONSERVATIVE, PreemptionPolicy.AGGRESSIVE)
RELAXED = job("relaxed", due_s=9.0)
URGENT = job("urgent", due_s=2.0, weight=4.0)


def test_an_infeasible_runner_is_preempted_at_once_or_when_it_must():
    running, waiter = step(job("r", 1.9)), job("w", 20.0)
    for policy in COMPARING:
        assert asked(running, waiter, policy=policy) == Preempt(
            7, JobId("w"), PreemptReason.RUNNER_INFEASIBLE
        )
    assert asked(running, waiter).reason is KeepReason.WAITERS_IN_TIME


@pytest.mark.parametrize("policy", COMPARING)
def test_between_two_that_can_be_met_the_margin_decides(policy):
    running = step(job("r", 12.0))
    assert isinstance(asked(running, job("w", 9.9), policy=policy), Preempt)
    assert asked(running, job("w", 10.1), policy=policy).reason is KeepReason.MARGIN
    assert isinstance(asked(running, job("w", 10.1), policy=policy, margin=1.1), Preempt)


def test_the_margin_counts_from_now():
    running, waiter = step(job("r", 112.0)), job("w", 109.9)
    assert isinstance(asked(running, waiter, policy=CONSERVATIVE, now_s=100.0), Preempt)
    assert asked(running, waiter, policy=CONSERVATIVE, now_s=90.0).reason is KeepReason.MARGIN


@pytest.mark.parametrize("policy", COMPARING)
@given(
    waiter_due_s=st.floats(-20, 20),
    runner_due_s=st.floats(-20, 20),
    work_s=st.floats(0.01, 5),
    margin=st.floats(1, 10),
)
def test_no_margin_lets_the_less_urgent_pass(policy, waiter_due_s, runner_due_s, work_s, margin):
    """As a factor on S-EDF's signed priority, a margin would let one of two late ones stop the other."""
    running = step(job("r", runner_due_s), remaining_s=work_s)
    decision = asked(running, job("w", waiter_due_s, work_s), policy=policy, margin=margin)
    if waiter_due_s >= runner_due_s >= work_s or waiter_due_s < work_s:
        assert isinstance(decision, Keep)


def test_a_rescue_is_weighed_against_all_who_become_late_by_it():
    late = [job(f"late{n}", 2.9, weight=1.5) for n in range(2)]
    running = step(*late, job("bears it", 3.0, weight=9.0), job("infeasible", 1.0, weight=9.0))
    assert asked(running, job("w", 2.0, weight=3.0)).reason is KeepReason.WOULD_HARM
    assert asked(running, job("w", 2.0, weight=3.1)).reason is PreemptReason.RESCUE


def test_to_be_recomputed_harms_more_than_to_be_resumed():
    running = step(job("r", 4.0), remaining_s=2.0, restart_s=3.5)
    assert asked(running, job("w", 2.0)).reason is PreemptReason.RESCUE
    assert asked(running, job("w", 2.0), mode=PreemptionMode.RECOMPUTE).reason is KeepReason.WOULD_HARM


def test_predictions_of_the_runner_are_trusted_up_to_the_margin():
    running = step(RELAXED)
    assert asked(running, job("w", 3.3), margin=1.1).reason is KeepReason.WAITERS_IN_TIME
    assert asked(running, job("w", 3.3), margin=1.2).reason is PreemptReason.RESCUE


# What runs before a waiter counts as its work.


def test_work_ahead_makes_a_waiter_critical():
    ahead, waiter = job("ahead", 5.0, work_s=1.5), job("w", 4.0)
    assert asked(step(RELAXED), waiter).reason is KeepReason.WAITERS_IN_TIME
    assert asked(step(RELAXED), ahead, waiter) == Preempt(7, JobId("w"), PreemptReason.RESCUE)


def test_those_ahead_that_cannot_be_met_do_not_count():
    infeasible = job("infeasible", 0.5, work_s=10.0)
    assert asked(step(RELAXED), infeasible, URGENT) == Preempt(7, URGENT.job_id, PreemptReason.RESCUE)


def test_those_ahead_preempted_for_the_runner_do_not_count():
    bound = job("bound", 5.0, work_s=1.5, preempted_by=RELAXED.job_id)
    decision = asked(step(RELAXED), bound, job("w", 2.0))
    assert decision == Preempt(7, JobId("w"), PreemptReason.RESCUE)


def test_the_first_in_the_queue_that_qualifies_wins():
    modest, valuable = job("modest", 2.0, work_s=0.5), job("valuable", 2.1, work_s=0.5, weight=4.0)
    assert asked(step(job("r", 3.0)), modest, valuable).beneficiary == "modest"
    precious = step(job("r", 2.6, weight=2.0), remaining_s=2.2)
    assert asked(precious, modest, valuable).beneficiary == "valuable"


# When to look again.


def test_the_timer_is_set_to_when_the_first_waiter_becomes_critical():
    running = step(RELAXED, boundary_s=0.5)
    decision = asked(running, job("w", 5.0), job("v", 7.0), job("infeasible", 0.1), margin=1.0)
    assert decision == Keep(KeepReason.WAITERS_IN_TIME, recheck_at_s=3.5)


def test_a_decision_at_that_moment_still_saves_the_waiter():
    waiter = job("w", 5.0)
    kept = asked(step(RELAXED, boundary_s=0.5), waiter)
    overdue = step(job("r", 20.0), remaining_s=2.0, boundary_s=0.5)
    decision = asked(overdue, waiter, now_s=kept.recheck_at_s)
    assert decision == Preempt(7, JobId("w"), PreemptReason.RESCUE)


def test_no_timer_where_nobody_can_become_critical():
    assert asked(step(RELAXED), job("w"), job("infeasible", 0.1)).recheck_at_s == math.inf
