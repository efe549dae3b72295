"""KV memory and places that are kept for the top tier.

Owns how much: more than the top tier has held at most of late, within bounds. Of the memory that the top tier
does not hold of it half is left unused; in the other half lower tiers start, and yield it.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

WINDOW_S: Final = 300.0
AMPLE: Final = 1.2
"""What is kept, per part of the pool that was held at most."""
LEAST: Final = 0.05
MOST: Final = 0.10
UNUSED: Final = 0.5
"""Part of the memory that is kept and not held in which no tier below starts."""
_GRAIN_S: Final = 1.0


class TopTierReserve:
    """Follows what the top tier holds; all figures are parts of the pool."""

    def __init__(self) -> None:
        self._peaks: deque[tuple[float, float]] = deque()
        """(since when, held), falling: each is the most since the one before it."""

    def observe(self, held: float, now_s: float) -> None:
        """The top tier holds so much now."""
        seen_s = now_s
        while self._peaks and (self._peaks[-1][1] <= held or now_s - self._peaks[-1][0] < _GRAIN_S):
            before_s, before = self._peaks.pop()
            if before > held:
                seen_s, held = before_s, before
        self._peaks.append((seen_s, held))
        while self._peaks[0][0] < now_s - WINDOW_S:
            self._peaks.popleft()

    def part(self, now_s: float) -> float:
        """How much is kept, whoever holds it now."""
        recent = (held for since_s, held in self._peaks if since_s >= now_s - WINDOW_S)
        return min(MOST, max(LEAST, AMPLE * max(recent, default=0.0)))

    def places(self, total: int, now_s: float) -> int:
        """Of so many places for streams, those of the reserve; none where one is more than `MOST` of them."""
        return min(math.ceil(self.part(now_s) * total), math.floor(MOST * total))

    def places_kept(self, total: int, tops: int, now_s: float) -> int:
        """Of so many places for streams, those that others may not take beside `tops` of the top tier."""
        return max(0, self.places(total, now_s) - tops)

    def kept(self, held: float, now_s: float) -> float:
        """What the top tier gets before all others while it holds `held`."""
        return max(0.0, self.part(now_s) - held)
