"""Whether the running forward pass is preempted for a waiting prefill.

Owns what holds under every policy: the limits of preemption, when a suspended step goes on, and which policy
is asked (`slo.preemption.feasible_set_policy`, `slo.preemption.deadline_policies`). Does not order the queue
(see `slo.queue.order`), does not stop anything, and keeps no state: a request's history comes in with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import msgspec

from slo.preemption.deadline_policies import decide_by_deadlines
from slo.preemption.feasible_set_policy import decide_by_feasible_set
from slo.preemption.types import (
    Keep,
    KeepReason,
    PreemptionDecision,
    PreemptionMode,
    PreemptionPolicy,
    PreemptionRules,
    ReplicaState,
    RunningStep,
)
from slo.queue.arrival_forecast import Forecast
from slo.queue.class_targets import TargetState
from slo.queue.prefill import Prefill
from slo.queue.slack import slack_s


def decide(
    state: ReplicaState,
    now_s: float,
    rules: PreemptionRules,
    forecast: Forecast | None = None,
    targets: TargetState | None = None,
) -> PreemptionDecision:
    """Whether to stop the running step, and for whom.

    `PreemptionPolicy.FEASIBLE_SET` alone heeds the forecast and the targets of classes.
    """
    if rules.mode is PreemptionMode.OFF:
        return Keep(KeepReason.OFF)
    if state.running is None:
        return Keep(KeepReason.IDLE)
    running, guard = state.running, state.running.guard
    if guard > 0 and state.waiting:
        others = [waiter for waiter in state.waiting if not _is_guarded(running, waiter)]
        state = msgspec.structs.replace(state, waiting=others)
    if not state.waiting:
        return Keep(KeepReason.STARVING if guard > 0 else KeepReason.NOBODY_WAITS)
    if (limit := limit_reached(running, state, rules)) is not None:
        return Keep(limit)
    match rules.policy:
        case PreemptionPolicy.FEASIBLE_SET:
            return decide_by_feasible_set(running, state.waiting, now_s, rules, forecast, targets)
        case PreemptionPolicy.CONSERVATIVE | PreemptionPolicy.AGGRESSIVE | PreemptionPolicy.RESCUE:
            return decide_by_deadlines(running, state.waiting, now_s, rules)
        case _:
            assert_never(rules.policy)


def limit_reached(  # noqa: PLR0911 - one for each limit
    step: RunningStep, state: ReplicaState, rules: PreemptionRules
) -> KeepReason | None:
    """Why `step` cannot be stopped, whoever waits; None when it can."""
    limits, recompute = rules.limits, rules.mode is PreemptionMode.RECOMPUTE
    if not step.stoppable:
        return KeepReason.NOT_STOPPABLE
    if max([member.preemptions_in_chunk for member in step.members], default=0) >= limits.max_preemptions:
        return KeepReason.MAX_PREEMPTIONS
    if max([member.suspended_s for member in step.members], default=0.0) >= limits.max_suspended_s:
        return KeepReason.MAX_SUSPENDED_TIME
    if state.suspended_steps >= limits.max_suspended_steps:
        return KeepReason.SUSPENDED_STEPS
    if not recompute and state.suspended_bytes + step.checkpoint_bytes > limits.max_suspended_bytes:
        return KeepReason.SUSPENDED_BYTES
    if recompute and step.progress >= limits.stubborn_after:
        return KeepReason.STUBBORN
    return KeepReason.ENDS_SOONER if step.remaining_s <= step.boundary_s else None


def refusal_of(step: RunningStep, waiter: Prefill, now_s: float, rules: PreemptionRules) -> KeepReason | None:
    """Why a step is not stopped for this waiter even on the monitor's order; None when it is.

    This is besides `limit_reached`. The waiter must not have been preempted itself, nor the step be guarded
    against it; stopping must let it meet its deadline, within the time that the step may be suspended.
    """
    suspended_s = max((member.suspended_s for member in step.members), default=0.0)
    table = (
        (waiter.preempted_by is not None, KeepReason.PROTECTED),
        (_is_guarded(step, waiter), KeepReason.STARVING),
        (slack_s(waiter.deadline_s, now_s, waiter.remaining_s) < step.boundary_s, KeepReason.CANNOT_SAVE),
        (
            suspended_s + step.boundary_s + waiter.remaining_s > rules.limits.max_suspended_s,
            KeepReason.MAX_SUSPENDED_TIME,
        ),
    )
    return next((reason for is_so, reason in table if is_so), None)


def _is_guarded(step: RunningStep, waiter: Prefill) -> bool:
    """Whether the waiter is of another class than the step and of too little weight to pass its guard."""
    if waiter.weight > step.guard:
        return False
    return step.guard > 0 and any(member.tier != waiter.tier for member in step.members)


def must_wait(beneficiary: Prefill | None, now_s: float) -> bool:
    """Whether a step that was preempted for `beneficiary` still waits for it.

    It waits until the beneficiary has ended (None) or its deadline is infeasible. An infeasible one goes to
    the back of the queue; waiting for it there would last as long as the overload.
    """
    return beneficiary is not None and slack_s(beneficiary.deadline_s, now_s, beneficiary.remaining_s) >= 0


def as_one(members: Sequence[Prefill], now_s: float) -> Prefill:
    """The members of a suspended step as one prefill of the queue.

    They run together, so the step is as urgent as its most urgent feasible member, has the weight of all, and
    has been suspended for as long as the longest suspended of them. All of them have the same remaining time,
    that of the step.
    """
    if len(members) == 1:
        return members[0]
    urgent = min(
        members, key=lambda member: (member.deadline_s < now_s + member.remaining_s, member.deadline_s)
    )
    return msgspec.structs.replace(
        urgent,
        weight=sum(member.weight for member in members),
        suspended_s=max(member.suspended_s for member in members),
    )
