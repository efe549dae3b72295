"""What a queue that goes by deadlines owes to those that it would leave behind.

Owns who leads the queue by right, and by whom a lead may be stopped; keeps the replica's account of what was
served (`slo.shares`). Among what is late or has no deadline, the order follows the effective tier
(`slo.ageing`).

Nobody starves. Three steps lead out of the queue, each for the oldest waiting request of its class, the head:

- After `patience_s`, if its class has had less than its share, it leads the queue, but for prefills of a
  higher worth that are on time; only those stop it.
- After twice that, if its class has had less than its share, it leads before all and nothing stops it.
- After four times that, whatever its class has had, it goes before all that are worth no more than it: before
  younger requests of its class that are still on time, above all.

A class leads for at most its share of the time (`slo.shares`). So the head of a class with the share `s`
starts within `2 * patience_s + r` seconds of its arrival while its class is below its share, and otherwise
takes the next turn of its class after `4 * patience_s`; or, if that is later, within `w / s + r` of the start
of the head before it. `w` is that one's work, `r` what remains of the running step and one lead of each other
class. In return, the classes above lose at most `s` of any long span of time, and nothing while nobody has
waited for that long.
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
_AT_ONCE: Final = 2
_BEFORE_ITS_LIKE: Final = 4


@dataclass(frozen=True, slots=True)
class FairnessRules:
    """How long anybody is left behind.

    Attributes:
        patience_s: How long the head of a class below its share waits before it leads; the unit of the three
            steps above. Infinite: never.
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

    def leads(self, prefills: Sequence[Prefill], now_s: float) -> list[tuple[Prefill, float]]:
        """The heads of classes that have the right to lead, with their guards (`Lead.guard`)."""
        since_s = now_s - self._rules.patience_s
        old = [prefill for prefill in prefills if prefill.arrived_s < since_s]
        if not old:
            return []
        heads: dict[Tier, Prefill] = {}
        for prefill in old:
            head = heads.get(prefill.tier)
            if head is None or prefill.arrived_s < head.arrived_s:
                heads[prefill.tier] = prefill
        guarded = ((head, self._guard(head, now_s)) for head in heads.values())
        return [(head, guard) for head, guard in guarded if guard is not None]

    def lead_of(self, prefill: Prefill, now_s: float) -> Lead | None:
        """By what right a prefill has the replica if it runs now; None when by its deadline alone."""
        guard = self._guard(prefill, now_s)
        return None if guard is None else Lead(prefill.tier, guard)

    def led(
        self, ordered: Sequence[Prefill], leads: Sequence[tuple[Prefill, float]], start_s: float
    ) -> list[Prefill]:
        """The queue with leads where they belong.

        Args:
            ordered: The queue without regard to them.
            leads: Some of it and their guards, see `leads`.
            start_s: When the first of the queue can start.
        """
        leading = {lead.job_id for lead, _ in leads}
        queue = [prefill for prefill in ordered if prefill.job_id not in leading]
        start_s += sum(lead.remaining_s for lead, guard in leads if guard == math.inf)
        # The one with the highest guard, and of several the oldest, is put in last and so goes first.
        for lead, guard in sorted(leads, key=lambda one: (one[1], -one[0].arrived_s)):
            queue = _behind_the_worthier(lead, guard, queue, start_s)
        return queue

    def by_effective_tier(self, prefills: Sequence[Prefill], now_s: float) -> list[Prefill]:
        """Those that are late or have no deadline: the stopped ones, then by effective tier, then by age."""
        ageing = self._rules.ageing
        deficits = {tier: self.account.deficit(tier) for tier in {prefill.tier for prefill in prefills}}

        def key(prefill: Prefill) -> tuple[bool, float, float]:
            tier = prefill.tier
            level = ageing.effective_tier(tier, now_s - prefill.arrived_s, deficits[tier])
            return prefill.preemptions == 0, -level, prefill.arrived_s

        return sorted(prefills, key=key)

    def _guard(self, prefill: Prefill, now_s: float) -> float | None:
        """The guard of a prefill if it leads; None when it does not."""
        patience_s = self._rules.patience_s
        waited_s = now_s - prefill.arrived_s
        if waited_s <= patience_s or not self.account.is_paced(prefill.tier, now_s):
            return None
        if self.account.deficit(prefill.tier) > 0:
            if waited_s > _AT_ONCE * patience_s:
                return math.inf
            return worth_of(self._rules.ageing.effective_tier(prefill.tier, waited_s), self._weights)
        return self._weights[prefill.tier] if waited_s > _BEFORE_ITS_LIKE * patience_s else None


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
