"""How fast a long prefill stands still, by where it can be stopped, and what these places cost.

Owns the curve of boundary granularity: a stop is ordered at every moment of one prefill, and the time to
standstill is averaged. Chunked prefill is on the same curve: it stops between chunks and
pays with more passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import mean
from typing import Final, NamedTuple

from simulator.cost.passes import Granularity
from simulator.replica.hardware import Hardware

CHUNKS: Final = (512, 1024, 2048, 4096)
_MOMENTS: Final = 20_000
_SYNC_S: Final = 15e-6
"""What the device idles at a boundary at which the host waits for it: a launch and a wake-up.

A host that is one boundary ahead keeps the device busy."""
_PLACES: Final = (
    ("operator, device synchronised at each", Granularity.OPERATOR, 0),
    ("operator, 1 ahead", Granularity.OPERATOR, 1),
    ("operator as on the servers, 1 ahead", Granularity.REPLAYED, 1),
    ("MLP in 4 segments, 1 ahead", Granularity.SEGMENT, 1),
    ("half layer, synchronised", Granularity.SUBLAYER, 0),
    ("half layer, 1 ahead", Granularity.SUBLAYER, 1),
    ("layer, synchronised", Granularity.LAYER, 0),
    ("layer, 1 ahead", Granularity.LAYER, 1),
)


class Place(NamedTuple):
    """One way to make a prefill stoppable.

    Attributes:
        mean_ms: Mean time from an order to standstill, the order at a random moment.
        p99_ms: Its 99th percentile.
        cost_percent: What the prefill takes longer than without boundaries.
    """

    label: str
    mean_ms: float
    p99_ms: float
    cost_percent: float


def tradeoff(hardware: Hardware, tokens: int) -> list[Place]:
    """The curve for one prefill of so many tokens."""
    whole = hardware.at(Granularity.NONE)
    whole_s = whole.prefill_s(tokens)
    places = []
    for label, granularity, ahead in _PLACES:
        times = replace(hardware.at(granularity), check_s=0.0 if ahead else _SYNC_S).times([(tokens, 0)])
        ends = (0.0, *times.ends)
        stretches = [end - start for start, end in pairwise(ends) if end > start] * times.layers
        places.append(_place(label, stretches, ahead, times.total_s / whole_s))
    for chunk in CHUNKS:
        chunks = [(min(chunk, tokens - start), start) for start in range(0, tokens, chunk)]
        stretches = [whole.times([part]).total_s for part in chunks]
        places.append(_place(f"chunks of {chunk}", stretches, 0, sum(stretches) / whole_s))
    return places


def _place(label: str, stretches: Sequence[float], ahead: int, factor: float) -> Place:
    """Average over moments spread evenly over the prefill."""
    blocking = _blocking_ms(stretches, ahead)
    return Place(label, mean(blocking), blocking[int(len(blocking) * 0.99)], (factor - 1) * 100)


def _blocking_ms(stretches: Sequence[float], ahead: int) -> list[float]:
    """Times to standstill in ascending order; what is launched `ahead` runs on."""
    total_s = sum(stretches)
    blocking, index, ends_s = [], 0, stretches[0]
    for number in range(_MOMENTS):
        at_s = (number + 0.5) / _MOMENTS * total_s
        while at_s >= ends_s and index < len(stretches) - 1:
            index += 1
            ends_s += stretches[index]
        launched_s = sum(stretches[index + 1 : index + 1 + ahead])
        blocking.append((ends_s - at_s + launched_s) * 1e3)
    return sorted(blocking)
