"""Who waits, what is left of the running step, and what is decided: the governor without a board."""

import dataclasses
import math
import statistics
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import Account, Engine, running, suspended

from prefill_node.replica.governing.governor import NOBODY, ForwardProfile, Governor
from prefill_node.replica.governing.ledger import Accepted, PrefillLedger
from slo.monitor.directives import DirectiveReason, PreemptDirective
from slo.predict.pass_shape import PassShape
from slo.predict.prefill_time import PrefillPredictor, attention_pairs
from slo.preemption.types import (
    Keep,
    KeepReason,
    Limits,
    Preempt,
    PreemptionMode,
    PreemptionRules,
    PreemptReason,
)
from slo.queue.order import QueueOrder
from slo.queue.slack import NO_DEADLINE
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD, Tier

LINE = PrefillPredictor(per_token_s=0.001, fixed_s=0.0)
WEIGHTS = {PREMIUM: 4.0, STANDARD: 2.0, BACKGROUND: 1.0}
NOTHING_REACHED = (0, 0)
BOUNDARIES = 10
BYTES_PER_TOKEN = 100


ENGINE = Engine()


def job(name, tokens=100, deadline_s=NO_DEADLINE, tier=BACKGROUND, arrived_s=0.0):
    return ENGINE.knows(Accepted(JobId(name), tier, tokens, deadline_s, arrived_s))


def governor(*jobs, mode=PreemptionMode.RESUME, boundaries=BOUNDARIES, order=QueueOrder.SEDF, **limits):
    ledger = PrefillLedger(LINE)
    for each in jobs:
        ledger.arrived(ENGINE.knows(each))
    rules = PreemptionRules(mode=mode, margin=1.5, limits=Limits(**limits))
    return Governor(
        ledger,
        WEIGHTS,
        rules,
        order,
        ForwardProfile(PassShape.even(boundaries), (BYTES_PER_TOKEN,) * boundaries),
    )


view = ENGINE.view
LONG = job("long", 1000)
URGENT = job("urgent", 100, deadline_s=0.5, tier=PREMIUM)


# Progress


@pytest.mark.parametrize(
    ("from_boundary", "reached", "remaining_s"),
    [
        (0, NOTHING_REACHED, 1.0),
        (0, (7, 0), 1.0),
        (0, (7, 4), 0.6),
        (0, (7, 9), 0.1),
        (0, (6, 9), 1.0),
        (0, (8, 9), 1.0),
        (3, (6, 9), 0.7),
        (3, (7, 4), 0.6),
        (3, (7, 0), 1.0),
    ],
    ids=[
        "no step has begun",
        "at its first boundary",
        "in the middle",
        "at its last boundary",
        "the step before has reached more",
        "a later step has reached more",
        "resumed, not begun yet",
        "resumed, under way",
        "its checkpoint could not be used",
    ],
)
def test_what_is_left_of_a_step_is_what_lies_behind_its_boundary(from_boundary, reached, remaining_s):
    step = running("long", from_boundary=from_boundary)
    assert governor(LONG).remaining_s(step, reached) == pytest.approx(remaining_s)


@pytest.mark.parametrize(
    ("reached", "is_stopped"),
    [((7, 0), True), ((7, 8), False), ((6, 8), True)],
    ids=["at its start", "nearly done", "another step was nearly done"],
)
def test_a_step_that_is_nearly_done_is_not_stopped(reached, is_stopped):
    decision = governor(LONG, URGENT).decide(view(running("long")), reached, 0.0)
    assert isinstance(decision, Preempt) == is_stopped


def test_a_step_is_not_stopped_again_for_one_that_found_no_memory():
    deciding = governor(LONG, URGENT)
    published = msgspec.structs.replace(view(running("long"), urgent=Account()), none_can_start=True)
    assert isinstance(deciding.decide(published, NOTHING_REACHED, 0.0), Keep)
    why = DirectiveReason.TIER_AT_RISK
    directive = PreemptDirective(ReplicaId("p"), running("long").step_id, URGENT.job_id, why)
    assert deciding.direct(directive, published, NOTHING_REACHED, 0.0) == Keep(KeepReason.NOBODY_WAITS)
    later = msgspec.structs.replace(published, none_can_start=False)
    assert isinstance(deciding.decide(later, NOTHING_REACHED, 0.0), Preempt)


