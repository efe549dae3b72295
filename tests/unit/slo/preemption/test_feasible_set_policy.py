"""Whether a step is preempted when all that wait are looked at together."""

import dataclasses
import itertools
import math
from functools import partial

import preemption_steps
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from preemption_steps import step
from queued_prefills import NEVER, job

from slo.preemption.decide import decide
from slo.preemption.types import (
    Keep,
    KeepReason,
    Limits,
    Preempt,
    PreemptionMode,
    PreemptionPolicy,
    PreemptReason,
    ReplicaState,
    RunningStep,
)
from slo.queue.arrival_forecast import Forecast
from slo.queue.class_targets import ClassTargets
from slo.queue.feasible_set import feasible_set, value
from slo.queue.prefill import Prefill
from slo.request import JobId
from slo.tiers import Tier

RESUME, RECOMPUTE, _ = PreemptionMode
NO_LIMITS = Limits(10**9, math.inf, 10**9, 10**12, 2.0)
rules = partial(preemption_steps.rules, PreemptionPolicy.FEASIBLE_SET, margin=1.0)
asked = partial(preemption_steps.asked, policy=PreemptionPolicy.FEASIBLE_SET, margin=1.0)


def stops(running, *waiting, **about):
    decision = asked(running, *waiting, **about)
    return (decision.beneficiary, decision.reason) if isinstance(decision, Preempt) else None


def crowded():
    """Many short prefills have much value and arrive at a load of two."""
    forecast = Forecast()
    for n in range(2000):
        forecast.arrived(0.1, 4.0, n * 0.05)
    return forecast


def missed(target=0.9, **misses):
    """Classes of which a hundred have ended and so many were late."""
    account = ClassTargets({Tier(name): target for name in misses})
    for name, count in misses.items():
        for number in range(100):
            account.ended(Tier(name), -1.0 if number < count else 1.0, 0.0)
    return account.state


# Whom a step is preempted for


def test_two_short_waiters_beat_one_long_runner_that_was_on_time():
    long = step(job("long", 10.5), remaining_s=10.0)
    short, other = job("short", 1.5), job("other", 2.5)
    assert stops(long, short) is None, "one for one"
    assert stops(long, short, other) == ("short", PreemptReason.RUNNER_TARDY)


@pytest.mark.parametrize(
    ("patience", "now_s", "recheck_at_s"),
    [(0.5, 0.0, 1.0), (0.5, 0.4, 1.0), (0.75, 0.0, 2.0), (1.0, 0.0, 3.0)],
)
def test_a_stop_waits_while_the_first_token_comes_within_its_part_of_the_objective(
    patience, now_s, recheck_at_s
):
    """One second of work is due after four, and the step has ten left."""
    long, urgent = step(job("long"), remaining_s=10.0), job("urgent", 4.0)
    kept = asked(long, urgent, now_s=now_s, patience=patience)
    assert kept == Keep(KeepReason.PATIENCE, pytest.approx(recheck_at_s))
    assert stops(long, urgent, now_s=recheck_at_s, patience=patience) == ("urgent", PreemptReason.RESCUE)


def test_of_several_the_one_with_the_least_time_says_how_long_a_stop_waits():
    long, first, second = step(job("long"), remaining_s=30.0), job("first", 8.0), job("second", 9.0, 3.0)
    assert asked(long, first, patience=0.5) == Keep(KeepReason.PATIENCE, 3.0)
    assert asked(long, first, second, patience=0.5) == Keep(KeepReason.PATIENCE, 0.5)
    assert stops(long, first, second, now_s=0.5, patience=0.5) == ("first", PreemptReason.RESCUE)


def test_the_way_to_the_next_boundary_is_what_a_stop_takes():
    long = step(job("long"), remaining_s=10.0, boundary_s=0.3)
    decision = asked(long, job("urgent", 4.0), patience=0.5)
    assert decision == Keep(KeepReason.PATIENCE, pytest.approx(0.7))


def test_without_patience_a_step_is_stopped_at_once():
    assert stops(step(job("long"), remaining_s=10.0), job("urgent", 4.0)) == ("urgent", PreemptReason.RESCUE)


def test_a_stop_that_helps_nobody_any_more_is_not_waited_for():
    """With patience or without, who waits for an end within its objective stops nobody."""
    decision = asked(step(job("long"), remaining_s=2.0), job("urgent", 4.0), patience=0.5)
    assert decision.reason is KeepReason.WAITERS_IN_TIME


