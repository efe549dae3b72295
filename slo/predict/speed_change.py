"""When a machine has become slower or quicker than it was.

Owns when the latest measurements say so: it takes all of them, and others that were alike before them. One
kind that was never predicted well says nothing. What follows is the asker's to decide.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

BY: Final = 1.2
"""The factor by which it has changed at least."""
_ALIKE: Final = 1.25
"""What was measured before is alike if it is within this factor of one of the latest."""


class SpeedChange:
    """Of one machine.

    Args:
        in_a_row: So many of the latest measurements have to agree.
        remembered: So many count, the latest among them.
    """

    def __init__(self, in_a_row: int, remembered: int) -> None:
        self._in_a_row = in_a_row
        self._measured: deque[tuple[float, float]] = deque(maxlen=remembered)

    def observe(self, size: float, off: float) -> float | None:
        """Something was measured.

        Args:
            size: How long it was, in a unit that does not change with what is learned of the machine.
            off: How many times as long as was predicted it took.

        Returns:
            How many times as long as before everything takes now, if that has changed; what was measured
            before the change does not count any more then.
        """
        self._measured.append((size, off))
        measured = [*self._measured]
        before, latest = measured[: -self._in_a_row], measured[-self._in_a_row :]
        offs = [off for _, off in latest]
        if min(offs) <= BY and max(offs) >= 1 / BY:
            return None
        sizes = [size for size, _ in latest]
        least, most = min(sizes) / _ALIKE, max(sizes) * _ALIKE
        alike = [off for size, off in before if least <= size <= most]
        if not alike:
            return None
        factor = statistics.median(offs) / statistics.median(alike)
        if 1 / BY <= factor <= BY:
            return None
        self._measured.clear()
        self._measured.extend((size, off / factor) for size, off in latest)
        return factor