def test_while_nobody_else_could_start_a_step_is_stopped_only_for_who_comes_later():
    published = view(running("long"), suspended("other"), urgent=Account())
    published = msgspec.structs.replace(published, none_can_start=True)
    stopped = job("other", 1000, deadline_s=1.2, tier=PREMIUM)
    deciding = governor(LONG, URGENT, stopped)
    assert isinstance(deciding.decide(published, NOTHING_REACHED, 0.0), Keep)
    deciding.arrived(job("newcomer", 100, deadline_s=0.6, tier=PREMIUM), 0.0)
    decision = deciding.decide(published, NOTHING_REACHED, 0.0)
    assert isinstance(decision, Preempt)
    assert decision.beneficiary == "newcomer"


def test_a_request_of_a_tier_that_only_others_know_counts_for_the_least():
    deciding = governor(LONG)
    deciding.arrived(Accepted(JobId("other"), Tier("other"), 100, 0.5, 0.0), 0.0)
    (waiting,) = [each for each in deciding.waiting(view(running("long")), 0.0) if each.job_id == "other"]
    assert waiting.weight == min(WEIGHTS.values())


def test_a_forward_pass_without_boundaries_makes_no_progress():
    assert governor(LONG, boundaries=0).progress(running("long"), (7, 3)) == 0.0


# How soon it stops

ATTENTION_LAST = PassShape.of([3, 1, 0], [0, 0, 1])
"""One boundary before what grows with the tokens, one in it, one before attention."""


def stopping_in_s(context, *, tokens=1000, ahead_s=0.0):
    """The longest that a stop of a step behind a context may take."""
    asked = curved(LONG)
    asked.profile = ForwardProfile(ATTENTION_LAST, (), ahead_s)
    step = msgspec.structs.replace(running("long", tokens=tokens), pairs=attention_pairs(tokens, context))
    longest_s = asked.profile.stop_s(step.tokens, step.pairs, asked.ledger.predictor)
    told_s = asked.preemptible_in_s(view(step), (7, 0), 0.0)
    assert ahead_s < told_s < longest_s, "the router is told the mean"
    return longest_s


def test_a_step_behind_a_long_context_stops_after_its_attention():
    """With attention as for a prompt of 4,096 tokens it would promise the same whatever the context is."""
    of_tokens_s = 0.75 * (CURVE.fixed_s + 1000 * CURVE.per_token_s)
    assert stopping_in_s(0) == pytest.approx(of_tokens_s)
    assert stopping_in_s(100_000) == pytest.approx(CURVE.per_pair_s * attention_pairs(1000, 100_000))
    assert stopping_in_s(100_000) > 100 * of_tokens_s


def test_what_is_launched_ahead_runs_on():
    assert stopping_in_s(0, ahead_s=0.002) == pytest.approx(stopping_in_s(0) + 0.002)


def test_half_of_the_boundaries_are_little_of_a_pass_that_is_mostly_attention():
    asked = curved(LONG)
    asked.profile = ForwardProfile(ATTENTION_LAST)
    step = msgspec.structs.replace(running("long", tokens=1000), pairs=attention_pairs(1000, 100_000))
    before_attention_s = CURVE.fixed_s + 1000 * CURVE.per_token_s
    whole_s = CURVE.pass_s(1000, step.pairs)
    assert asked.progress(step, (7, 2)) == pytest.approx(before_attention_s / whole_s)
    assert asked.remaining_s(step, (7, 2)) == pytest.approx(whole_s - before_attention_s)


@pytest.mark.parametrize(
    ("shape", "within_s", "expected"),
    [
        (ATTENTION_LAST, 0.010, 0.008),
        (ATTENTION_LAST, 0.001, 0.0),
        (ATTENTION_LAST, math.inf, None),
        (PassShape(()), 0.010, None),
    ],
)
def test_the_scheduler_is_told_how_long_a_stretch_may_be(shape, within_s, expected):
    bound = ForwardProfile(shape, (), 0.002, within_s).bound
    assert (None if bound is None else bound.within_s) == pytest.approx(expected)


# What long and cached prompts take

CURVE = PrefillPredictor(per_token_s=0.001, fixed_s=0.01, per_pair_s=1e-6)


def curved(*jobs):
    curved = governor(*jobs)
    curved.ledger.predictor = CURVE
    return curved


