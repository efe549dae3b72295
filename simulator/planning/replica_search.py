"""The smallest number of replicas that is enough, when more are never worse."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_IDLE: Final = 16
"""More replicas than this many times the work that is offered would only idle: the target is out of reach."""
_FEW: Final = 8


def min_replicas(is_enough: Callable[[int], bool], load: float) -> int | None:
    """The smallest number that is enough, if all larger ones are too; None when none is.

    Args:
        is_enough: Whether a number is.
        load: Work offered per second, in seconds; the search begins at the power of two below it, and ends
            where everybody would idle.
    """
    high = 1 << int(math.log2(max(1.0, load)))
    low = 0
    if is_enough(high):
        while high > 1 and is_enough(high // 2):
            high //= 2
        low = high // 2
    else:
        while True:
            low, high = high, 2 * high
            if is_enough(high):
                break
            if high >= max_replicas(load):
                return None
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


def max_replicas(load: float) -> int:
    """The largest number that is tried for so much work."""
    return max(_FEW, math.ceil(_IDLE * load))
