"""Attainment at a rate, and goodput: the highest rate at which a fraction of all requests is in time.

Owns the search and its parallel execution. All arms see the same streams.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Final

import numpy as np

from simulator.arms.arm import Arm
from simulator.findings import Blocking, Point
from simulator.fleet.outcome import attainment_by, share
from simulator.replica.hardware import Hardware
from simulator.replica.job import Job
from simulator.study.run import Run, run
from simulator.workload.arrivals import Workload

LOWEST_LOAD: Final = 0.02
HIGHEST_LOAD: Final = 4.0
"""Goodput is looked for between these loads, work offered per second on one replica."""
PRECISION: Final = 1.02
REACH: Final = 8
"""So many steps of the precision above a rate none may keep the level."""
_SAMPLE: Final = 4000


@dataclass(frozen=True, slots=True)
class Experiment:
    """A workload on a replica.

    Attributes:
        requests: Requests of each stream.
        seeds: One stream each.
    """

    hardware: Hardware
    workload: Workload
    requests: int
    seeds: Sequence[int]

    def capacity_rps(self) -> float:
        """The rate at which one replica that runs one prompt after the other is always busy."""
        arrivals = self.workload.stream(1.0, _SAMPLE, self.seeds[0])
        return 1.0 / mean(self.hardware.cost.prefill_s(arrival.tokens) for arrival in arrivals)

    def runs(self, arm: Arm, rate_rps: float, setting: Mapping[str, float]) -> list[Run]:
        """Serve every stream to its end."""
        return [
            run(arm, self.hardware, self.workload.stream(rate_rps, self.requests, seed), setting)
            for seed in self.seeds
        ]

    def attains(self, arm: Arm, rate_rps: float, setting: Mapping[str, float], level: float) -> bool:
        """Whether at least a fraction `level` of all requests is in time at a rate."""
        bearable = (1 - level) * self.requests * len(self.seeds) + 1e-9
        for seed in self.seeds:
            arrivals = self.workload.stream(rate_rps, self.requests, seed)
            served = run(arm, self.hardware, arrivals, setting, max_misses=bearable)
            bearable -= sum(not job.is_on_time for job in served.jobs)
            if bearable < 0:
                return False
        return True

    def goodput_rps(self, arm: Arm, setting: Mapping[str, float], level: float, capacity_rps: float) -> float:
        """The highest rate at which `level` is attained, by steps of 2 %; 0 when none is.

        See `highest`: attainment does not fall with every step of the rate.
        """
        holds = partial(self.attains, arm, setting=setting, level=level)
        low, high = LOWEST_LOAD * capacity_rps, HIGHEST_LOAD * capacity_rps
        if not holds(low):
            return 0.0
        rate = 0.25 * capacity_rps
        while rate < high:  # upwards first: overload takes longest to simulate
            if not holds(rate):
                high = rate
                break
            low, rate = rate, 2 * rate
        found, _ = enclosed(low, high, holds)
        return found * PRECISION ** highest(0, lambda steps: holds(found * PRECISION**steps))


def highest(good: int, holds: Callable[[int], bool], points: float = math.inf) -> int:
    """Of the points of a grid from `good` on the highest that holds, with none of the next `REACH` that does.

    With another rate other requests meet, so that a level that is missed at one may be kept again above it.
    """
    tried = good
    while tried < min(good + REACH, points - 1):
        tried += 1
        if holds(tried):
            good = tried
    return good


def enclosed(low: float, high: float, holds: Callable[[float], bool]) -> tuple[float, float]:
    """Rates within 2 % of each other, of which the lower holds and the higher does not."""
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        if holds(middle):
            low = middle
        else:
            high = middle
    return low, high


def point(rate_rps: float, runs: Sequence[Run], setting: Mapping[str, float]) -> Point:
    """The sums and means of runs at one rate."""
    jobs = [job for served in runs for job in served.jobs]
    busy_s = sum(served.replica.busy_s for served in runs)
    span_s = sum(served.jobs[-1].arrival.at_s for served in runs)
    prefilled = [job for served in runs for job in served.jobs if job.first_token_s <= served.ended_s]
    return Point(
        rate_rps=rate_rps,
        attainment=share(job.is_on_time for job in jobs),
        by_kind=attainment_by(jobs, "kind"),
        by_tier=attainment_by(jobs, "tier"),
        preemptions=sum(job.preemptions for job in jobs) / len(jobs),
        wasted_work=sum(job.wasted_s for job in jobs) / busy_s if busy_s else 0.0,
        prompt_tokens_ps=sum(job.num_tokens for job in prefilled) / span_s,
        setting=dict(setting),
    )


def blocking(runs: Iterable[Run]) -> Blocking | None:
    """Blocking times of all stops; None without any."""
    times = [s * 1e3 for served in runs for s in served.replica.blocking_s]
    if not times:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(times, (50, 90, 99)))
    return Blocking(len(times), mean(sorted(times)), p50, p90, p99, max(times))


def percentiles_ms(jobs: Iterable[Job]) -> dict[str, list[float]]:
    """By kind, the 0th to 100th percentiles of the time to first token; infinite if not served."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for job in sorted(jobs, key=lambda job: job.ttft_s):
        by_kind[job.arrival.kind].append(job.ttft_s * 1e3)
    return {
        kind: [times[round(p / 100 * (len(times) - 1))] for p in range(101)]
        for kind, times in sorted(by_kind.items())
    }
