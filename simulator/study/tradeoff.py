"""How fast a long prefill stands still, by where it can be stopped, and what these places cost.

Owns the curve of boundary granularity: a stop is ordered at every moment of one prefill, and the time to
standstill is averaged. Chunked prefill is on the same curve: it stops between chunks and
pays with more passes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING, Final

from simulator.cost.passes import Granularity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulator.cost.passes import CostModel
    from simulator.replica.hardware import Hardware

CHUNKS: Final = (512, 1024, 2048, 4096)
_MOMENTS: Final = 20_000
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


@dataclass(frozen=True, slots=True)
class Place:
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


def tradeoff(hardware: Hardware, tokens: int, sync_s: float = 15e-6) -> list[Place]:
    """The curve for one prefill.

    Args:
        hardware: What it runs on.
        tokens: Its length.
        sync_s: What the device idles at a boundary at which the host waits for it: a launch and a wake-up. A
            host that is one boundary ahead keeps the device busy.
    """
    whole_s = hardware.at(Granularity.NONE).prefill_s(tokens)
    places = []
    for label, granularity, ahead in _PLACES:
        cost = replace(hardware.at(granularity), check_s=0.0 if ahead else sync_s)
        places.append(_place(label, _stretches(cost, tokens), ahead, cost.prefill_s(tokens) / whole_s))
    for chunk in CHUNKS:
        ends = _chunks(hardware.at(Granularity.NONE), tokens, chunk)
        places.append(_place(f"chunks of {chunk}", ends, 0, sum(ends) / whole_s))
    return places


def _place(label: str, stretches: Sequence[float], ahead: int, factor: float) -> Place:
    """Average over moments spread evenly over the prefill."""
    blocking = _blocking_ms(stretches, ahead)
    return Place(label, mean(blocking), blocking[int(len(blocking) * 0.99)], (factor - 1) * 100)


def _stretches(cost: CostModel, tokens: int) -> list[float]:
    """The times between boundaries, in order."""
    times = cost.times([(tokens, 0)])
    in_layer = [
        end - start for start, end in zip((0.0, *times.ends), times.ends, strict=False) if end > start
    ]
    return in_layer * times.layers


def _chunks(cost: CostModel, tokens: int, chunk: int) -> list[float]:
    """The times of the passes that a chunked prefill takes."""
    return [cost.times([(min(chunk, tokens - start), start)]).total_s for start in range(0, tokens, chunk)]


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