def test_a_prefix_that_is_expected_to_be_cached_is_no_work_but_is_looked_at():
    cached = msgspec.structs.replace(job("cached", 1000), cached_tokens=600)
    everything = msgspec.structs.replace(job("everything", 1000), cached_tokens=1000)
    waiting = {it.job_id: it.remaining_s for it in curved(cached, everything, LONG).waiting(view(), 0.0)}
    assert waiting["long"] == pytest.approx(CURVE.prefill_s(1000))
    assert waiting["cached"] == pytest.approx(CURVE.prefill_s(400, 600))
    assert waiting["everything"] == pytest.approx(CURVE.prefill_s(1, 999)), "one token is always computed"


def test_what_is_computed_counts_more_than_what_was_expected_to_be():
    cached = msgspec.structs.replace(job("cached", 1000), cached_tokens=600)
    (waiting,) = curved(ENGINE.knows(cached)).waiting(view(predictor=CURVE, cached=Account(0, 0.0, 200)), 0.0)
    assert waiting.remaining_s == pytest.approx(CURVE.prefill_s(800, 200))


def test_a_corrected_predictor_holds_for_those_who_wait_already():
    asked = curved(LONG)
    asked.waiting(view(), 0.0)
    asked.ledger.predictor = CURVE.times(2.0)
    (waiting,) = asked.waiting(view(), 0.0)
    assert waiting.remaining_s == pytest.approx(2 * CURVE.prefill_s(1000))


def test_the_chunks_behind_a_suspended_one_are_work_too():
    pairs = 400 * (200 + 200)
    chunk = suspended("long", tokens=400, pairs=pairs)
    shown = view(None, chunk, predictor=CURVE, long=Account(1, 0.0, 200))
    (waiting,) = curved(LONG).waiting(shown, 0.0)
    expected_s = 0.5 * CURVE.prefill_s(400, 200) + CURVE.prefill_s(400, 600)
    assert waiting.remaining_s == pytest.approx(expected_s)


# Who waits


def names(prefills):
    return [prefill.job_id for prefill in prefills]


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


# What is expected to arrive


def test_what_arrives_is_noted_and_expected_again():
    """What was there before, as warm-up is, and what is noted twice by mistake of nobody, is not."""
    one = governor(LONG)
    assert one.forecast.at(0.0).load == 0.0
    for n in range(100):
        one.arrived(job(f"job-{n}", 500, deadline_s=n + 1.0, arrived_s=float(n)), float(n))
    assert len(one.ledger.accepted) == 101
    assert one.forecast.at(99.0).load == pytest.approx(0.5, rel=0.05)


def test_one_that_has_waited_for_a_place_arrives_when_it_gets_it():
    """Filed at the time when it came, it would make what has come since count as if it came at once."""
    one = governor(LONG)
    for n in range(200):
        one.arrived(job(f"job-{n}", 300, arrived_s=float(n)), float(n))
    one.arrived(job("has-waited", 300, arrived_s=80.0), 200.0)
    assert one.forecast.at(200.0).load == pytest.approx(0.3, rel=0.05)
    assert one.forecast.at(200.0).pressure == 0.0
    assert one.ledger.accepted["has-waited"].arrived_s == 80.0


def test_the_forecast_orders_the_queue_and_decides():
    """`long` is worth little for each second; under overload its time is kept for what will come."""
    two = governor(job("long", 1000, deadline_s=10.0), URGENT, order=QueueOrder.FEASIBLE_SET)
    step = view(running("other", tokens=200))
    assert isinstance(two.decide(view(running("long")), NOTHING_REACHED, 0.0), Preempt)
    assert names(two.waiting(step, 0.0)) == ["urgent", "long"]
    waiters = [job("near", 1200, deadline_s=1.9), job("far", 100, deadline_s=2.0, tier=PREMIUM)]
    calm, crowded = (governor(*waiters, order=QueueOrder.FEASIBLE_SET) for _ in range(2))
    for n in range(600):
        crowded.forecast.arrived(0.2, 4.0, n / 10)
    assert names(calm.waiting(view(), 0.0)) == ["near", "far"]
    assert names(crowded.waiting(view(), 0.0)) == ["far", "near"]


