"""Arrivals in bursts and lulls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Phase:
    """For `seconds`, requests arrive at `times` the mean rate."""

    times: float
    seconds: float


def bursty(rng: Random, rate_rps: float, seconds: float, *phases: Phase) -> Iterator[float]:
    """When requests arrive, in seconds, until after `seconds`; the phases follow each other again and again.

    Between two arrivals the caller may draw from `rng` too.
    """
    turns = itertools.cycle(phases)
    phase = next(turns)
    now_s, left_s = 0.0, phase.seconds
    while now_s < seconds:
        gap_s = rng.expovariate(rate_rps * phase.times)
        if gap_s >= left_s:
            now_s += left_s
            phase = next(turns)
            left_s = phase.seconds
            continue
        now_s, left_s = now_s + gap_s, left_s - gap_s
        yield now_s
