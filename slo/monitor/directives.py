"""Which running prefills the monitor orders to stop for a waiter that their own governor let wait.

Owns the rule. A replica's governor decides first and at once, with better knowledge of its queue; the monitor
adds what no replica knows: which tiers of the whole cluster are missing their targets.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from slo.preemption.types import KeepReason
from slo.request import JobId, ReplicaId
from slo.tiers import Tier, TierSet


class DirectiveReason(enum.StrEnum):
    """Why a step is ordered to stop; the values label metrics."""

    OUT_OF_TIME = "out_of_time"
    """The governor let the step go on because the waiter was on time, and it no longer is."""
    TIER_AT_RISK = "tier_at_risk"
    """Stopping would harm as much as it helps on this replica, but the waiter's tier misses its target."""


@dataclass(frozen=True, slots=True)
class WaiterSeen:
    """A prefill that waits on a replica.

    Attributes:
        slack_s: Budget minus predicted work, when it was reported; infinite without a deadline.
    """

    job_id: JobId
    tier: Tier
    slack_s: float


@dataclass(frozen=True, slots=True)
class StepSeen:
    """The step that runs on a replica.

    Attributes:
        step_id: As the governor would name it in an order to stop.
        tiers: Those of its members.
        remaining_s: Predicted seconds to its end.
        preemptible_in_s: How soon it would stop, in the mean; None when it cannot be stopped or is at one of
            its limits.
        kept: Why the governor let it go on, when it was last asked; None when it has not been.
    """

    step_id: int
    tiers: tuple[Tier, ...]
    remaining_s: float
    preemptible_in_s: float | None
    kept: KeepReason | None

    @property
    def may_be_stopped(self) -> bool:
        """Whether its governor let it go on for a reason that `direct` may overrule."""
        return self.preemptible_in_s is not None and self.kept in _OVERRULED

    def makes_late(self, tier: Tier, slack_s: float) -> bool:
        """Whether a waiter of another tier is late behind it and on time if it stops now."""
        if self.preemptible_in_s is None or tier in self.tiers:
            return False
        return self.preemptible_in_s <= slack_s < self.remaining_s


@dataclass(frozen=True, slots=True)
class ReplicaSeen:
    """What a prefill replica runs, and who waits there.

    Attributes:
        waiting: Those for whom the step may be stopped, by `first_of_each`; more than these change nothing.
    """

    replica_id: ReplicaId
    step: StepSeen | None
    waiting: tuple[WaiterSeen, ...]


@dataclass(frozen=True, slots=True)
class PreemptDirective:
    """Stop this step on this replica for this waiter.

    One that comes late does nothing: step ids only grow, and the replica's governor checks that the waiter
    still waits and that no limit of preemption is reached.
    """

    replica_id: ReplicaId
    step_id: int
    beneficiary: JobId
    reason: DirectiveReason


_HARM_WEIGHED: Final = frozenset({KeepReason.WOULD_HARM, KeepReason.MARGIN})
_OVERRULED: Final = _HARM_WEIGHED | {KeepReason.WAITERS_IN_TIME}


def first_of_each(waiting: Iterable[WaiterSeen]) -> tuple[WaiterSeen, ...]:
    """Of each tier the one with the least slack: whoever `direct` chooses among all is among them."""
    first: dict[Tier, WaiterSeen] = {}
    for waiter in waiting:
        known = first.get(waiter.tier)
        if known is None or waiter.slack_s < known.slack_s:
            first[waiter.tier] = waiter
    return tuple(first.values())


def direct(replica: ReplicaSeen, at_risk: AbstractSet[Tier], tiers: TierSet) -> PreemptDirective | None:
    """The directive for a replica; None when its governor is right.

    A step is stopped only for a waiter of a higher tier than all of its members that would be late behind the
    step and is on time if the step stops now. Limits of preemption, and deadlines that the governor has found
    infeasible, are never overruled.
    """
    step = replica.step
    if step is None or not step.may_be_stopped:
        return None
    highest = max((tiers.rank(tier) for tier in step.tiers), default=-1)
    endangered = [
        waiter
        for waiter in replica.waiting
        if tiers.rank(waiter.tier) > highest and step.makes_late(waiter.tier, waiter.slack_s)
    ]
    for waiter in sorted(endangered, key=lambda waiter: (-tiers.rank(waiter.tier), waiter.slack_s)):
        if (reason := _reason(step, waiter, at_risk)) is not None:
            return PreemptDirective(replica.replica_id, step.step_id, waiter.job_id, reason)
    return None


def _reason(step: StepSeen, waiter: WaiterSeen, at_risk: AbstractSet[Tier]) -> DirectiveReason | None:
    if step.kept is KeepReason.WAITERS_IN_TIME:
        return DirectiveReason.OUT_OF_TIME
    if step.kept in _HARM_WEIGHED and waiter.tier in at_risk and not at_risk & set(step.tiers):
        return DirectiveReason.TIER_AT_RISK
    return None