def test_time_is_not_kept_for_those_who_come_no_more():
    one = governor(order=QueueOrder.FEASIBLE_SET)
    for n in range(600):
        one.arrived(job(f"past-{n}", 200, deadline_s=n / 10 + 1, arrived_s=n / 10, tier=PREMIUM), n / 10)
        one.ledger.ended(JobId(f"past-{n}"), abandoned=False)
    one.arrived(job("long", 8000, deadline_s=160.0, arrived_s=60.0), 60.0)
    for n in range(30):
        one.arrived(job(f"later-{n}", 500, deadline_s=210.0, arrived_s=60.0, tier=PREMIUM), 60.0)
    assert names(one.waiting(view(), 60.0))[0] != "long", "others are worth more per second"
    assert names(one.waiting(view(), 151.0))[0] == "long", "nobody has come for a minute and a half"


# Decisions


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


# Abandoned steps


def abandon(governed, *names_):
    for name in names_:
        governed.ledger.ended(JobId(name), abandoned=True)


def test_a_step_is_stopped_when_all_its_clients_have_left_and_not_before():
    two = governor(job("a"), job("b"))
    abandon(two, "a")
    step = view(running("a", "b"))
    assert isinstance(two.decide(step, NOTHING_REACHED, 0.0), Keep)
    abandon(two, "b")
    assert two.decide(step, NOTHING_REACHED, 0.0) == Preempt(7, NOBODY, PreemptReason.ABANDONED)
    assert two.decide(step, NOTHING_REACHED, 0.0) == Keep(KeepReason.IDLE), "once"


def test_a_step_whose_answer_has_arrived_is_not_abandoned():
    one = governor(job("a"))
    one.ledger.ended(JobId("a"))
    assert isinstance(one.decide(view(running("a")), NOTHING_REACHED, 0.0), Keep)


@pytest.mark.parametrize("jobs", [("",), ("a", "")], ids=["a measurement", "with a measurement"])
def test_work_of_no_job_is_not_abandoned(jobs):
    one = governor(job("a"))
    abandon(one, "a")
    assert isinstance(one.decide(view(running(*jobs)), NOTHING_REACHED, 0.0), Keep)


def test_an_abandoned_step_is_stopped_whatever_the_limits():
    one = governor(job("a"), max_preemptions=0, max_suspended_steps=0, max_suspended_bytes=0)
    abandon(one, "a")
    decision = one.decide(view(running("a")), NOTHING_REACHED, 0.0)
    assert decision == Preempt(7, NOBODY, PreemptReason.ABANDONED)


# Orders


def test_a_step_is_ordered_once_and_the_next_one_anew():
    two = governor(LONG, URGENT)
    first = view(running("long", step_id=7))
    assert isinstance(two.decide(first, NOTHING_REACHED, 0.0), Preempt)
    assert two.decide(first, NOTHING_REACHED, 0.0) == Keep(KeepReason.IDLE)
    again = two.decide(view(running("long", step_id=8)), NOTHING_REACHED, 0.0)
    assert again == Preempt(8, JobId("urgent"), PreemptReason.RESCUE)


@given(
    shown=st.integers(1, 1 << 39),
    reached=st.tuples(st.integers(0, 1 << 39), st.integers(0, BOUNDARIES - 1)),
    late_s=st.floats(0.0, 0.4),
)
def test_an_order_never_names_another_step_than_the_one_that_was_published(shown, reached, late_s):
    """So a view that is out of date can only produce an id that matches nothing any more."""
    decision = governor(LONG, URGENT).decide(view(running("long", step_id=shown)), reached, late_s)
    if isinstance(decision, Preempt):
        assert decision.step_id == shown


# Timers


def test_a_waiter_with_time_to_spare_is_looked_at_again_before_it_is_too_late():
    patient = job("patient", 100, deadline_s=3.0, tier=PREMIUM)
    two = governor(LONG, patient)
    step = view(running("long"))
    decision = two.decide(step, NOTHING_REACHED, 0.0)
    assert isinstance(decision, Keep)
    assert decision.reason is KeepReason.WAITERS_IN_TIME
    assert 0.0 < decision.recheck_at_s < 3.0 - 0.1
    stuck = two.decide(step, NOTHING_REACHED, decision.recheck_at_s)
    assert stuck == Preempt(7, JobId("patient"), PreemptReason.RESCUE), "the step has made no progress"


def test_the_most_critical_of_several_waiters_sets_the_time():
    def recheck_at_s(*waiters):
        decision = governor(LONG, *waiters).decide(view(running("long")), NOTHING_REACHED, 0.0)
        assert isinstance(decision, Keep)
        return decision.recheck_at_s

    early, late = job("early", 100, deadline_s=3.0), job("late", 100, deadline_s=9.0)
    assert recheck_at_s(late, early) == recheck_at_s(early) < recheck_at_s(late) < math.inf