@pytest.mark.parametrize("patience", [-0.1, 1.1])
def test_a_patience_is_a_part_of_an_objective(patience):
    with pytest.raises(ValueError, match="a patience is from 0 to 1"):
        rules(patience=patience)


def chunk(member, remaining_s, behind_s):
    """One chunk of a prompt runs, most of it is done, and more of the prompt is behind it."""
    return RunningStep(7, (replace(member, remaining_s=remaining_s + behind_s),), remaining_s, 2.0)


def test_a_runner_is_on_time_with_its_whole_prompt_not_with_its_chunk():
    short = job("short", 1.2, work_s=0.5)
    assert stops(chunk(job("long", 5.0), 1.0, 0.0), short) == ("short", PreemptReason.RESCUE)
    assert stops(chunk(job("long", 5.0), 1.0, 3.4), short) == ("short", PreemptReason.RESCUE)
    assert stops(chunk(job("long", 5.0), 1.0, 3.6), short) is None, "one of the two is late either way"
    assert stops(chunk(job("long", 5.0), 1.0, 4.5), short) == ("short", PreemptReason.RUNNER_INFEASIBLE)


def test_the_end_of_a_chunk_does_not_count_as_a_prompt_on_time():
    shorts = job("short", 1.2, work_s=0.5), job("other", 4.6, work_s=2.5)
    assert stops(chunk(job("long", 5.0), 1.0, 3.0), *shorts) == ("short", PreemptReason.RUNNER_TARDY)


def test_of_one_and_one_the_more_valuable_is_on_time():
    long, short = step(job("long", 10.5, weight=2.0), remaining_s=10.0), job("short", 1.5, weight=2.5)
    assert stops(long, short) == ("short", PreemptReason.RUNNER_TARDY)
    assert stops(long, replace(short, weight=2.0)) is None


def test_a_step_that_was_stopped_before_has_more_value():
    long, short = job("long", 10.5, preemptions=1), job("short", 1.5, weight=1.5)
    assert stops(step(long, remaining_s=10.0), short) is None
    assert stops(step(replace(long, preemptions=0), remaining_s=10.0), short) is not None


def test_all_members_of_a_step_that_are_on_time_count():
    three = [job(f"m{n}", 10.5) for n in range(3)]
    waiters = job("a", 1.5), job("b", 2.5)
    assert stops(step(*three, remaining_s=10.0), *waiters) is None
    late = [replace(member, deadline_s=5.0) for member in three[1:]]
    assert stops(step(three[0], *late, remaining_s=10.0), *waiters) is not None


@pytest.mark.parametrize("due_s", [3.0, 3.5, 20.0])
def test_a_runner_with_the_nearest_deadline_that_can_be_met_with_all_others_is_not_stopped(due_s):
    """Whatever waits comes after it anyway."""
    waiters = [job(f"w{n}", due_s + n * 0.5, work_s=0.4, weight=4.0) for n in range(3)]
    assert stops(step(job("r", due_s)), *waiters) is None
    assert stops(step(job("r", due_s)), *waiters, margin=3.0) is None


def test_a_step_of_the_same_deadline_and_arrival_is_not_stopped():
    """Of requests that come together, the first that has started goes on."""
    together = [job(f"w{n}", 4.5) for n in range(2)]
    assert stops(step(job("r", 4.5)), *together, margin=2.0) is None


def test_a_step_is_not_stopped_for_those_who_come_after_it():
    """`near` can wait for the step, `far` has a later deadline and no time; a stop would not change that."""
    near, far = job("near", 9.0, 0.5), job("far", 12.6, 4.0)
    decision = asked(step(job("r", 12.0), remaining_s=5.0), near, far, margin=1.5)
    assert decision.reason is KeepReason.WAITERS_IN_TIME


def test_a_step_that_is_just_on_time_keeps_its_value():
    """It would not survive a stop of a tenth of a second, and is not preempted for less for that."""
    precious = step(job("r", 2.0, weight=9.0), boundary_s=0.1)
    assert stops(precious, job("w", 1.5)) is None
    assert stops(precious, job("w", 1.5, weight=9.5)) == ("w", PreemptReason.RUNNER_TARDY)


