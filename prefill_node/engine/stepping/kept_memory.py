"""For how long free KV memory is kept for a prefill that starves and does not fit into it. Pure."""

from __future__ import annotations

import math
from typing import Final

QUIET_S: Final = 5.0
"""What has ended gets free when decode has pulled it. Where nothing has for so long, decode is full."""
MOST_S: Final = 30.0
"""Memory is kept for no longer than this at a time, however slowly it gets free."""


class KeptMemory:
    """Kept while more of it gets free, and then left to the others.

    Of the whole time it is kept for no more than the share of the tier that starves.
    """

    def __init__(self) -> None:
        self._blocks = 0
        self._since_s = 0.0
        self._until_s = self._others_until_s = -math.inf

    def is_kept(self, now_s: float) -> bool:
        """Whether nobody else may start in it."""
        return not self._until_s <= now_s < self._others_until_s

    def starves(self, share: float, free_blocks: int, now_s: float) -> None:
        """One of a tier with this share does not fit; so many blocks are free."""
        if now_s >= self._others_until_s:
            self._since_s = now_s
        elif now_s >= self._until_s or free_blocks <= self._blocks:
            return
        self._blocks = free_blocks
        self._until_s = min(now_s + QUIET_S, self._since_s + MOST_S)
        self._others_until_s = self._until_s + (self._until_s - self._since_s) / share

    def started(self) -> None:
        """Whoever starved has started."""
        self._until_s = self._others_until_s = -math.inf