def test_nobody_with_a_deadline_needs_no_timer():
    decision = governor(LONG, job("background")).decide(view(running("long")), NOTHING_REACHED, 0.0)
    assert decision == Keep(KeepReason.WAITERS_IN_TIME, math.inf)


# What the router is told

LIMITS = {
    "stopped too often": {"accounts": {"long": Account(Limits().max_preemptions, 0.0, 0)}},
    "suspended for too long": {"accounts": {"long": Account(1, Limits().max_suspended_s, 0)}},
    "too many are suspended": {"stopped": [suspended("other")], "max_suspended_steps": 1},
    "too much memory is kept": {"stopped": [suspended("other")], "max_suspended_bytes": 100_499},
    "it cannot stop": {"step": running("long", stoppable=False)},
    "it ends first": {"reached": (7, 9)},
    "it would be recomputed": {"mode": PreemptionMode.RECOMPUTE, "reached": (7, 9)},
    "nothing runs": {"step": None},
}


@pytest.mark.parametrize("case", LIMITS.values(), ids=LIMITS.keys())
def test_a_step_that_has_reached_a_limit_is_not_said_to_make_way(case):
    case = dict(case)
    shown = view(case.pop("step", running("long")), *case.pop("stopped", ()), **case.pop("accounts", {}))
    reached = case.pop("reached", NOTHING_REACHED)
    governed = governor(LONG, URGENT, **case)
    assert governed.preemptible_in_s(shown, reached, 0.0) is None
    assert isinstance(governed.decide(shown, reached, 0.0), Keep), "and indeed it does not"


def test_what_finds_room_in_kv_blocks_takes_no_memory():
    """It does in the first half of the pass; from then on the step is one that has reached a limit."""
    shown = view(running("long"), suspended("other"))
    governed = governor(LONG, URGENT, max_suspended_bytes=500)
    assert governed.preemptible_in_s(shown, NOTHING_REACHED, 0.0) is None
    kept_bytes = (0.0,) * 5 + (BYTES_PER_TOKEN / 2,) * 4 + (BYTES_PER_TOKEN,)
    governed.profile = ForwardProfile(PassShape.even(10), kept_bytes)
    assert governed.preemptible_in_s(shown, NOTHING_REACHED, 0.0) is not None
    assert governed.preemptible_in_s(shown, (7, 3), 0.0) is not None
    assert governed.preemptible_in_s(shown, (7, 4), 0.0) is None, "it would stop behind it"
    assert governed.profile.checkpoint_bytes(1000, 4) == 1000 * BYTES_PER_TOKEN / 2
    assert governed.profile.checkpoint_bytes(1000, 9) == 1000 * BYTES_PER_TOKEN
    late = ForwardProfile(PassShape.told([(n / 10, n / 10) for n in range(10)], 0.0, 1), kept_bytes)
    assert late.checkpoint_bytes(1000, 3) == 1000 * BYTES_PER_TOKEN / 2, (
        "ranks of several hosts stop one later"
    )


@pytest.mark.parametrize(
    "within", [{}, {"max_suspended_bytes": 100_500, "max_suspended_steps": 2}], ids=["plenty", "just within"]
)
def test_a_step_within_its_limits_makes_way_after_half_a_stretch_in_the_mean(within):
    shown = view(
        running("long"),
        suspended("other"),
        long=Account(Limits().max_preemptions - 1, Limits().max_suspended_s - 1.0, 0),
    )
    governed = governor(LONG, job("other"), **within)
    assert governed.preemptible_in_s(shown, NOTHING_REACHED, 0.0) == pytest.approx(0.05)


# Speed


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
        many.decide(shown, (7, 3), 0.0)
        took_s.append(time.perf_counter() - started_s)
    median_us = statistics.median(took_s) * 1e6
    print(f"median decision with 100 waiting: {median_us:.0f} µs")  # noqa: T201 - shown with pytest -s
    assert median_us < 5 * 200


def test_deciding_changes_nothing_that_was_accepted():
    two = governor(LONG, URGENT)
    before = dataclasses.replace(two.ledger, accepted=dict(two.ledger.accepted))
    two.decide(view(running("long"), suspended("other")), NOTHING_REACHED, 0.0)
    assert two.ledger.accepted == before.accepted
