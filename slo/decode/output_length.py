"""How many tokens an answer has still to come, learned from the answers that ended.

Owns the lengths of the latest answers by tier and tenant, and how much of what they say memory is kept for.
The prediction is the mean of what is left of those that got longer than this one is, as in Past-Future
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
KEPT_FOR: Final = 0.1
"""Part of what is predicted to come that memory is kept for (ADR 48): a stream that is started too early
costs less than memory that nobody uses, where whose memory is taken is chosen by cost."""


class OutputLengths:
    """Lengths of answers, and what they say about those that are under way.

    Attributes:
        factor: What predictions are multiplied by where memory is at stake.
    """

    def __init__(self) -> None:
        self.factor = KEPT_FOR
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
