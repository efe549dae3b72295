"""Preemption by the feasible set: who can be on time together, the running step being one among the others.

Owns the rule of `PreemptionPolicy.FEASIBLE_SET`. Limits, the other policies and what they share are
`slo.preemption.decide`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

import msgspec

from slo.preemption.types import (
    Keep,
    KeepReason,
    Preempt,
    PreemptionDecision,
    PreemptionMode,
    PreemptionRules,
    PreemptReason,
    RunningStep,
)
from slo.queue.arrival_forecast import Expected, Forecast
from slo.queue.class_targets import ClassPrices, TargetState
from slo.queue.feasible_set import FeasibleSet, feasible_set, value
from slo.queue.prefill import Prefill, ends_s, together_s

_NOTHING_S: Final = 1e-9
"""Less work than this is the rounding of sums."""
_SOON_S: Final = 1e-3
"""A stop that can wait no longer than this is not put off."""


def decide_by_feasible_set(
    step: RunningStep,
    waiting: Sequence[Prefill],
    now_s: float,
    rules: PreemptionRules,
    forecast: Forecast | None,
    targets: TargetState | None = None,
) -> PreemptionDecision:
    """Stop the step if the value on time is higher than when it ends first.

    The waiters and the running step together are given to `slo.queue.feasible_set`. A step outside the
    feasible set is preempted as soon as it delays one that is in it; a step inside is preempted only for
    those with nearer deadlines that cannot wait for its end. So one long prefill is preempted for two short
    ones, whichever came first, and a step that delays nobody is never stopped.

    Waiters that have been suspended for as long as they may be go before all others; nothing is stopped for
    them. Those that were preempted for the step itself are left out. The rules' margin is how many times its
    predicted time the step is assumed to take; with `targets`, only so much of it as a waiter's class is
    insured (`slo.queue.class_targets`). Then, in an overload, a step that is late anyway stops for whoever is
    not. With patience a stop waits while all that it is for would have their first token within that part of
    their objectives: the step may end first, and who comes meanwhile shares the stop, and a pass.
    """
    limit_s = rules.limits.max_suspended_s
    members = {member.job_id for member in step.members}
    suspendable = [waiter for waiter in waiting if waiter.suspended_s < limit_s]
    pool = [waiter for waiter in suspendable if waiter.preempted_by not in members]
    if suspendable and not pool:
        return Keep(KeepReason.PROTECTED)
    overdue_s = together_s([waiter for waiter in waiting if waiter.suspended_s >= limit_s])
    stop_s = step.boundary_s
    prices = None if targets is None else targets.at([*step.members, *waiting], now_s)
    runner = _as_prefill(step, now_s, rules)  # leads those with the same deadline and arrival
    expected = None if forecast is None else forecast.at(now_s)
    stopped = feasible_set(
        pool if runner is None else [runner, *pool], now_s + stop_s + overdue_s, expected, prices
    )
    before = [*takewhile(lambda prefill: prefill is not runner, stopped.feasible)]
    in_set = len(before) < len(stopped.feasible)
    is_crowded = expected is not None and expected.pressure > 0
    if before and runner is None and prices is not None and is_crowded:
        return _preempt(step, runner, before, stop_s + overdue_s, limit_s, in_set=in_set)
    spare_s, ended_s = _binding(before, step.remaining_s, now_s, overdue_s, rules.margin, prices)
    if spare_s >= 0:
        # Who is in time now can become late only by a slow step, and that shows at its boundaries.
        at_s = now_s + spare_s + stop_s
        reason = _why_not(stopped, pool, now_s, in_set=in_set)
        return Keep(reason, at_s if at_s > now_s else math.inf)
    left_s = _patience_left_s(before, now_s + stop_s + overdue_s, rules.patience)
    if left_s > _SOON_S:
        return Keep(KeepReason.PATIENCE, now_s + left_s)
    value_if_ended = _value_if_ended(step, runner, pool, ended_s, expected, prices, rules.mode)
    if value_if_ended >= _sum_of_values(stopped.feasible, prices):
        return Keep(KeepReason.WOULD_HARM)
    return _preempt(step, runner, before, stop_s + overdue_s, limit_s, in_set=in_set)


def _value_if_ended(
    step: RunningStep,
    runner: Prefill | None,
    pool: Sequence[Prefill],
    ended_s: float,
    expected: Expected | None,
    prices: ClassPrices | None,
    mode: PreemptionMode,
) -> float:
    """The value on time if the step runs to its end at `ended_s`.

    A runner without a deadline adds nothing: stopping it does not make it late. A runner whose prompt is
    longer than the step waits with the others for its next chunk.
    """
    ended_value = 0.0
    if runner is not None and runner.deadline_s < math.inf:
        took_s = step.restart_s if mode is PreemptionMode.RECOMPUTE else step.remaining_s
        if (behind_s := runner.remaining_s - took_s) <= _NOTHING_S:
            ended_value = value(runner, prices)
        else:
            pool = [msgspec.structs.replace(runner, remaining_s=behind_s), *pool]
    return ended_value + _sum_of_values(feasible_set(pool, ended_s, expected, prices).feasible, prices)


def _sum_of_values(prefills: Sequence[Prefill], prices: ClassPrices | None) -> float:
    return sum([value(prefill, prices) for prefill in prefills])


def _as_prefill(step: RunningStep, now_s: float, rules: PreemptionRules) -> Prefill | None:
    """The step as one prefill that is stopped now; None when none of its members can be on time."""
    on_time = [member for member in step.members if now_s + member.remaining_s <= member.deadline_s]
    if not on_time:
        return None
    first = min(on_time, key=lambda member: member.deadline_s)
    redo_s = step.restart_s - step.remaining_s if rules.mode is PreemptionMode.RECOMPUTE else 0.0
    return Prefill(
        job_id=first.job_id,
        weight=sum(member.weight for member in on_time),
        deadline_s=first.deadline_s,
        remaining_s=first.remaining_s + redo_s,
        arrived_s=first.arrived_s,
        preemptions=first.preemptions,
        tier=first.tier,
    )


def _binding(
    prefills: Sequence[Prefill],
    step_s: float,
    now_s: float,
    overdue_s: float,
    margin: float,
    prices: ClassPrices | None,
) -> tuple[float, float]:
    """(smallest slack of any when they run in this order behind the step, when that ends by its margin)."""
    ended_s = now_s + margin * step_s + overdue_s
    if prices is None:
        return _min_spare_s(prefills, ended_s), ended_s
    min_s = math.inf
    for prefill, took_s in zip(prefills, ends_s(prefills), strict=True):
        end_s = now_s + prices.insured(prefill.tier, margin) * step_s + overdue_s
        if (spare_s := prefill.deadline_s - end_s - took_s) < min_s:
            min_s, ended_s = spare_s, end_s
    return min_s, ended_s


def _min_spare_s(prefills: Sequence[Prefill], start_s: float) -> float:
    """The smallest slack of any of them when they run in this order from `start_s` on."""
    ends = zip(prefills, ends_s(prefills, start_s), strict=True)
    return min([prefill.deadline_s - end_s for prefill, end_s in ends], default=math.inf)


def _patience_left_s(prefills: Sequence[Prefill], start_s: float, patience: float) -> float:
    """How long a stop can wait for those that run in this order from `start_s` on, some of whom are due."""
    if patience == 0.0:
        return 0.0
    ends = zip(prefills, ends_s(prefills, start_s), strict=True)
    return min([one.arrived_s + patience * (one.deadline_s - one.arrived_s) - end_s for one, end_s in ends])


def _why_not(stopped: FeasibleSet, pool: Sequence[Prefill], now_s: float, *, in_set: bool) -> KeepReason:
    """Why nobody among `pool` needs the step to stop; `in_set` says that the step is in the feasible set."""
    if in_set and stopped.tardy:
        return KeepReason.WOULD_HARM
    due = [waiter for waiter in pool if waiter.deadline_s < math.inf]
    if not due or len(stopped.feasible) > in_set:
        return KeepReason.WAITERS_IN_TIME
    if any(now_s + waiter.remaining_s <= waiter.deadline_s for waiter in due):
        return KeepReason.CANNOT_SAVE
    return KeepReason.WAITERS_INFEASIBLE


def _preempt(
    step: RunningStep,
    runner: Prefill | None,
    before: Sequence[Prefill],
    ahead_s: float,
    limit_s: float,
    *,
    in_set: bool,
) -> PreemptionDecision:
    """Stop the step for the first waiter that may stop it, unless it would then be suspended for too long.

    `before` is the feasible set up to the runner, all of it when the runner is not in it (`in_set`);
    `ahead_s` the time from now until the first of them starts.
    """
    first = next((place for place, prefill in enumerate(before) if prefill.preempted_by is None), None)
    if first is None:
        return Keep(KeepReason.PROTECTED)
    awaited = before if in_set else before[: first + 1]
    suspended_s = max(member.suspended_s for member in step.members)
    if suspended_s + ahead_s + together_s(awaited) > limit_s:
        return Keep(KeepReason.MAX_SUSPENDED_TIME)
    reason = PreemptReason.RUNNER_TARDY
    if runner is None:
        reason = PreemptReason.RUNNER_INFEASIBLE
    elif in_set or runner.deadline_s == math.inf:
        reason = PreemptReason.RESCUE
    return Preempt(step.step_id, before[first].job_id, reason)
