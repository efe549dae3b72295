"""Who waits, in which order, and as what a suspended step does."""

import pytest
from governors import LONG, URGENT, governor, job, names, view
from published import Account, running, suspended

from slo.tiers import PREMIUM, STANDARD


def test_who_runs_does_not_wait():
    two = governor(LONG, URGENT)
    assert names(two.waiting(view(running("long")), 0.0)) == ["urgent"]
    assert names(two.waiting(view(running("long", "urgent")), 0.0)) == []
    assert names(two.waiting(view(), 0.0)) == ["urgent", "long"]


def test_waiters_stand_in_the_order_of_the_queue():
    many = governor(job("none"), job("late", 900, 0.5), job("second", 100, 3.0), job("first", 100, 2.0))
    assert names(many.waiting(view(), 0.0)) == ["first", "second", "late", "none"]


def test_a_suspended_step_waits_once_for_all_its_members():
    three = governor(
        job("a", 400, deadline_s=9.0, tier=STANDARD),
        job("b", 600, deadline_s=5.0, tier=PREMIUM),
        job("c", 100, deadline_s=20.0),
    )
    stopped = suspended("a", "b", tokens=1000, boundary=4)
    step, other = three.waiting(view(None, stopped), 0.0)
    assert (step.job_id, step.deadline_s, step.weight) == ("b", 5.0, 6.0)
    assert step.remaining_s == pytest.approx(0.6), "the rest of the step, not of one member"
    assert other.job_id == "c"


def test_the_most_urgent_member_is_one_that_can_still_be_met():
    two = governor(job("lost", deadline_s=0.1), job("met", deadline_s=5.0))
    (step,) = two.waiting(view(None, suspended("lost", "met")), 0.0)
    assert step.job_id == "met"


def test_a_suspended_step_whose_clients_have_all_left_does_not_wait():
    waiting = governor(LONG).waiting(view(None, suspended("gone", "gone-too")), 0.0)
    assert names(waiting) == ["long"]


@pytest.mark.parametrize(
    ("accepted", "preempted_by"),
    [((LONG, URGENT), "urgent"), ((LONG,), None)],
    ids=["waits for it", "it is gone"],
)
def test_a_suspended_step_is_bound_to_whom_it_made_way_for_while_that_one_is_there(accepted, preempted_by):
    waiting = governor(*accepted).waiting(view(None, suspended("long", preempted_by="urgent")), 0.0)
    assert {prefill.job_id: prefill.preempted_by for prefill in waiting}["long"] == preempted_by


def test_a_chunk_that_is_done_is_not_counted_again():
    account = Account(preemptions=1, suspended_s=2.5, computed_tokens=800)
    (waiter,) = governor(LONG).waiting(view(long=account), 0.0)
    assert waiter.remaining_s == pytest.approx(0.2)
    assert (waiter.preemptions, waiter.suspended_s) == (1, 2.5)


def test_time_suspended_counts_earlier_suspensions_and_the_open_one():
    account = Account(preemptions=2, suspended_s=2.5, computed_tokens=0)
    stopped = suspended("long", since_s=10.0)
    (waiter,) = governor(LONG).waiting(view(None, stopped, long=account), 14.0)
    assert (waiter.preemptions, waiter.suspended_s) == (2, pytest.approx(6.5))


def test_one_that_has_been_suspended_for_too_long_stands_first():
    two = governor(LONG, job("urgent", 100, deadline_s=20.0, arrived_s=9.0), max_suspended_s=5.0)
    waiting = two.waiting(view(None, suspended("long", since_s=4.0)), 9.0)
    assert names(waiting) == ["long", "urgent"]
