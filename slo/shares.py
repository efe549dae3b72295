"""Who has had how much of a replica's prefill time, and whose turn it is by right.

Owns the account of what was served and the pace of leads. What a lead means in the queue is `slo.fairness`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slo.tiers import Tier

MEMORY_S: Final = 60.0
"""What was served this long ago counts 1/e of what is served now."""
_RESCALE_AT: Final = 50.0


@dataclass(slots=True)
class ShareAccount:
    """Served prefill seconds by tier, slowly forgotten.

    A class leads the queue for at most its share of the time: after a lead of `w` seconds the next starts no
    sooner than `w / share` seconds after the beginning of the last. In any span of `t` seconds a class so
    leads for at most `share * t` seconds and one prefill.

    Attributes:
        shares: Fraction of the time that each class is entitled to; one without an entry to nothing.
        memory_s: Time constant of forgetting.
    """

    shares: Mapping[Tier, float]
    memory_s: float = MEMORY_S
    _grown: dict[Tier, float] = field(default_factory=dict)
    _next_lead_s: dict[Tier, float] = field(default_factory=dict)
    _since_s: float | None = None

    def served(self, tier: Tier, seconds: float, now_s: float, *, led: bool = False) -> None:
        """A forward pass has spent time on a class.

        Args:
            tier: The class.
            seconds: Device time, whether or not it ended the prefill.
            now_s: When the pass ended; never earlier than in the call before.
            led: Whether the class had the pass by its right to lead.
        """
        if self._since_s is None:
            self._since_s = now_s
        age = (now_s - self._since_s) / self.memory_s
        if age > _RESCALE_AT:
            self._grown = {name: grown * math.exp(-age) for name, grown in self._grown.items()}
            self._since_s, age = now_s, 0.0
        # Instead of everything old shrinking at each call, what is new grows.
        self._grown[tier] = self._grown.get(tier, 0.0) + seconds * math.exp(age)
        if led and (share := self.shares.get(tier, 0.0)) > 0:
            due_s = self._next_lead_s.get(tier, -math.inf)
            self._next_lead_s[tier] = max(due_s, now_s - seconds) + seconds / share

    def achieved(self, tier: Tier) -> float:
        """Fraction of what was served lately that a class has had."""
        total = sum(self._grown.values())
        return self._grown.get(tier, 0.0) / total if total > 0 else 0.0

    def deficit(self, tier: Tier) -> float:
        """What a class has had less than its share, as a fraction of 1; 0 when it has had as much."""
        return max(0.0, self.shares.get(tier, 0.0) - self.achieved(tier))

    def is_paced(self, tier: Tier, now_s: float) -> bool:
        """Whether a class has led for no more than its share of the time, and may lead again."""
        return now_s >= self._next_lead_s.get(tier, -math.inf)
