"""How many decode replicas a load needs: those that keep TPOT and have room for what is prefilled.

Owns what is enough, and the search for the fewest replicas of any kind, where more are never worse. Prefill
is taken out: every prompt takes what it takes alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from simulator.arms.arm import Arm
from simulator.cost.decode_steps import INSTANT_DECODE
from simulator.fleet.fleet import simulate
from simulator.fleet.outcome import FleetRun
from simulator.fleet.setup import DecodeMemory, FleetSetup
from simulator.planning.steady_decode import bears
from simulator.replica.hardware import Hardware
from simulator.replica.job import Job
from simulator.replica.loop import EventLoop
from simulator.workload.arrivals import Arrival

_IDLE: Final = 16
"""More replicas than this many times the work that is offered would only idle: the target is out of reach."""
_FEW: Final = 8


def min_replicas(is_enough: Callable[[int], bool], load: float) -> int | None:
    """The smallest number that is enough, if all larger ones are too; None when none is.

    The search begins at the power of two below `load`, the work offered per second, in seconds.
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
    return low + 1 + bisect_left(range(low + 1, high), True, key=is_enough)  # noqa: FBT003


def max_replicas(load: float) -> int:
    """The largest number that is tried for so much work."""
    return max(_FEW, math.ceil(_IDLE * load))


def min_decode_replicas(
    setup: FleetSetup, arrivals: Sequence[Arrival], rate_rps: float, target: float
) -> int | None:
    """The fewest decode replicas that are enough if every prefill takes what it takes alone.

    Answers may take longer than the stream, so that it ends before the tier is as full as it gets: that they
    bear the load for as long as it lasts is told by arithmetic.
    """
    if setup.decode == INSTANT_DECODE:
        return 1
    alone = replace(setup, arm=ALONE, setting={}, prefill_replicas=1, placement="round_robin")

    load = decode_load(setup, arrivals, rate_rps)

    def is_enough(replicas: int) -> bool:
        if setup.decode_memory is not DecodeMemory.RESERVED:
            if replicas < load:
                return False  # those that may wait would wait for ever longer
        elif not bears(setup, arrivals, rate_rps, replicas, target):
            return False
        return decodes(simulate(replace(alone, decode_replicas=replicas), arrivals), setup, target)

    return min_replicas(is_enough, load)


def decodes(run: FleetRun, setup: FleetSetup, target: float) -> bool:
    """Whether the decode tier keeps TPOT and takes all requests.

    Where memory is reserved for whole answers, it shall also not be what requests wait for. Where it is given
    out in blocks, waits and what is computed again count in TPOT, and who has no TPOT objective may wait.
    """
    parts = [*run.tpot_by_tier(setup.tiers).values()]
    if setup.decode_memory is DecodeMemory.RESERVED:
        parts.append(1.0 - run.waited_for_memory)
    else:
        parts += run.taken_by_decode.values()
    return min(parts, default=1.0) >= target


def decode_load(setup: FleetSetup, arrivals: Sequence[Arrival], rate_rps: float) -> float:
    """Decode replicas that would be always full: by their batch or by their memory, whichever is first."""
    model = setup.decode
    context = sum(arrival.tokens + arrival.output_tokens for arrival in arrivals) / len(arrivals)
    outputs = sum(arrival.output_tokens for arrival in arrivals) / len(arrivals)
    batch = max(1, min(model.max_batch, int(model.kv_tokens / context)))
    return rate_rps * outputs * model.step_s(batch, int(batch * context)) / batch


class _AloneReplica:
    """Prefills every prompt at once, as if it were alone."""

    def __init__(
        self, loop: EventLoop, hardware: Hardware, _: Mapping[str, float], prefilled: Callable[[Job], None]
    ) -> None:
        self.blocking_s: list[float] = []
        self.busy_s = 0.0
        self._loop = loop
        self._hardware = hardware
        self._prefilled = prefilled

    def arrive(self, job: Job) -> None:
        """Take a request."""
        took_s = self._hardware.cost.prefill_s(job.num_tokens)
        self.busy_s += took_s
        self._loop.call_at(self._loop.now_s + took_s, self._done, job)

    def release(self, job: Job) -> None:
        """The KV of a prefilled request has left."""

    def _done(self, job: Job) -> None:
        job.prefilled_s = self._loop.now_s
        self._prefilled(job)


ALONE: Final = Arm("alone", "Every prompt as if alone", _AloneReplica)
"""For a fleet of which the decode tier alone is looked at."""
