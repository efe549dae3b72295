"""Every reason to stop a running step or to let it go on, and what bounds how often it is stopped."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from preemption_steps import asked, rules, step
from queued_prefills import NEVER, job

from slo.preemption.decide import decide, limit_reached, must_wait
from slo.preemption.types import (
    Keep,
    KeepReason,
    Limits,
    Preempt,
    PreemptionMode,
    PreemptionPolicy,
    PreemptionRules,
    PreemptReason,
    ReplicaState,
)
from slo.queue.prefill import Prefill
from slo.request import JobId
from slo.tiers import BACKGROUND

CONSERVATIVE, AGGRESSIVE, RESCUE, FEASIBLE_SET = PreemptionPolicy
RESUME, RECOMPUTE, OFF = PreemptionMode


RELAXED = job("relaxed", due_s=9.0)
URGENT = job("urgent", due_s=2.0, weight=4.0)
STARVED = replace(RELAXED, tier=BACKGROUND)
LIMITS = Limits(max_preemptions=2, max_suspended_s=5.0, max_suspended_steps=3, max_suspended_bytes=100)

KEPT = [
    ("not at all", KeepReason.OFF, step(RELAXED), [URGENT], {"mode": OFF}),
    ("nothing runs", KeepReason.IDLE, None, [URGENT], {}),
    ("nobody waits", KeepReason.NOBODY_WAITS, step(RELAXED), [], {}),
    ("compiled", KeepReason.NOT_STOPPABLE, step(RELAXED, stoppable=False), [URGENT], {}),
    ("warm-up", KeepReason.NOT_STOPPABLE, step(stoppable=False), [URGENT], {}),
    (
        "nearly done",
        KeepReason.ENDS_SOONER,
        step(RELAXED, remaining_s=0.1, boundary_s=0.1),
        [job("w", 0.15, work_s=0.1)],
        {},
    ),
    (
        "one member stopped often",
        KeepReason.MAX_PREEMPTIONS,
        step(RELAXED, job("m", preemptions=2)),
        [URGENT],
        {},
    ),
    (
        "one member stopped long",
        KeepReason.MAX_SUSPENDED_TIME,
        step(RELAXED, job("m", suspended_s=5.0)),
        [URGENT],
        {},
    ),
    (
        "it would be stopped for too long",
        KeepReason.MAX_SUSPENDED_TIME,
        step(replace(RELAXED, suspended_s=4.5)),
        [URGENT],
        {},
    ),
    ("three suspended", KeepReason.SUSPENDED_STEPS, step(RELAXED), [URGENT], {"steps": 3}),
    (
        "no memory for it",
        KeepReason.SUSPENDED_BYTES,
        step(RELAXED, checkpoint_bytes=50),
        [URGENT],
        {"held_bytes": 51},
    ),
    ("mostly done", KeepReason.STUBBORN, step(RELAXED, progress=0.5), [URGENT], {"mode": RECOMPUTE}),
    ("time enough", KeepReason.WAITERS_IN_TIME, step(RELAXED), [job("w", 5.0)], {}),
    ("no deadline", KeepReason.WAITERS_IN_TIME, step(RELAXED), [job("w")], {}),
    ("all infeasible", KeepReason.WAITERS_INFEASIBLE, step(RELAXED), [job("w", 0.9), job("v", 0.2)], {}),
    ("about as urgent", KeepReason.MARGIN, step(job("r", 2.1)), [URGENT], {"policy": CONSERVATIVE}),
    ("no more weight", KeepReason.WOULD_HARM, step(job("r", 2.5, weight=4.0)), [URGENT], {}),
    (
        "no more weight, by set",
        KeepReason.WOULD_HARM,
        step(job("r", 2.5, weight=4.0)),
        [URGENT],
        {"policy": FEASIBLE_SET},
    ),
    (
        "less weight, by set",
        KeepReason.WOULD_HARM,
        step(job("r", 2.5, weight=9.0)),
        [URGENT],
        {"policy": FEASIBLE_SET},
    ),
    (
        "preempted for the runner, by set",
        KeepReason.PROTECTED,
        step(RELAXED),
        [replace(URGENT, preempted_by=RELAXED.job_id)],
        {"policy": FEASIBLE_SET},
    ),
    (
        "preempted for another, by set",
        KeepReason.PROTECTED,
        step(RELAXED),
        [replace(URGENT, preempted_by=JobId("other"))],
        {"policy": FEASIBLE_SET},
    ),
    (
        "too late, by set",
        KeepReason.CANNOT_SAVE,
        step(RELAXED, boundary_s=1.1),
        [URGENT],
        {"policy": FEASIBLE_SET},
    ),
    (
        "all infeasible, by set",
        KeepReason.WAITERS_INFEASIBLE,
        step(RELAXED),
        [job("w", 0.9)],
        {"policy": FEASIBLE_SET},
    ),
    (
        "no deadline, by set",
        KeepReason.WAITERS_IN_TIME,
        step(RELAXED),
        [job("w")],
        {"policy": FEASIBLE_SET},
    ),
    (
        "time enough, by set",
        KeepReason.WAITERS_IN_TIME,
        step(RELAXED),
        [job("w", 5.0)],
        {"policy": FEASIBLE_SET},
    ),
    (
        "it can wait, by set",
        KeepReason.PATIENCE,
        step(RELAXED),
        [job("w", 2.8)],
        {"policy": FEASIBLE_SET, "patience": 0.9},
    ),
    (
        "it would be stopped for too long, by set",
        KeepReason.MAX_SUSPENDED_TIME,
        step(replace(RELAXED, suspended_s=4.5)),
        [URGENT],
        {"policy": FEASIBLE_SET},
    ),
    ("due sooner", KeepReason.MARGIN, step(job("r", 2.0)), [job("w", 2.1, weight=9.0)], {}),
    ("too late", KeepReason.CANNOT_SAVE, step(RELAXED, boundary_s=1.1), [URGENT], {}),
    (
        "preempted for the runner",
        KeepReason.PROTECTED,
        step(RELAXED),
        [replace(URGENT, preempted_by=RELAXED.job_id)],
        {},
    ),
    ("its class would starve", KeepReason.STARVING, replace(step(STARVED), guard=math.inf), [URGENT], {}),
    (
        "its class would starve, nobody has the weight",
        KeepReason.STARVING,
        replace(step(STARVED), guard=URGENT.weight),
        [URGENT],
        {"policy": FEASIBLE_SET},
    ),
]
STOPPED = [
    ("cannot wait", PreemptReason.RESCUE, step(RELAXED), {}),
    ("nobody is owed anything", PreemptReason.RESCUE, step(job("r")), {}),
    (
        "it would starve, but the waiter has more weight, by set",
        PreemptReason.RESCUE,
        replace(step(RELAXED), guard=URGENT.weight / 2),
        {"policy": FEASIBLE_SET},
    ),
    (
        "it would starve, but the waiter is of its class",
        PreemptReason.RESCUE,
        replace(step(RELAXED), guard=math.inf),
        {},
    ),
    ("late anyway", PreemptReason.RUNNER_INFEASIBLE, step(job("r", 1.9, weight=9.0)), {}),
    ("cannot wait, by set", PreemptReason.RESCUE, step(RELAXED), {"policy": FEASIBLE_SET}),
    ("nobody is owed anything, by set", PreemptReason.RESCUE, step(job("r")), {"policy": FEASIBLE_SET}),
    (
        "late anyway, by set",
        PreemptReason.RUNNER_INFEASIBLE,
        step(job("r", 1.9, weight=9.0)),
        {"policy": FEASIBLE_SET},
    ),
    ("less weight, by set", PreemptReason.RUNNER_TARDY, step(job("r", 2.5)), {"policy": FEASIBLE_SET}),
    ("nearer", PreemptReason.BEATS_MOST_URGENT, step(RELAXED), {"policy": CONSERVATIVE}),
    (
        "nearer than one",
        PreemptReason.BEATS_LEAST_URGENT,
        step(job("r", 2.1), RELAXED),
        {"policy": AGGRESSIVE},
    ),
]


@pytest.mark.parametrize(
    ("reason", "running", "waiting", "about"), [c[1:] for c in KEPT], ids=[c[0] for c in KEPT]
)
def test_the_step_goes_on(reason, running, waiting, about):
    decision = asked(running, *waiting, **{"limits": LIMITS, **about})
    assert isinstance(decision, Keep)
    assert decision.reason is reason


@pytest.mark.parametrize(
    ("reason", "running", "about"), [c[1:] for c in STOPPED], ids=[c[0] for c in STOPPED]
)
def test_the_step_is_stopped(reason, running, about):
    assert asked(running, URGENT, **about) == Preempt(7, URGENT.job_id, reason)


def test_every_reason_occurs():
    assert {case[1] for case in KEPT} == set(KeepReason)
    assert {case[1] for case in STOPPED} == {*PreemptReason} - {
        PreemptReason.ABANDONED,
        PreemptReason.DIRECTED,
    }


# Who can be met: the four cases.


@pytest.mark.parametrize("policy", PreemptionPolicy)
@pytest.mark.parametrize("runner_due_s", [-3.0, 0.1, 1.9, 2.0, 50.0, NEVER])
@pytest.mark.parametrize("margin", [1.0, 1.2, 100.0])
def test_an_infeasible_waiter_stops_nothing(policy, runner_due_s, margin):
    infeasible = job("infeasible", due_s=0.9, weight=1e9)
    long_infeasible = job("long infeasible", due_s=-7.0, weight=1e9)
    decision = asked(step(job("r", runner_due_s)), infeasible, long_infeasible, policy=policy, margin=margin)
    assert decision == Keep(KeepReason.WAITERS_INFEASIBLE)


@pytest.mark.parametrize("policy", PreemptionPolicy)
def test_an_infeasible_runner_is_preempted_whatever_its_weight(policy):
    decision = asked(step(job("r", 1.9, weight=1e9)), job("w", 2.0), policy=policy, margin=1e6)
    assert decision == Preempt(7, JobId("w"), PreemptReason.RUNNER_INFEASIBLE)


@pytest.mark.parametrize("margin", [0.99, 0.0, -1.0, math.nan])
def test_a_margin_below_one_is_refused(margin):
    with pytest.raises(ValueError, match="at least 1"):
        PreemptionRules(margin=margin)


# Who stands for a step of several.


@pytest.mark.parametrize(
    ("members", "reasons"),
    [
        (
            [2.1, 9.0],
            [
                KeepReason.MARGIN,
                PreemptReason.BEATS_LEAST_URGENT,
                PreemptReason.RESCUE,
                KeepReason.WOULD_HARM,
            ],
        ),
        (
            [2.1, 1.9],
            [
                KeepReason.MARGIN,
                PreemptReason.RUNNER_INFEASIBLE,
                KeepReason.MARGIN,
                PreemptReason.RUNNER_TARDY,
            ],
        ),
        ([1.9, 0.5], [PreemptReason.RUNNER_INFEASIBLE] * 4),
        (
            [1.9, NEVER],
            [
                PreemptReason.RUNNER_INFEASIBLE,
                PreemptReason.BEATS_LEAST_URGENT,
                PreemptReason.RESCUE,
                PreemptReason.RESCUE,
            ],
        ),
    ],
)
def test_conservative_asks_the_most_urgent_aggressive_the_least_rescue_and_on_time_set_all(members, reasons):
    running = step(*(job(f"m{due_s}", due_s) for due_s in members))
    waiter = job("w", 2.0, weight=1.5)
    assert [asked(running, waiter, policy=policy).reason for policy in PreemptionPolicy] == reasons


# Whom a stopped step waits for.


def test_a_stopped_step_waits_for_its_beneficiary_as_long_as_that_one_can_be_met():
    assert must_wait(job("b", 10.0), now_s=9.0)
    assert not must_wait(job("b", 10.0), now_s=9.1)
    assert not must_wait(None, now_s=0.0)


def test_recomputing_is_borne_less_often():
    assert (Limits.default_for(RECOMPUTE).max_preemptions, Limits.default_for(RESUME).max_preemptions) == (
        1,
        64,
    )


# Two requests, each of which looks hopeless while it runs and quick while it waits.


def ping_pong(limits, *, protect):
    """Stops of each until both are done, a millisecond at a time."""
    left_s = {"a": 2.0, "b": 2.0}
    stops = {"a": 0, "b": 0}
    running, waiting = "a", "b"
    preempted_by = None
    now_s = 0.0
    while left_s[running] > 0 or left_s[waiting] > 0:
        left_s[running] -= 0.001
        now_s += 0.001
        if left_s[running] <= 0:
            running, waiting, preempted_by = waiting, running, None
            continue
        runner = job(running, now_s + 1.0, preemptions=stops[running])
        waiter = job(waiting, now_s + 1.0, work_s=0.1, preempted_by=preempted_by)
        queue = [waiter] if left_s[waiting] > 0 else []
        state = ReplicaState(step(runner, remaining_s=1.5), queue)
        if isinstance(decide(state, now_s, rules(limits=limits)), Preempt):
            stops[running] += 1
            preempted_by = JobId(waiting) if protect else None
            running, waiting = waiting, running
    return stops


def test_ping_pong_is_real_without_limits():
    assert sum(ping_pong(Limits(max_preemptions=10**9), protect=False).values()) > 3000


@pytest.mark.parametrize("most", [0, 1, 8])
def test_ping_pong_is_bounded_by_the_limit(most):
    assert max(ping_pong(Limits(max_preemptions=most), protect=False).values()) == most


def test_protection_ends_ping_pong_at_once():
    assert ping_pong(Limits(max_preemptions=10**9), protect=True) == {"a": 1, "b": 0}


# Properties.

PREFILLS = st.builds(
    Prefill,
    st.integers(0, 10**6).map(lambda number: JobId(str(number))),
    weight=st.sampled_from([1.0, 2.0, 4.0]),
    deadline_s=st.one_of(st.just(NEVER), st.floats(90, 120)),
    remaining_s=st.floats(0.001, 5),
    arrived_s=st.floats(0, 100),
    preemptions=st.integers(0, 3),
    suspended_s=st.floats(0, 8),
    preempted_by=st.sampled_from([None, None, None, JobId("0")]),
)


@st.composite
def states(draw):
    members = draw(st.lists(PREFILLS, min_size=1, max_size=3))
    restart_s = draw(st.floats(0.01, 5))
    progress = draw(st.floats(0, 1))
    running = step(
        *members,
        remaining_s=restart_s * (1 - progress),
        restart_s=restart_s,
        progress=progress,
        checkpoint_bytes=draw(st.integers(0, 60)),
        boundary_s=restart_s / 32 + draw(st.floats(0, 0.1)),
    )
    queue = draw(st.lists(PREFILLS, max_size=6))
    return ReplicaState(running, queue, draw(st.integers(0, 3)), draw(st.integers(0, 60)))


ALL_RULES = st.builds(
    PreemptionRules,
    st.sampled_from([RESUME, RECOMPUTE]),
    st.sampled_from(PreemptionPolicy),
    margin=st.floats(1, 3),
    limits=st.just(LIMITS),
)
NOW_S = 100.0


@settings(max_examples=300)
@given(states(), ALL_RULES)
def test_a_step_at_its_limits_is_never_stopped(state, rules):
    running = state.running
    at_limit = (
        any(m.preemptions >= 2 or m.suspended_s >= 5.0 for m in running.members)
        or state.suspended_steps >= 3
        or (rules.mode is RESUME and state.suspended_bytes + running.checkpoint_bytes > 100)
        or (rules.mode is RECOMPUTE and running.progress >= 0.5)
    )
    decision = decide(state, NOW_S, rules)
    if at_limit:
        assert decision == Keep(
            limit_reached(running, state, rules) if state.waiting else KeepReason.NOBODY_WAITS
        )


@settings(max_examples=500)
@given(states(), ALL_RULES)
def test_a_rescue_saves_its_waiter_and_harms_less_than_its_weight(state, rules):
    rules = dataclasses.replace(rules, policy=RESCUE, limits=Limits(10**9, math.inf, 10**9, 10**9, 2.0))
    decision = decide(state, NOW_S, rules)
    if not isinstance(decision, Preempt):
        return
    running = state.running
    members = {member.job_id for member in running.members}
    free_s = NOW_S + running.boundary_s
    for waiter in state.waiting:
        ends_s = free_s + waiter.remaining_s
        if (
            waiter.job_id == decision.beneficiary
            and waiter.preempted_by is None
            and ends_s <= waiter.deadline_s
        ):
            break
        # Who was preempted by a member does not resume before it.
        if ends_s <= waiter.deadline_s and waiter.preempted_by not in members:
            free_s = ends_s
    assert ends_s <= waiter.deadline_s
    redo_s = running.restart_s if rules.mode is RECOMPUTE else running.remaining_s
    on_time = [m for m in running.members if NOW_S + running.remaining_s <= m.deadline_s]
    harmed = [m for m in on_time if ends_s + redo_s > m.deadline_s + 1e-9]
    assert sum(m.weight for m in harmed) < waiter.weight


@settings(max_examples=300)
@given(states(), ALL_RULES)
def test_the_timer_lies_ahead(state, rules):
    decision = decide(state, NOW_S, dataclasses.replace(rules, limits=Limits()))
    if isinstance(decision, Keep):
        assert decision.recheck_at_s > NOW_S
