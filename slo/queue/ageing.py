"""How waiting, and being served too little, raise what a request counts for.

Owns the effective tier and its worth. Who has been served how much is `slo.queue.shares`; where the worth
counts in the order of the queue is `slo.queue.order`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from slo.tiers import BACKGROUND, PREMIUM, STANDARD, Tier, rank_of

if TYPE_CHECKING:
    from collections.abc import Mapping

BELOW_PREMIUM: Final = rank_of(PREMIUM) - 0.5
"""The highest effective tier of a request that is not premium: above all of standard as it arrives."""


@dataclass(frozen=True, slots=True)
class Ageing:
    """How fast the effective tier rises.

    An effective tier is a rank (`slo.tiers.Tier.rank`: background 0, standard 1, premium 2) plus a rise. A
    background request passes standard ones that come later, and nothing but premium is ever above premium.

    Attributes:
        per_s: Rise per second of waiting.
        most: The rise ends here, whatever it comes from.
        deficit_gain: Rise of a class that has had nothing of its share, per unit of that share.
    """

    per_s: float = 0.05
    most: float = 1.5
    deficit_gain: float = 2.0

    def effective_tier(self, tier: Tier, waited_s: float, deficit: float = 0.0) -> float:
        """The effective tier of a request.

        Args:
            tier: Its own.
            waited_s: How long it has waited.
            deficit: What its class has had less than its share, as a fraction of all time served.
        """
        rise = self.per_s * max(0.0, waited_s) + self.deficit_gain * deficit
        level = rank_of(tier) + min(self.most, rise)
        return level if tier == PREMIUM else min(level, BELOW_PREMIUM)


def weight_of(effective_tier: float, weights: Mapping[Tier, float]) -> float:
    """The weight of an effective tier, interpolated geometrically between those of the tiers about it.

    Args:
        effective_tier: At least 0.
        weights: Worth of a request on time by tier, each above 0.
    """
    steps = (weights[BACKGROUND], weights[STANDARD], weights[PREMIUM])
    below = int(effective_tier)
    if below >= len(steps) - 1:
        return steps[-1]
    part = effective_tier - below
    return float(steps[below] ** (1 - part) * steps[below + 1] ** part)
