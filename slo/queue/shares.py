"""Who has had how much of a replica's prefill time, and whose turn it is by right.

Owns the account of what was served and the pace of leads. What a lead means in the queue is
`slo.queue.fairness`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from slo.queue.decay import ExponentialDecay
from slo.tiers import Tier

MEMORY_S: Final = 60.0
"""What was served this long ago counts 1/e of what is served now."""


class FairnessState(msgspec.Struct, frozen=True, array_like=True):
    """What a `ShareAccount` says between two forward passes; any process can order a queue by it.

    Attributes:
        deficits: What each class has had less than its share, as a fraction of 1.
        next_boost_s: When each class that has led may lead again.
    """

    deficits: dict[Tier, float] = {}
    next_boost_s: dict[Tier, float] = {}

    def deficit(self, tier: Tier) -> float:
        """What a class has had less than its share, as a fraction of 1; 0 when it has had as much."""
        return self.deficits.get(tier, 0.0)

    def is_paced(self, tier: Tier, now_s: float) -> bool:
        """Whether a class has led for no more than its share of the time, and may lead again."""
        return now_s >= self.next_boost_s.get(tier, -math.inf)


class ShareAccount:
    """Served prefill seconds by tier, slowly forgotten.

    A class leads the queue for at most its share of the time: after a lead that counts for `w` seconds the
    next starts no sooner than `w / share` seconds after the beginning of the last. In any span of `t` seconds
    a class so leads for at most `share * t` seconds and one prefill.

    Args:
        shares: Fraction of the time that each class is entitled to; one without an entry to nothing.
        memory_s: Time constant of forgetting.
    """

    def __init__(self, shares: Mapping[Tier, float], memory_s: float = MEMORY_S) -> None:
        self._shares = shares
        self._decay = ExponentialDecay(memory_s)
        self._grown: dict[Tier, float] = {}
        self._next_boost_s: dict[Tier, float] = {}

    def served(self, tier: Tier, seconds: float, now_s: float, *, lead_s: float = 0.0) -> None:
        """A forward pass has spent time on a class.

        `lead_s` says for how many seconds it counts as a lead, 0 when the class did not have the pass by
        right. Times never go back.
        """
        if (factor := self._decay.rescale(now_s)) < 1:
            self._grown = {name: grown * factor for name, grown in self._grown.items()}
        self._grown[tier] = self._grown.get(tier, 0.0) + seconds * self._decay.grown(now_s)
        if lead_s > 0 and (share := self._shares.get(tier, 0.0)) > 0:
            due_s = self._next_boost_s.get(tier, -math.inf)
            self._next_boost_s[tier] = max(due_s, now_s - seconds) + lead_s / share

    def lost(self, tier: Tier, seconds: float, served_s: float) -> None:
        """What was served then has come to nothing; that the class has led for it still counts."""
        left = self._grown.get(tier, 0.0) - seconds * self._decay.grown(served_s)
        self._grown[tier] = max(0.0, left)

    def achieved(self, tier: Tier) -> float:
        """Fraction of what was served lately that a class has had."""
        total = sum(self._grown.values())
        return self._grown.get(tier, 0.0) / total if total > 0 else 0.0

    def state(self) -> FairnessState:
        """Who has had too little, and who may lead again when."""
        deficits = {tier: max(0.0, share - self.achieved(tier)) for tier, share in self._shares.items()}
        return FairnessState(deficits, dict(self._next_boost_s))
