"""Preemption that follows from who can be on time together, with the running step as one among the others.

Owns the rule of `PreemptionPolicy.ON_TIME_SET`. Limits, the other policies and what they share are
`slo.preemption`'s.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from slo.on_time import on_time_set
from slo.preemption_terms import (
    Decision,
    Keep,
    KeepReason,
    Preempt,
    PreemptionMode,
    PreemptionRules,
    PreemptReason,
    Prefill,
    ReplicaState,
    RunningStep,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slo.forecast import Forecast


def decide_by_set(
    state: ReplicaState, now_s: float, rules: PreemptionRules, forecast: Forecast | None
) -> Decision:
    """Stop the step if letting it end first would make somebody late who can be on time.

    All that wait and the running step together are given to `slo.on_time`. If the step is not among those that
    are kept, it makes way as soon as it is in the way of one of them; if it is, it does so only for those with
    nearer deadlines that cannot wait for its end. So one long prefill is given up for two short ones, whoever
    came first, and nothing is stopped that is in nobody's way.

    Args:
        state: What runs, at least, and what waits, in any order.
        now_s: The time.
        rules: Of them, the margin is how many times its predicted time the step is reckoned with.
        forecast: What will arrive; see `slo.on_time`.
    """
    step = state.running
    assert step is not None
    stop_s = rules.stop_latency_s + step.boundary_s
    limit_s = rules.limits.max_suspended_s
    overdue_s = sum(waiter.remaining_s for waiter in state.waiting if waiter.suspended_s >= limit_s)
    runner = _as_prefill(step, now_s, rules)
    members = {member.job_id for member in step.members}
    pool = [
        waiter
        for waiter in state.waiting
        if waiter.suspended_s < limit_s and waiter.yielded_to not in members
    ]
    ahead_s = stop_s + overdue_s
    kept = on_time_set(pool if runner is None else [*pool, runner], now_s + ahead_s, forecast).kept
    late, least_spare_s = _hurt(kept, runner, overdue_s + rules.margin * step.remaining_s, now_s)
    if not late:
        at_s = now_s + least_spare_s - rules.margin * stop_s
        in_time = any(prefill is not runner for prefill in kept) or _none_is_due(pool)
        reason = KeepReason.WAITERS_IN_TIME if in_time else KeepReason.WAITERS_LOST
        return Keep(reason, at_s if at_s > now_s else math.inf)
    return _preempt(step, kept, runner, ahead_s, rules)


def _as_prefill(step: RunningStep, now_s: float, rules: PreemptionRules) -> Prefill | None:
    """The step as one prefill that is stopped now; None when none of its members can be on time."""
    on_time = [member for member in step.members if now_s + step.remaining_s <= member.deadline_s]
    if not on_time:
        return None
    first = min(on_time, key=lambda member: member.deadline_s)
    return Prefill(
        job_id=first.job_id,
        weight=sum(member.weight for member in on_time),
        deadline_s=first.deadline_s,
        remaining_s=step.restart_s if rules.mode is PreemptionMode.RECOMPUTE else step.remaining_s,
        arrived_s=first.arrived_s,
        preemptions=first.preemptions,
    )


def _hurt(
    kept: Sequence[Prefill], runner: Prefill | None, first_s: float, now_s: float
) -> tuple[bool, float]:
    """Whether somebody is late who waits `first_s` for the step; else the least that anybody has to spare."""
    end_s, least_spare_s = now_s + first_s, math.inf
    for prefill in kept:
        if prefill is runner:
            continue
        end_s += prefill.remaining_s
        spare_s = prefill.deadline_s - end_s
        if spare_s < 0:
            return True, 0.0
        least_spare_s = min(least_spare_s, spare_s)
    return False, least_spare_s


def _none_is_due(pool: Sequence[Prefill]) -> bool:
    return all(waiter.deadline_s == math.inf for waiter in pool)


def _preempt(
    step: RunningStep, kept: Sequence[Prefill], runner: Prefill | None, ahead_s: float, rules: PreemptionRules
) -> Decision:
    """Stop the step for those that are kept before it, if there are any and it may wait for them."""
    is_kept = any(prefill is runner for prefill in kept)
    before = kept[: next(i for i, prefill in enumerate(kept) if prefill is runner)] if is_kept else kept
    if not before:
        return Keep(KeepReason.MARGIN)
    beneficiary = next((prefill for prefill in before if prefill.yielded_to is None), None)
    if beneficiary is None:
        return Keep(KeepReason.PROTECTED)
    suspended_s = max(member.suspended_s for member in step.members)
    if is_kept and ahead_s + sum(p.remaining_s for p in before) > rules.limits.max_suspended_s - suspended_s:
        return Keep(KeepReason.MAX_SUSPENDED_TIME)
    reason = PreemptReason.RUNNER_GIVEN_UP
    if runner is None:
        reason = PreemptReason.RUNNER_LOST
    elif is_kept:
        reason = PreemptReason.RESCUE
    return Preempt(step.step_id, beneficiary.job_id, reason)
