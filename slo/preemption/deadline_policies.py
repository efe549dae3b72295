"""Preemption by comparing the running step with one waiter at a time: conservative, aggressive and rescue.

Owns the rules of these three policies. Limits and all that holds under every policy are
`slo.preemption.decide`'s.

Whether the waiter and the runner can still meet their deadlines makes four cases, each a rule of its own. A
single priority with a margin does not do: multiplying a negative priority by a margin inverts it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from slo.preemption.types import (
    Keep,
    KeepReason,
    Preempt,
    PreemptionDecision,
    PreemptionMode,
    PreemptionPolicy,
    PreemptionRules,
    PreemptReason,
    RunningStep,
)
from slo.queue.prefill import Prefill
from slo.queue.slack import SlackRank, sedf_rank, slack_s


def decide_by_deadlines(
    step: RunningStep, waiting: Sequence[Prefill], now_s: float, rules: PreemptionRules
) -> PreemptionDecision:
    """Stop the step for the first waiter, in the queue's order, that may stop it.

    Feasible waiters before that one run before it, so their work counts as its own.
    """
    return _Contest(step, now_s, rules).against(waiting)


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
        self._stop_s = step.boundary_s
        self._wait_s = rules.margin * step.remaining_s
        self._rival_due_s = rival.deadline_s - now_s
        self._runner_infeasible = slack_s(rival.deadline_s, now_s, rival.remaining_s) < 0
        self._victims = [
            (slack_s(member.deadline_s, now_s, redo_s + member.remaining_s), member.weight)
            for member in step.members
            if slack_s(member.deadline_s, now_s, member.remaining_s) >= 0
        ]
        """Of each feasible member: the longest stop that keeps it on time, and its weight."""
        suspended_s = max(member.suspended_s for member in step.members)
        self._suspendable_s = rules.limits.max_suspended_s - suspended_s

    def against(self, waiting: Sequence[Prefill]) -> PreemptionDecision:
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
        """Whether this waiter may stop the step; who is feasible makes four cases.

        `work_s` is its work and that of those that run before it, `spare_s` what is left of its budget if
        that starts now.
        """
        if spare_s == math.inf or (self._policy is PreemptionPolicy.RESCUE and spare_s >= self._wait_s):
            return KeepReason.WAITERS_IN_TIME
        if spare_s < 0:
            # An infeasible runner would not be helped by it either, and a feasible one might become late.
            return KeepReason.WAITERS_INFEASIBLE
        if spare_s < self._stop_s:
            return KeepReason.CANNOT_SAVE
        if self._runner_infeasible:  # nobody becomes late by it
            return self._unless_banned(PreemptReason.RUNNER_INFEASIBLE, waiter, work_s)
        return self._between_two_feasible(waiter, work_s)

    def _between_two_feasible(self, waiter: Prefill, work_s: float) -> PreemptReason | KeepReason:
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
            case _:
                raise AssertionError(f"{self._policy} does not compare deadlines")

    def _unless_banned(
        self, reason: PreemptReason, waiter: Prefill, work_s: float
    ) -> PreemptReason | KeepReason:
        """`reason`, unless the waiter is protected or the step would be suspended for too long."""
        if waiter.preempted_by is not None:
            return KeepReason.PROTECTED
        return KeepReason.MAX_SUSPENDED_TIME if work_s > self._suspendable_s else reason

    def _critical_at_s(self, spare_s: float) -> float:
        """Until when a stop still helps the waiter with the least to spare; the margin is time to react."""
        critical_at_s = self._now_s + spare_s - self._margin * self._stop_s
        return critical_at_s if critical_at_s > self._now_s else math.inf


def _rival(step: RunningStep, now_s: float, policy: PreemptionPolicy) -> Prefill:
    """The member that a waiter must beat; the runner is infeasible when it is."""
    if policy is PreemptionPolicy.RESCUE:
        return max(step.members, key=lambda member: member.deadline_s)

    def rank(member: Prefill) -> SlackRank:
        return sedf_rank(member.deadline_s, now_s, member.remaining_s, member.arrived_s)

    choose = min if policy is PreemptionPolicy.CONSERVATIVE else max
    return choose(step.members, key=rank)
