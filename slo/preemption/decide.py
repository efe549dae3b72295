"""Whether the running forward pass makes way for a waiting prefill.

Owns the rules and the limits of preemption. Does not order the queue (see `slo.queue.order`), does not stop
anything, and keeps no state: what a request has been through comes in with it.

Whether the waiter and the runner can still meet their deadlines makes four cases, each a rule of its own. A
single priority with a margin does not do: multiplying a negative priority by a margin inverts it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, assert_never

import msgspec

from slo.preemption.feasible_set_policy import decide_by_set
from slo.preemption.types import (
    Decision,
    Keep,
    KeepReason,
    Limits,
    Preempt,
    PreemptionMode,
    PreemptionPolicy,
    PreemptionRules,
    PreemptReason,
    ReplicaState,
    RunningStep,
)
from slo.queue.prefill import Prefill
from slo.queue.slack import SlackRank, sedf_rank, slack_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slo.queue.arrival_forecast import Forecast

__all__ = [
    "Decision",
    "Keep",
    "KeepReason",
    "Limits",
    "Preempt",
    "PreemptReason",
    "PreemptionMode",
    "PreemptionPolicy",
    "PreemptionRules",
    "Prefill",
    "ReplicaState",
    "RunningStep",
    "as_one",
    "decide",
    "limit_reached",
    "must_wait",
    "refusal_of",
]


def decide(
    state: ReplicaState, now_s: float, rules: PreemptionRules, forecast: Forecast | None = None
) -> Decision:
    """Whether to stop the running step, and for whom.

    Waiters are looked at in the queue's order, and the first that may stop the step does. Those before it
    that can be met run before it, so that their work counts as its own. `PreemptionPolicy.FEASIBLE_SET` looks
    at all of them at once, in any order, and heeds the `forecast`.
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
    if rules.policy is PreemptionPolicy.FEASIBLE_SET:
        return decide_by_set(state, now_s, rules, forecast)
    return _Contest(running, now_s, rules).against(state.waiting)


def limit_reached(  # noqa: PLR0911 - one for each limit
    step: RunningStep, state: ReplicaState, rules: PreemptionRules
) -> KeepReason | None:
    """Why `step` cannot be stopped, whoever waits; None when it can."""
    limits, recompute = rules.limits, rules.mode is PreemptionMode.RECOMPUTE
    if not step.stoppable:
        return KeepReason.NOT_STOPPABLE
    if max([member.preemptions for member in step.members], default=0) >= limits.max_preemptions:
        return KeepReason.MAX_PREEMPTIONS
    if max([member.suspended_s for member in step.members], default=0.0) >= limits.max_suspended_s:
        return KeepReason.MAX_SUSPENDED_TIME
    if state.suspended_steps >= limits.max_suspended_steps:
        return KeepReason.SUSPENDED_STEPS
    if not recompute and state.suspended_bytes + step.checkpoint_bytes > limits.max_suspended_bytes:
        return KeepReason.SUSPENDED_BYTES
    if recompute and step.progress >= limits.stubborn_after:
        return KeepReason.STUBBORN
    return KeepReason.ENDS_SOONER if step.remaining_s <= rules.stop_latency_s + step.boundary_s else None


def refusal_of(step: RunningStep, waiter: Prefill, now_s: float, rules: PreemptionRules) -> KeepReason | None:
    """Why a step is not stopped for this waiter even if somebody orders it; None when it is.

    Besides the limits of `limit_reached`: a waiter that has made way itself is not made way for, nor one that
    a class that starves goes before; a stop must save it, and leave the step within its time of suspension.
    """
    stop_s = rules.stop_latency_s + step.boundary_s
    suspended_s = max((member.suspended_s for member in step.members), default=0.0)
    table = (
        (waiter.preempted_by is not None, KeepReason.PROTECTED),
        (_is_guarded(step, waiter), KeepReason.STARVING),
        (_slack_s(waiter, now_s, waiter.remaining_s) < stop_s, KeepReason.CANNOT_SAVE),
        (
            suspended_s + stop_s + waiter.remaining_s > rules.limits.max_suspended_s,
            KeepReason.MAX_SUSPENDED_TIME,
        ),
    )
    return next((reason for is_so, reason in table if is_so), None)


def _is_guarded(step: RunningStep, waiter: Prefill) -> bool:
    """Whether a step goes before a waiter by the right of its class, which the waiter does not share."""
    if waiter.weight > step.guard:
        return False
    return step.guard > 0 and any(member.tier != waiter.tier for member in step.members)


def must_wait(beneficiary: Prefill | None, now_s: float) -> bool:
    """Whether a step that made way for `beneficiary` still waits for it.

    It does until that one has ended (None) or is lost. A lost one goes to the back of the queue, and whoever
    waited for it there would be suspended for as long as the overload lasts.
    """
    return beneficiary is not None and _slack_s(beneficiary, now_s, beneficiary.remaining_s) >= 0


