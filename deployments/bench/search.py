"""Goodput: the highest rate at which enough requests meet their objectives, by bisection. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


@dataclass(frozen=True, slots=True)
class Goodput:
    """What a search found.

    Attributes:
        rate_rps: The highest rate that was good; None when not even the lowest was.
        is_bounded: Whether a higher rate was tried and was not good.
    """

    rate_rps: float | None
    is_bounded: bool


def bisection(low_rps: float, high_rps: float, precision: float) -> Generator[float, bool, Goodput]:
    """Yields the rate to try next, takes whether it was good, and returns what was found.

    Args:
        low_rps: Tried first.
        high_rps: Tried second.
        precision: Ends when the best good rate and the lowest bad one are so close, as a fraction.
    """
    if not (yield low_rps):
        return Goodput(None, is_bounded=True)
    if (yield high_rps):
        return Goodput(high_rps, is_bounded=False)
    good_rps, bad_rps = low_rps, high_rps
    while bad_rps - good_rps > precision * bad_rps:
        middle_rps = (good_rps + bad_rps) / 2
        if (yield middle_rps):
            good_rps = middle_rps
        else:
            bad_rps = middle_rps
    return Goodput(good_rps, is_bounded=True)
