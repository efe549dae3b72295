"""How much of a replica's time requests that have not arrived yet will want.

Owns the running account of what arrives, by what it is worth per second of work. Reads no clock.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Final

MEMORY_S: Final = 30.0
"""What arrived this long ago counts 1/e of what arrives now."""
SHARE: Final = 0.7
"""Of the expected work, what is kept free for: those with far deadlines can give way to some of it later."""
NEAR: Final = 4.0
"""Nothing is kept free of the next so many mean works: what is due that soon is as likely as not to be done
before anybody comes. With `SHARE`, the best of 0.5 to 0.9 and 0 to 8 in simulated overload."""
_FROM_LOAD: Final = 0.9
_TO_LOAD: Final = 1.2
"""Nothing is kept free below the one load, `SHARE` above the other; between them proportionally."""
_MOST: Final = 0.95
_PER_OCTAVE: Final = 4
_LOWEST: Final = -10 * _PER_OCTAVE
_CLASSES: Final = 32 * _PER_OCTAVE


class Forecast:
    """Expects the near future to be like the recent past.

    Work is filed by its worth per second, in classes a quarter of an octave wide, and slowly forgotten.

    Args:
        memory_s: Time constant of forgetting.
    """

    def __init__(self, memory_s: float = MEMORY_S) -> None:
        self._memory_s = memory_s
        self._work_s = [0.0] * _CLASSES
        self._count = 0.0
        self._until_s: float | None = None
        self._denser: list[float] | None = None

    def arrived(self, work_s: float, weight: float, now_s: float) -> None:
        """A request has arrived.

        Args:
            work_s: Its predicted work.
            weight: Its worth on time.
            now_s: The time; never earlier than in the call before.
        """
        if work_s <= 0 or weight <= 0:
            return
        if self._until_s is not None:
            kept = math.exp((self._until_s - now_s) / self._memory_s)
            self._work_s = [work * kept for work in self._work_s]
            self._count *= kept
        self._until_s = now_s
        self._work_s[_class_of(weight / work_s)] += work_s
        self._count += 1.0
        self._denser = None

    @property
    def load(self) -> float:
        """Work that arrives per second; above 1 a replica cannot do it all."""
        return self._by_class()[0]

    @property
    def near_s(self) -> float:
        """The time ahead of which nothing is kept free."""
        return NEAR * sum(self._work_s) / self._count if self._count else 0.0

    def reserved(self, worth_per_s: float) -> float:
        """The fraction of the time from `near_s` on to keep free for what is worth more per second of work.

        0 as long as the replica can do everything, so that nobody is turned away for fear of the future.

        Args:
            worth_per_s: Weight of a request divided by its remaining work.
        """
        denser = self._by_class()
        pressure = min(1.0, (denser[0] - _FROM_LOAD) / (_TO_LOAD - _FROM_LOAD))
        if pressure <= 0:
            return 0.0
        return min(_MOST, SHARE * pressure * denser[_class_of(worth_per_s) + 1])

    def _by_class(self) -> list[float]:
        """Work per second by class, those of denser classes included; one more than there are classes."""
        if self._denser is None:
            sums = accumulate(reversed(self._work_s), initial=0.0)
            self._denser = [work / self._memory_s for work in sums][::-1]
        return self._denser


def _class_of(worth_per_s: float) -> int:
    if worth_per_s <= 0:
        return 0
    if worth_per_s == math.inf:
        return _CLASSES - 1
    return min(max(math.floor(math.log2(worth_per_s) * _PER_OCTAVE) - _LOWEST, 0), _CLASSES - 1)
