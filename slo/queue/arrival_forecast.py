"""How much of a replica's time requests that have not arrived yet will want.

Owns the running account of what arrives, by its value per second of work. Reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from slo.queue.decay import ExponentialDecay

MEMORY_S: Final = 30.0
"""What arrived this long ago counts 1/e of what arrives now."""
SHARE: Final = 0.7
"""The fraction of the expected work that time is kept free for; some can pass those with far deadlines."""
NEAR: Final = 4.0
"""No time is kept free within this many mean works from now: what is due that soon is as likely as not to be
done before anybody comes. With `SHARE`, the best of 0.5 to 0.9 and 0 to 8 in simulated overload."""
_FROM_LOAD: Final = 0.9
_TO_LOAD: Final = 1.2
"""Nothing is kept free below the one load, `SHARE` above the other; between them proportionally."""
_MAX_RESERVED: Final = 0.95
_PER_OCTAVE: Final = 4
_LOWEST: Final = -10 * _PER_OCTAVE
_CLASSES: Final = 32 * _PER_OCTAVE


@dataclass(frozen=True, slots=True)
class Expected:
    """What a `Forecast` expects at a moment.

    Attributes:
        load: Work that arrives per second; above 1 a replica cannot do it all.
        near_s: The time ahead of which nothing is kept free.
        densest: At index n, the filed work of the n densest classes together; may be empty without pressure.
        per_filed: The load that is one second of filed work.
    """

    load: float
    near_s: float
    densest: Sequence[float]
    per_filed: float

    @property
    def pressure(self) -> float:
        """0 as long as the replica can do everything, 1 when it is overloaded beyond doubt."""
        return min(1.0, max(0.0, (self.load - _FROM_LOAD) / (_TO_LOAD - _FROM_LOAD)))

    def reserved_for(self, values_per_s: Sequence[float]) -> list[float]:
        """By value per second of work, the fraction of the time behind `near_s` kept free for what has more.

        0 without `pressure`: a replica that can do everything keeps nothing free.
        """
        if (pressure := self.pressure) == 0:
            return [0.0] * len(values_per_s)
        share, per_filed, densest = SHARE * pressure, self.per_filed, self.densest
        denser = [densest[_CLASSES - 1 - _class_of(value)] for value in values_per_s]
        return [min(_MAX_RESERVED, share * (work * per_filed)) for work in denser]


class Forecast:
    """Expects the near future to be like the recent past.

    Work is filed by its value per second, in classes a quarter of an octave wide, and decays exponentially.

    Args:
        memory_s: Time constant of the decay.
    """

    def __init__(self, memory_s: float = MEMORY_S) -> None:
        self._memory_s = memory_s
        self._decay = ExponentialDecay(memory_s)
        self._work_s = [0.0] * _CLASSES
        self._all_work_s = 0.0
        self._count = 0.0
        self._arrived_s = -math.inf
        """When a request arrived last."""
        self._densest: list[float] | None = None
        """See `Expected`."""

    def arrived(self, work_s: float, weight: float, now_s: float) -> None:
        """A request has arrived.

        Times never go back.
        """
        if work_s <= 0 or weight <= 0:
            return
        if (factor := self._decay.rescale(now_s)) < 1:
            self._work_s = [work * factor for work in self._work_s]
            self._all_work_s *= factor
            self._count *= factor
        grown = self._decay.grown(now_s)
        self._arrived_s = now_s
        self._work_s[_class_of(weight / work_s)] += work_s * grown
        self._all_work_s += work_s * grown
        self._count += grown
        self._densest = None

    def at(self, now_s: float) -> Expected:
        """What is expected now, at the last arrival or later: it is less the longer nobody has come."""
        per_filed = self._decay.kept(max(now_s, self._arrived_s)) / self._memory_s
        near_s = NEAR * self._all_work_s / self._count if self._count else 0.0
        load = self._all_work_s * per_filed
        if self._densest is None and load > _FROM_LOAD:
            self._densest = [*accumulate(reversed(self._work_s), initial=0.0)]
        return Expected(load, near_s, self._densest or (), per_filed)


def _class_of(value_per_s: float) -> int:
    if value_per_s <= 0:
        return 0
    if value_per_s == math.inf:
        return _CLASSES - 1
    number = math.floor(math.log2(value_per_s) * _PER_OCTAVE) - _LOWEST
    if number < 0:
        return 0
    return number if number < _CLASSES else _CLASSES - 1
