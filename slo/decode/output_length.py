"""How many tokens an answer has still to come, learned from the answers that ended.

Owns the lengths of the latest answers by tier and tenant, and the factor that corrects what they say. The
prediction is the mean of what is left of those that got longer than this one is, as in Past-Future
(arXiv 2507.10150, section 4.1).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from typing import Final

from slo.tiers import Tier

REMEMBERED: Final = 1000
"""Answers of a tenant in a tier that count, the latest ones."""
FIRST_GUESS: Final = 256
"""Tokens that are to come while nothing longer is known; as many as there are, if that is more."""
_FEW: Final = 20
"""A tenant's own answers count once there are so many, until then those of all of its tier."""
_MAX_HISTORIES: Final = 1024
_RAISE: Final = 1.1
_MOST: Final = 1.5
_LEAST: Final = 0.5
_DECAY: Final = 0.99


class OutputLengths:
    """Lengths of answers, and what they say about those that are under way.

    Attributes:
        factor: What predictions are multiplied by: more after each preemption, which says that they were too
            low, and less with each answer that ends.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._tenants: OrderedDict[tuple[Tier, str], _Lengths] = OrderedDict()
        self._tiers: dict[Tier, _Lengths] = {}

    def ended(self, tier: Tier, tenant: str, tokens: int) -> None:
        """An answer of so many tokens has ended by itself."""
        key = (tier, tenant)
        self._tenants.setdefault(key, _Lengths()).add(tokens)
        self._tenants.move_to_end(key)
        if len(self._tenants) > _MAX_HISTORIES:
            self._tenants.popitem(last=False)
        self._tiers.setdefault(tier, _Lengths()).add(tokens)
        self.factor = max(_LEAST, self.factor * _DECAY)

    def preempted(self) -> None:
        """Memory was taken from a stream: there was more to come than was predicted."""
        self.factor = min(_MOST, self.factor * _RAISE)

    def remaining(self, tier: Tier, tenant: str, emitted: int, most: int) -> int:
        """Tokens of an answer that memory is to be there for.

        Args:
            tier: Its tier.
            tenant: Whose it is.
            emitted: How many it has.
            most: How many more it may have.
        """
        return max(0, min(most, round(self.factor * self._mean_left(tier, tenant, emitted))))

    def expected(self, tier: Tier, tenant: str, emitted: int, most: int) -> int:
        """Tokens that are to come of an answer, in the mean; see `remaining`."""
        return max(0, min(most, round(self._mean_left(tier, tenant, emitted))))

    def whole(self, tier: Tier, tenant: str, most: int) -> int:
        """Tokens that an answer is expected to have, at most `most`."""
        return self.expected(tier, tenant, 0, most)

    def _mean_left(self, tier: Tier, tenant: str, emitted: int) -> float:
        known = self._tenants.get((tier, tenant))
        if known is None or len(known) < _FEW:
            known = self._tiers.get(tier)
        left = None if known is None else known.mean_left(emitted)
        return float(max(FIRST_GUESS, emitted)) if left is None else left


class _Lengths:
    """The latest lengths, sorted, with the sums of the longest."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] | None = None

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, tokens: int) -> None:
        self._latest.append(tokens)
        insort(self._sorted, tokens)
        if len(self._latest) > REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]
        self._sums = None

    def mean_left(self, emitted: int) -> float | None:
        """The mean of L - `emitted` over all L above it; None when there are none."""
        first = bisect_right(self._sorted, emitted)
        longer = len(self._sorted) - first
        if not longer:
            return None
        if self._sums is None:
            sums, total = [0] * len(self._sorted), 0
            for index in range(len(self._sorted) - 1, -1, -1):
                total += self._sorted[index]
                sums[index] = total
            self._sums = sums
        return self._sums[first] / longer - emitted
