"""Who goes in next of those that wait before a full replica, where its own queue does not see them.

Owns the order: by the effective tier (`slo.queue.ageing`), within a tier by arrival, and every eighth by
arrival alone, so that nobody waits without end. Deadlines count inside.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

from slo.queue.ageing import Ageing
from slo.tiers import Tier, TierSet

_AGEING: Final = Ageing()
_BY_ARRIVAL_EVERY: Final = 8
"""One place of so many goes to who has waited longest, whatever its tier."""
_Item = TypeVar("_Item")


class Entrance(Generic[_Item]):
    """Those that wait."""

    def __init__(self, tiers: TierSet) -> None:
        self._tiers = tiers
        self._waiting: dict[Tier, deque[tuple[_Item, float]]] = {tier: deque() for tier in tiers}
        self._taken = 0

    def add(self, tier: Tier, item: _Item, now_s: float) -> None:
        """One more waits; of a tier that is not known, as one of the lowest."""
        self._waiting[self._known(tier)].append((item, now_s))

    def remove(self, tier: Tier, item: _Item) -> None:
        """One waits no more; what is not there is ignored."""
        queue = self._waiting[self._known(tier)]
        for place, (waiting, _) in enumerate(queue):
            if waiting is item:
                del queue[place]
                return

    def pop(self, now_s: float) -> _Item | None:
        """Who goes in; None when nobody waits."""
        waiting = [tier for tier, queue in self._waiting.items() if queue]
        if not waiting:
            return None
        self._taken += 1
        # Of a tier the first has waited longest; of equals the more valuable tier goes first.
        if self._taken % _BY_ARRIVAL_EVERY == 0:
            best = min(waiting, key=self._came_s)
        else:
            best = max(waiting, key=lambda tier: self._level(tier, now_s))
        return self._waiting[best].popleft()[0]

    def _level(self, tier: Tier, now_s: float) -> float:
        return _AGEING.effective_tier(self._tiers, tier, now_s - self._came_s(tier))

    def _came_s(self, tier: Tier) -> float:
        return self._waiting[tier][0][1]

    def _known(self, tier: Tier) -> Tier:
        return tier if tier in self._waiting else self._tiers.lowest