def as_one(members: Sequence[Prefill], now_s: float) -> Prefill:
    """What the members of a suspended step are to the queue.

    They run together, so the step is as urgent as the most urgent of them that can be met, worth as much as
    all, and has waited as long as the one that has waited longest.

    Args:
        members: At least one; all with the same remaining time, that of the step.
        now_s: The time.
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


class _Contest:
    """A running step against those who wait, at one instant."""

    def __init__(self, step: RunningStep, now_s: float, rules: PreemptionRules) -> None:
        rival = _rival(step, now_s, rules.policy)
        recompute = rules.mode is PreemptionMode.RECOMPUTE
        redo_s = step.restart_s - step.remaining_s if recompute else 0.0
        self._step = step
        self._now_s = now_s
        self._policy = rules.policy
        self._margin = rules.margin
        self._stop_s = rules.stop_latency_s + step.boundary_s
        self._wait_s = rules.margin * step.remaining_s
        self._rival_due_s = rival.deadline_s - now_s
        self._runner_infeasible = _slack_s(rival, now_s, rival.remaining_s) < 0
        self._victims = [
            (_slack_s(member, now_s, redo_s + member.remaining_s), member.weight)
            for member in step.members
            if _slack_s(member, now_s, member.remaining_s) >= 0
        ]
        """Of each member on time: how long a stop it can bear, and its worth."""
        suspended_s = max(member.suspended_s for member in step.members)
        self._suspendable_s = rules.limits.max_suspended_s - suspended_s

    def against(self, waiting: Sequence[Prefill]) -> Decision:
        now_s, stop_s, wait_s = self._now_s, self._stop_s, self._wait_s
        members = {member.job_id for member in self._step.members}
        reason, min_spare_s, ahead_s = KeepReason.WAITERS_INFEASIBLE, math.inf, 0.0
        for waiter in waiting:
            work_s = ahead_s + waiter.remaining_s
            spare_s = waiter.deadline_s - now_s - work_s
            verdict = self._verdict(waiter, work_s, spare_s)
            if isinstance(verdict, PreemptReason):
                return Preempt(self._step.step_id, waiter.job_id, verdict)
            if reason is KeepReason.WAITERS_INFEASIBLE or (
                reason is KeepReason.WAITERS_IN_TIME and verdict is not KeepReason.WAITERS_INFEASIBLE
            ):
                reason = verdict
            if wait_s <= spare_s < min_spare_s:
                min_spare_s = spare_s
            if spare_s >= stop_s and waiter.preempted_by not in members:
                ahead_s = work_s
        return Keep(reason, self._critical_at_s(min_spare_s))

    def _verdict(self, waiter: Prefill, work_s: float, spare_s: float) -> PreemptReason | KeepReason:
        """Whether this waiter may stop the step; who can be met makes four cases.

        Args:
            waiter: The waiter.
            work_s: Its work, and that of those that run before it.
            spare_s: What is left of its budget if that starts now.
        """
        if spare_s == math.inf or (self._policy is PreemptionPolicy.RESCUE and spare_s >= self._wait_s):
            return KeepReason.WAITERS_IN_TIME
        waiter_infeasible = spare_s < 0
        if waiter_infeasible and self._runner_infeasible:
            return KeepReason.WAITERS_INFEASIBLE  # nobody would be on time by it
        if waiter_infeasible:
            return KeepReason.WAITERS_INFEASIBLE  # and the runner might become late by it
        if spare_s < self._stop_s:
            return KeepReason.CANNOT_SAVE
        if self._runner_infeasible:  # nobody becomes late by it
            return self._unless_banned(PreemptReason.RUNNER_INFEASIBLE, waiter, work_s)
        return self._between_two_on_time(waiter, work_s)

    def _between_two_on_time(self, waiter: Prefill, work_s: float) -> PreemptReason | KeepReason:
        # Both deadlines lie ahead, so that the margin, a factor, means what it says.
        if self._rival_due_s <= self._margin * (waiter.deadline_s - self._now_s):
            return KeepReason.MARGIN
        match self._policy:
            case PreemptionPolicy.CONSERVATIVE:
                return self._unless_banned(PreemptReason.BEATS_MOST_URGENT, waiter, work_s)
            case PreemptionPolicy.AGGRESSIVE:
                return self._unless_banned(PreemptReason.BEATS_LEAST_URGENT, waiter, work_s)
            case PreemptionPolicy.RESCUE:
                delay_s = self._stop_s + work_s
                harm = sum(weight for bearable_s, weight in self._victims if bearable_s < delay_s)
                if harm >= waiter.weight:
                    return KeepReason.WOULD_HARM
                return self._unless_banned(PreemptReason.RESCUE, waiter, work_s)
            case PreemptionPolicy.FEASIBLE_SET:
                raise AssertionError("decided in slo.preemption.feasible_set_policy")
            case _:
                assert_never(self._policy)

    def _unless_banned(
        self, reason: PreemptReason, waiter: Prefill, work_s: float
    ) -> PreemptReason | KeepReason:
        if waiter.preempted_by is not None:
            return KeepReason.PROTECTED
        return KeepReason.MAX_SUSPENDED_TIME if work_s > self._suspendable_s else reason

    def _critical_at_s(self, spare_s: float) -> float:
        """Until when a stop still helps the waiter with the least to spare; the margin is time to react."""
        critical_at_s = self._now_s + spare_s - self._margin * self._stop_s
        return critical_at_s if critical_at_s > self._now_s else math.inf


def _rival(step: RunningStep, now_s: float, policy: PreemptionPolicy) -> Prefill:
    """The member that a waiter must beat, and that stands for the step when it is asked who is lost."""
    if policy is PreemptionPolicy.RESCUE:
        return max(step.members, key=lambda member: member.deadline_s)

    def rank(member: Prefill) -> SlackRank:
        return sedf_rank(member.deadline_s, now_s, member.remaining_s, member.arrived_s)

    choose = min if policy is PreemptionPolicy.CONSERVATIVE else max
    return choose(step.members, key=rank)


def _slack_s(prefill: Prefill, now_s: float, remaining_s: float) -> float:
    return slack_s(prefill.deadline_s, now_s, remaining_s)