def test_a_step_that_would_have_to_be_computed_again_and_be_late_keeps_its_value():
    precious = step(job("r", 3.0, weight=9.0), restart_s=3.5, progress=0.4)
    assert stops(precious, job("w", 1.5), mode=RECOMPUTE) is None
    assert stops(precious, job("w", 1.5), mode=RESUME) == ("w", PreemptReason.RESCUE)


def test_work_of_those_that_go_first_in_any_case_counts():
    """`overdue` has been suspended for a minute, so that it runs before all others."""
    overdue = job("overdue", work_s=1.0, suspended_s=Limits().max_suspended_s)
    running, waiter = step(job("r", 9.0)), job("w", 4.0, work_s=1.5)
    assert stops(running, waiter) is None
    assert stops(running, waiter, overdue) == ("w", PreemptReason.RESCUE)
    assert asked(running, replace(waiter, deadline_s=2.0), overdue).reason is KeepReason.CANNOT_SAVE
    assert stops(running, overdue) is None


def test_those_preempted_for_the_step_are_left_out():
    bound = job("bound", 4.0, work_s=1.5, preempted_by=JobId("r"))
    assert stops(step(job("r", 9.0)), bound, job("w", 3.0)) is None
    assert asked(step(job("r", 9.0)), bound).reason is KeepReason.PROTECTED


def test_the_first_that_can_make_it_stop_is_its_beneficiary():
    protected = job("protected", 2.0, 0.5, preempted_by=JobId("first"))
    waiters = job("second", 2.8), protected, job("first", 2.1, 0.5)
    assert stops(step(job("r", 20.0)), *waiters) == ("first", PreemptReason.RESCUE)


def test_with_much_to_come_a_long_step_is_tardy_for_a_short_waiter():
    """All three could be met. The time of the long one is kept for what is expected."""
    long = step(job("long", 9.0), remaining_s=5.0)
    waiters = job("a", 1.5, 0.1, weight=4.0), job("b", 2.0, 0.1, weight=4.0)
    assert stops(long, *waiters) == ("a", PreemptReason.RESCUE)
    assert stops(long, *waiters, forecast=crowded()) == ("a", PreemptReason.RUNNER_TARDY)


# When to look again


def test_it_is_looked_at_again_when_a_slow_step_would_have_made_somebody_late():
    running, waiter = step(job("r", 20.0), boundary_s=0.25), job("w", 6.0)
    kept = asked(running, waiter, job("v", 30.0))
    assert kept == Keep(KeepReason.WAITERS_IN_TIME, recheck_at_s=3.25)
    slow = asked(running, waiter, now_s=kept.recheck_at_s)
    assert slow == Preempt(7, JobId("w"), PreemptReason.RESCUE)


def test_a_step_that_keeps_its_time_is_not_stopped_when_it_is_looked_at_again():
    kept = asked(step(job("r", 20.0), boundary_s=0.1), job("w", 4.0), margin=1.4)
    assert 0.0 < kept.recheck_at_s < 1.9
    later = step(job("r", 20.0), remaining_s=2.0 - kept.recheck_at_s, boundary_s=0.1)
    assert stops(later, job("w", 4.0), margin=1.4, now_s=kept.recheck_at_s) is None


def test_no_timer_where_nobody_can_become_late():
    assert asked(step(job("r", 20.0)), job("w"), job("infeasible", 0.5)).recheck_at_s == math.inf


# Properties

NOW_S = 100.0
WEIGHTS = st.sampled_from([1.0, 2.0, 4.0])
STOPPED = st.integers(0, 2)
MARGINS = st.floats(1, 2)


@st.composite
def waiters(draw, number):
    """Short for the most part, and with less time than the step takes."""
    work_s = draw(st.floats(0.01, 3))
    return Prefill(
        JobId(f"w{number}"),
        draw(WEIGHTS),
        draw(st.sampled_from([0.0, 0.0, 0.0, 0.0, NEVER])) + NOW_S + work_s + draw(st.floats(-0.5, 12)),
        work_s,
        draw(st.floats(0, 100)),
        draw(STOPPED),
        draw(st.sampled_from([0.0, 0.0, 0.0, 3.0, 70.0])),
        draw(st.sampled_from([None, None, None, JobId("m0"), JobId("elsewhere")])),
    )


