"""What a queue that goes by deadlines owes to those that it would leave behind.

Owns who leads the queue by right, and by whom a lead may be stopped; keeps the replica's account of what was
served (`slo.shares`). Among what is late or has no deadline, the order follows the effective tier
(`slo.ageing`).

No class starves. A request that leads its class, has waited for `patience_s` and belongs to a class that has
had less than its share leads the queue, but for prefills of a higher worth that are on time; only those stop
it. After twice `patience_s` it leads before all and nothing stops it. So the oldest waiting request of a
class with the share `s` starts within `2 * patience_s + r` seconds of its arrival, or, if that is later,
within `w / s + r` of the start of the request of its class before it: `w` is that one's work, `r` what
remains of the running step and one lead of each other class. In return, the classes above lose at most `s`
of any long span of time, and nothing while nobody has waited for that long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from slo.ageing import Ageing, worth_of
from slo.shares import MEMORY_S, ShareAccount

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from slo.preemption_terms import Prefill
    from slo.tiers import Tier, TierPolicy

PATIENCE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class FairnessRules:
    """How long anybody is left behind.

    Attributes:
        patience_s: How long the head of a class below its share waits before it leads; twice as long, and it
            is stopped by nobody. Infinite: never.
        memory_s: Time constant of the account of what was served.
    """

    ageing: Ageing = field(default_factory=Ageing)
    patience_s: float = PATIENCE_S
    memory_s: float = MEMORY_S


class Lead(NamedTuple):
    """That a prefill has the replica by right.

    Attributes:
        tier: The class whose right it is.
        guard: The worth above which a prefill on time goes before it and may stop it; infinite for none.
    """

    tier: Tier
    guard: float


class Fairness:
    """One replica's account, and what follows from it.

    Args:
        policies: Share and weight of each tier.
        rules: See `FairnessRules`.
    """

    def __init__(self, policies: Mapping[Tier, TierPolicy], rules: FairnessRules | None = None) -> None:
        self._weights = {tier: policy.weight for tier, policy in policies.items()}
        self._rules = rules or FairnessRules()
        shares = {tier: policy.share for tier, policy in policies.items()}
        self.account = ShareAccount(shares, self._rules.memory_s)

    def step_ended(
        self, tokens: Mapping[Tier, int], seconds: float, now_s: float, *, led_by: Tier | None = None
    ) -> None:
        """A forward pass has ended or stopped; its time is split among its members by their tokens.

        Args:
            tokens: Prompt tokens of the pass by tier.
            seconds: How long it ran this time.
            now_s: The time.
            led_by: The class that had it by right, if one did.
        """
        total = sum(tokens.values())
        for tier, count in tokens.items():
            self.account.served(tier, seconds * count / total, now_s, led=tier is led_by)

    def leads(self, prefills: Sequence[Prefill], now_s: float) -> list[Prefill]:
        """The heads of classes that have the right to lead, the one that has waited longest first."""
        since_s = now_s - self._rules.patience_s
        old = [prefill for prefill in prefills if prefill.arrived_s < since_s]
        if not old:
            return []
        heads: dict[Tier, Prefill] = {}
        for prefill in old:
            head = heads.get(prefill.tier)
            if head is None or prefill.arrived_s < head.arrived_s:
                heads[prefill.tier] = prefill
        entitled = [head for tier, head in heads.items() if self.account.may_lead(tier, now_s)]
        return sorted(entitled, key=lambda head: head.arrived_s)

    def lead_of(self, prefill: Prefill, now_s: float) -> Lead | None:
        """By what right a prefill has the replica if it runs now; None when by its deadline alone."""
        if now_s - prefill.arrived_s <= self._rules.patience_s or not self.account.may_lead(
            prefill.tier, now_s
        ):
            return None
        return Lead(prefill.tier, self._guard(prefill, now_s))

    def led(
        self, ordered: Sequence[Prefill], leads: Sequence[Prefill], start_s: float, now_s: float
    ) -> list[Prefill]:
        """The queue with leads where they belong.

        Args:
            ordered: The queue without regard to them.
            leads: Some of it, see `leads`; at least one.
            start_s: When the first of the queue can start.
            now_s: The time.
        """
        guards = {lead.job_id: self._guard(lead, now_s) for lead in leads}
        at_once = [lead for lead in leads if guards[lead.job_id] == math.inf]
        queue = [prefill for prefill in ordered if prefill.job_id not in guards]
        start_s += sum(lead.remaining_s for lead in at_once)
        for lead in sorted(leads, key=lambda lead: (guards[lead.job_id], -lead.arrived_s)):
            if (guard := guards[lead.job_id]) < math.inf:
                queue = _behind_the_worthier(lead, guard, queue, start_s)
        return at_once + queue

    def by_effective_tier(self, prefills: Sequence[Prefill], now_s: float) -> list[Prefill]:
        """Those that are late or have no deadline: the stopped ones, then by effective tier, then by age."""
        ageing = self._rules.ageing
        deficits = {tier: self.account.deficit(tier) for tier in {prefill.tier for prefill in prefills}}

        def key(prefill: Prefill) -> tuple[bool, float, float]:
            tier = prefill.tier
            level = ageing.effective_tier(tier, now_s - prefill.arrived_s, deficits[tier])
            return prefill.preemptions == 0, -level, prefill.arrived_s

        return sorted(prefills, key=key)

    def _guard(self, lead: Prefill, now_s: float) -> float:
        waited_s = now_s - lead.arrived_s
        if waited_s > 2 * self._rules.patience_s:
            return math.inf
        return worth_of(self._rules.ageing.effective_tier(lead.tier, waited_s), self._weights)


def _behind_the_worthier(
    lead: Prefill, guard: float, queue: Sequence[Prefill], start_s: float
) -> list[Prefill]:
    """The queue with a lead before all but those on time that are worth more than `guard`."""
    before: list[Prefill] = []
    after: list[Prefill] = [lead]
    for prefill in queue:
        on_time = start_s + prefill.remaining_s <= prefill.deadline_s < math.inf
        (before if on_time and prefill.weight > guard else after).append(prefill)
    return before + after
