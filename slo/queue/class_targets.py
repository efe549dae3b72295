"""What the requests of each class count for, so that all classes fare alike, measured by their own targets.

Owns the account by class and the two factors that come of it: the price of a request, by which its weight
counts, and how much of `slo.preemption.types.PreemptionRules.margin` is kept for it. Who is on time is
`slo.queue.feasible_set`'s to choose; the cluster's indicator is `slo.monitor.attainment`.

With all requests alike, the class with the most work is given up first, as its requests have the least value
per second. The price is therefore the usual work of the class, so that of each class those are given up that
are long for it, times its burn, what it has missed over what its target allows. How strict a target is
decides two things. Where a tenth may be late, a step is trusted to take what is predicted, so that those who
wait for its end share a pass, and it matters whom to give up; where a hundredth may, a stop has to be sure,
and nobody is to be given up, so that the price is the burn alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from slo.queue.decay import ExponentialDecay
from slo.queue.prefill import Prefill
from slo.tiers import Tier

MEMORY_S: Final = 300.0
"""What arrived or ended this long ago counts 1/e of what does now."""
LEAST_BURN: Final = 0.2
MOST_BURN: Final = 5.0
"""Burns are held between these two, so that no class is worth nothing, and none more than all others."""
TRUSTING: Final = 0.1
"""The fraction that may miss by a target that is not strict at all; with a tenth of it one is wholly."""


class ClassCounts(msgspec.Struct, frozen=True, array_like=True):
    """What became of a class, the older for less.

    Attributes:
        work_s: Predicted work of the `arrived`, in all.
        missed: Those of the `ended` that were late.
    """

    arrived: float = 0.0
    work_s: float = 0.0
    ended: float = 0.0
    missed: float = 0.0

    def times(self, factor: float) -> ClassCounts:
        """The same, grown or decayed."""
        return ClassCounts(
            self.arrived * factor, self.work_s * factor, self.ended * factor, self.missed * factor
        )


_NOTHING: Final = ClassCounts()


class TargetState(msgspec.Struct, frozen=True, array_like=True):
    """What a `ClassTargets` says at a moment; any process can price a queue by it.

    Attributes:
        allowed: By class, the fraction that may miss.
    """

    allowed: dict[Tier, float] = {}
    counts: dict[Tier, ClassCounts] = {}

    def at(self, prefills: Iterable[Prefill], start_s: float) -> ClassPrices:
        """The prices while these wait or run: those that cannot be on time from `start_s` count as missed."""
        late = dict.fromkeys(self.allowed, 0)
        for prefill in prefills:
            if start_s + prefill.remaining_s > prefill.deadline_s and prefill.tier in late:
                late[prefill.tier] += 1
        return ClassPrices(self.allowed, {tier: self._price(tier, late[tier]) for tier in self.allowed})

    def price(self, tier: Tier) -> float:
        """The price of a class's requests by what became of those before; 1 for one without a target."""
        return self._price(tier, 0) if tier in self.allowed else 1.0

    def _price(self, tier: Tier, late: int) -> float:
        """By its usual work and its burn; one miss more and one more allowed, for when nothing is known."""
        counts = self.counts.get(tier, _NOTHING)
        burn = (counts.missed + late + 1.0) / ((counts.ended + late) * self.allowed[tier] + 1.0)
        usual_s = counts.work_s / counts.arrived if counts.work_s > 0 else 1.0
        by_work = usual_s ** (1.0 - _strictness(self.allowed[tier]))
        return float(by_work * min(MOST_BURN, max(LEAST_BURN, burn)))


class ClassPrices:
    """What the requests of each class count for.

    Args:
        allowed: By class, the fraction that may miss.
        prices: By class; 1 for one that is not in it.
    """

    def __init__(self, allowed: Mapping[Tier, float], prices: Mapping[Tier, float]) -> None:
        self._allowed = allowed
        self._prices = prices

    def price(self, tier: Tier) -> float:
        """What the weight of its requests is multiplied by."""
        return self._prices.get(tier, 1.0)

    def insured(self, tier: Tier, margin: float) -> float:
        """Of a margin of at least 1, what is kept for its requests: all of it for one that has no target."""
        if (allowed := self._allowed.get(tier)) is None:
            return margin
        return float(margin ** _strictness(allowed))


def _strictness(allowed: float) -> float:
    """From 0, where `TRUSTING` may miss, to 1, where a tenth of it may."""
    return min(1.0, max(0.0, math.log10(TRUSTING / allowed)))


class ClassTargets:
    """The account of one replica. Reads no clock; times never go back.

    Args:
        targets: By class, the fraction of its requests that shall meet their deadlines.
        memory_s: Time constant of forgetting.
    """

    def __init__(self, targets: Mapping[Tier, float], memory_s: float = MEMORY_S) -> None:
        allowed = {tier: 1.0 - target for tier, target in targets.items()}
        self._decay = ExponentialDecay(memory_s)
        self._grown = dict.fromkeys(allowed, _NOTHING)
        self.state = TargetState(allowed)

    def arrived(self, tier: Tier, work_s: float, now_s: float) -> None:
        """A request with so much predicted work has arrived."""
        self._add(tier, ClassCounts(arrived=1.0, work_s=work_s), now_s)

    def ended(self, tier: Tier, deadline_s: float, now_s: float) -> None:
        """A request has been prefilled; one without a deadline is not counted."""
        if deadline_s < math.inf:
            self._add(tier, ClassCounts(ended=1.0, missed=1.0 if now_s > deadline_s else 0.0), now_s)

    def _add(self, tier: Tier, more: ClassCounts, now_s: float) -> None:
        if tier not in self._grown:
            return
        if (factor := self._decay.rescale(now_s)) < 1:
            self._grown = {name: counts.times(factor) for name, counts in self._grown.items()}
        grown, known = more.times(self._decay.grown(now_s)), self._grown[tier]
        self._grown[tier] = ClassCounts(
            known.arrived + grown.arrived,
            known.work_s + grown.work_s,
            known.ended + grown.ended,
            known.missed + grown.missed,
        )
        kept = self._decay.kept(now_s)
        counts = {name: counts.times(kept) for name, counts in self._grown.items()}
        self.state = TargetState(self.state.allowed, counts)
