"""How waiting, and being served too little, raise what a request counts for.

Owns the effective tier and its weight. Who has been served how much is `slo.queue.shares`; where the weight
counts in the order of the queue is `slo.queue.order`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from slo.tiers import Tier, TierSet

_BELOW_TOP: Final = 0.5
"""How far an effective tier stays below the rank of the top tier, unless it is the top tier's own."""


@dataclass(frozen=True, slots=True)
class Ageing:
    """How fast the effective tier rises.

    An effective tier is the rank of a tier plus a rise. A request passes those of higher tiers that come
    later, but never those of the top tier.

    Attributes:
        per_s: Rise per second of waiting; 1 is the step from one tier to the next.
        most: The rise ends here, whatever it comes from.
        deficit_gain: Rise of a class that has had nothing of its share, per unit of that share.
    """

    per_s: float = 0.05
    most: float = 1.5
    deficit_gain: float = 2.0

    def effective_tier(self, tiers: TierSet, tier: Tier, waited_s: float, deficit: float = 0.0) -> float:
        """The effective tier of a request.

        `deficit` is what its class has had less than its share, as a fraction of all time served.
        """
        rise = self.per_s * max(0.0, waited_s) + self.deficit_gain * deficit
        level = tiers.rank(tier) + min(self.most, rise)
        return level if tier == tiers.top else min(level, tiers.top_rank - _BELOW_TOP)


def weight_at(effective_tier: float, tiers: TierSet) -> float:
    """The weight of an effective tier, interpolated geometrically between those of the tiers about it."""
    level = max(0.0, effective_tier)
    below = int(level)
    if below >= tiers.top_rank:
        return tiers[tiers.top].weight
    upwards = tiers.names[::-1]
    part = level - below
    return float(tiers[upwards[below]].weight ** (1 - part) * tiers[upwards[below + 1]].weight ** part)