@st.composite
def states(draw):
    restart_s = draw(st.floats(0.1, 10))
    progress = draw(st.floats(0, 0.95))
    remaining_s = restart_s * (1 - progress)
    dues = draw(st.lists(st.one_of(st.floats(-1, 20), st.just(NEVER)), min_size=1, max_size=3))
    members = [
        job(f"m{n}", NOW_S + remaining_s + due_s, weight=draw(WEIGHTS), preemptions=draw(STOPPED))
        for n, due_s in enumerate(dues)
    ]
    running = step(
        *members,
        remaining_s=remaining_s,
        restart_s=restart_s,
        progress=progress,
        boundary_s=restart_s / 32 + draw(st.floats(0, 0.1)),
    )
    return ReplicaState(running, [draw(waiters(n)) for n in range(draw(st.integers(1, 7)))])


ALL_RULES = st.builds(
    rules,
    st.sampled_from([RESUME, RECOMPUTE]),
    margin=MARGINS,
    limits=st.just(dataclasses.replace(NO_LIMITS, max_suspended_s=60.0)),
)
FORECASTS = st.sampled_from([None, crowded()])


def free_at_s(state):
    """When the first can start if the step is stopped."""
    overdue_s = sum(w.remaining_s for w in state.waiting if w.suspended_s >= 60.0)
    return NOW_S + state.running.boundary_s + overdue_s


def ended_at_s(state, rules):
    """When the first can start if it is not, by the margin."""
    overdue_s = sum(w.remaining_s for w in state.waiting if w.suspended_s >= 60.0)
    return NOW_S + rules.margin * state.running.remaining_s + overdue_s


def pool(state):
    members = {member.job_id for member in state.running.members}
    return [w for w in state.waiting if w.suspended_s < 60.0 and w.preempted_by not in members]


def victims(state):
    """The members that could be late by a stop."""
    end_s = NOW_S + state.running.remaining_s
    return [m for m in state.running.members if end_s <= m.deadline_s < NEVER]


@settings(max_examples=500)
@given(states(), ALL_RULES, FORECASTS)
def test_nothing_is_stopped_while_all_waiters_would_be_in_time_anyway(state, rules, forecast):
    decision = decide(state, NOW_S, rules, forecast)
    due = sorted((w for w in pool(state) if w.deadline_s < NEVER), key=lambda w: w.deadline_s)
    ends = itertools.accumulate((w.remaining_s for w in due), initial=ended_at_s(state, rules))
    next(ends)
    if all(end_s <= w.deadline_s for w, end_s in zip(due, ends, strict=True)):
        assert isinstance(decision, Keep)


@settings(max_examples=500)
@given(states(), ALL_RULES, FORECASTS)
def test_the_beneficiary_ends_in_time_if_it_starts_after_the_stop(state, rules, forecast):
    decision = decide(state, NOW_S, rules, forecast)
    if not isinstance(decision, Preempt):
        return
    beneficiary = next(w for w in state.waiting if w.job_id == decision.beneficiary)
    assert free_at_s(state) + beneficiary.remaining_s <= beneficiary.deadline_s < NEVER
    assert beneficiary.preempted_by is None, "one that was preempted stops nobody"
    assert beneficiary.suspended_s < 60.0


@settings(max_examples=500)
@given(states(), ALL_RULES)
def test_more_is_on_time_with_the_stop_than_without(state, rules):
    if not isinstance(decide(state, NOW_S, rules), Preempt):
        return
    on_time = victims(state)
    runner = []
    if on_time and len(on_time) == len(
        [m for m in state.running.members if NOW_S + state.running.remaining_s <= m.deadline_s]
    ):
        first = min(on_time, key=lambda m: m.deadline_s)
        again_s = state.running.restart_s if rules.mode is RECOMPUTE else state.running.remaining_s
        runner = [replace(first, weight=sum(m.weight for m in on_time), remaining_s=again_s)]
    with_stop = feasible_set([*runner, *pool(state)], free_at_s(state)).feasible
    without = feasible_set(pool(state), ended_at_s(state, rules)).feasible
    assert sum(map(value, with_stop)) > sum(map(value, without)) + sum(map(value, runner))


@settings(max_examples=500)
@given(states(), ALL_RULES)
def test_the_reason_says_what_becomes_of_the_step(state, rules):
    decision = decide(state, NOW_S, rules)
    if not isinstance(decision, Preempt):
        return
    met = [m for m in state.running.members if NOW_S + state.running.remaining_s <= m.deadline_s]
    assert (decision.reason is PreemptReason.RUNNER_INFEASIBLE) == (not met)
    if met and min(m.deadline_s for m in met) == NEVER:
        assert decision.reason is PreemptReason.RESCUE


