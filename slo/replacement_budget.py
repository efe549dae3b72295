"""How many requests may leave a replica on the mere suspicion that it is lost.

A replica that is full, or on a host that is, may look silent. If all that it has went elsewhere at once, the
next one would be full, and so on through the fleet.
"""

from __future__ import annotations

from collections import deque
from typing import Final

WINDOW_S: Final = 10.0
FRACTION: Final = 0.1
MIN_BUDGET: Final = 10
"""So many may leave in any case: a small fleet has few requests in ten seconds."""


class ReplacementBudget:
    """Counts waits for a prefill and those that were given up, over the last `WINDOW_S`."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque()
        self._given_up: deque[float] = deque()

    def waits(self, now_s: float) -> None:
        """Somebody begins to wait."""
        self._waits.append(now_s)
        _forget(self._waits, now_s)

    def take(self, now_s: float) -> bool:
        """Whether one more may be given up now; if so it is counted."""
        _forget(self._waits, now_s)
        _forget(self._given_up, now_s)
        if len(self._given_up) >= max(MIN_BUDGET, FRACTION * len(self._waits)):
            return False
        self._given_up.append(now_s)
        return True


def _forget(times: deque[float], now_s: float) -> None:
    while times and now_s - times[0] > WINDOW_S:
        times.popleft()
