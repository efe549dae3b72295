"""When a machine has become slower or quicker than what was learned from it.

Owns when the latest of its times say so, and not that their kind was never predicted well. What follows is
its askers' own.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

OFF_BY: Final = 1.2
"""The factor that each of the latest times is off by at least, to one side, and those before were not."""
_ALIKE: Final = 1.25
"""What was measured before compares if it is within this factor of one of the latest."""


class SpeedChange:
    """Of one machine.

    Args:
        in_a_row: So many of the latest times have to agree.
        remembered: So many count, the latest among them.
    """

    def __init__(self, in_a_row: int, remembered: int) -> None:
        self._in_a_row = in_a_row
        self._times: deque[tuple[float, float]] = deque(maxlen=remembered)

    def observe(self, size: float, off: float) -> float | None:
        """Something was measured.

        Args:
            size: How long it was, in a unit that does not change with what is learned of the machine.
            off: How many times as long as was predicted it took.

        Returns:
            How many times as long as before everything takes now, if that has changed; what was measured
            before the change does not count any more then.
        """
        self._times.append((size, off))
        times = [*self._times]
        before, latest = times[: -self._in_a_row], times[-self._in_a_row :]
        offs = [off for _, off in latest]
        if min(offs) <= OFF_BY and max(offs) >= 1 / OFF_BY:
            return None
        sizes = [size for size, _ in latest]
        least, most = min(sizes) / _ALIKE, max(sizes) * _ALIKE
        alike = [off for size, off in before if least <= size <= most]
        if not alike or not 1 / OFF_BY < statistics.median(alike) < OFF_BY:
            return None
        factor = statistics.median(offs)
        self._times.clear()
        self._times.extend((size, off / factor) for size, off in latest)
        return factor