@settings(max_examples=300)
@given(states(), ALL_RULES, FORECASTS)
def test_the_timer_lies_ahead(state, rules, forecast):
    decision = decide(state, NOW_S, rules, forecast)
    if isinstance(decision, Keep):
        assert decision.recheck_at_s > NOW_S


@settings(max_examples=300)
@given(states(), ALL_RULES, FORECASTS, st.randoms(use_true_random=False))
def test_the_order_in_which_they_wait_does_not_matter(state, rules, forecast, rng):
    assume(len({w.arrived_s for w in state.waiting}) == len(state.waiting))
    waiting = [*state.waiting]
    rng.shuffle(waiting)
    shuffled = replace(state, waiting=waiting)
    one, other = decide(state, NOW_S, rules, forecast), decide(shuffled, NOW_S, rules, forecast)
    if isinstance(one, Preempt) or isinstance(other, Preempt):
        assert one == other
    else:
        assert one.reason is other.reason
        assert one.recheck_at_s == pytest.approx(other.recheck_at_s)


@settings(max_examples=300)
@given(states(), ALL_RULES)
def test_a_waiter_without_a_deadline_or_that_is_infeasible_changes_nothing(state, rules):
    more = [job("undated", work_s=5.0, weight=9.0), job("infeasible", NOW_S + 1.0, work_s=5.0, weight=9.0)]
    assume(pool(state))
    before = decide(state, NOW_S, rules)
    after = decide(replace(state, waiting=[*state.waiting, *more]), NOW_S, rules)
    if isinstance(before, Preempt):
        assert after == before
    else:
        assert isinstance(after, Keep)
        assert after.recheck_at_s == before.recheck_at_s


# With a target for each class


def of(tier, prefill):
    return replace(prefill, tier=Tier(tier))


def test_a_class_that_has_used_up_its_misses_is_not_stopped_for_one_that_has_not():
    long = step(of("files", job("long", 10.5)), remaining_s=10.0)
    shorts = of("chat", job("short", 1.5)), of("chat", job("other", 2.5))
    assert stops(long, *shorts) is not None
    assert stops(long, *shorts, targets=missed(chat=0, files=0)) is not None
    assert stops(long, *shorts, targets=missed(chat=0, files=30)) is None
    assert stops(long, *shorts, targets=missed(chat=30, files=0)) is not None


def test_the_margin_is_kept_for_those_with_a_strict_target():
    """The waiter is in time behind the step if that takes what is predicted, not if half as much again."""
    long, short = step(of("files", job("long", 50.0)), remaining_s=2.0), of("chat", job("short", 3.5))
    assert stops(long, short, margin=1.5) == ("short", PreemptReason.RESCUE)
    assert stops(long, short, margin=1.5, targets=missed(0.99, chat=0, files=0)) is not None
    trusting = asked(long, short, margin=1.5, targets=missed(0.9, chat=0, files=0))
    assert trusting == Keep(KeepReason.WAITERS_IN_TIME, pytest.approx(0.5))


def test_in_a_crowd_a_step_that_is_late_anyway_stops_for_whoever_is_not():
    late, waiter = step(of("files", job("late", 1.0))), of("chat", job("short", 9.0, weight=1000.0))
    state = missed(chat=0, files=0)
    assert stops(late, waiter, forecast=crowded()) is None
    assert stops(late, waiter, targets=state) is None
    assert stops(late, waiter, forecast=crowded(), targets=state) == (
        "short",
        PreemptReason.RUNNER_INFEASIBLE,
    )


@given(
    waiting=st.lists(st.tuples(st.floats(0.1, 30), st.floats(0.1, 10)), max_size=6), due_s=st.floats(0.1, 30)
)
def test_one_class_alone_without_a_margin_is_decided_as_without_targets(waiting, due_s):
    waiters = [of("chat", job(f"w{n}", *one)) for n, one in enumerate(waiting)]
    running = step(of("chat", job("r", due_s)))
    with_targets = asked(running, *waiters, targets=missed(chat=7))
    without = asked(running, *waiters)
    assert (type(with_targets), getattr(with_targets, "reason", None)) == (type(without), without.reason)
