"""How far any scheduler could get: the most requests that can be on time, with all arrivals known beforehand.

Preemptive, on one machine, without any overhead: a set of requests can be met exactly if in no interval more
work arrives and is due than the interval is long (Horn, 1974). The largest such set is an integer program,
its constraints are added as solutions break them. A request's work is what it adds to a large pass, so that
no batching can do better, behind all of its prefix that any earlier prompt had, as if nothing were ever
evicted. The result is an upper bound on every arm of the simulator, on the same streams.

    make bench-optimum [ARGS="--preset flowprefill-8b --trace mooncake_conversation.jsonl"]
"""

from __future__ import annotations

import argparse
import math
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

import numpy as np

try:
    from scipy.optimize import Bounds, LinearConstraint, milp
except ModuleNotFoundError:
    raise SystemExit("SciPy is missing: `make bench-optimum` has it beside the server's packages") from None

from benchmarks.report import print_rows, write
from simulator.arms.arms import ARMS
from simulator.study.goodput import Experiment, enclosed
from simulator.study.least_work import least_works
from simulator.study.presets import PRESETS, on_trace

PRESET = "flowprefill-8b"
COMPARED = ("sedf-resume", "slackserve")
LEVELS = (0.9, 0.99)
MOST_ROUNDS = 400
MOST_SECONDS = 60.0
DONE_S = 1e-12


class Work(NamedTuple):
    """A request: when it comes, when it is due, and how long it takes, seconds."""

    arrives_s: float
    due_s: float
    work_s: float


def works(experiment: Experiment, rate_rps: float, seed: int) -> list[Work]:
    """A stream as the optimum sees it."""
    arrivals = experiment.workload.stream(rate_rps, experiment.requests, seed)
    added_s = least_works(experiment.hardware.cost, arrivals)
    return [
        Work(arrival.at_s, arrival.at_s + (arrival.ttft_s or math.inf), work_s)
        for arrival, work_s in zip(arrivals, added_s, strict=True)
    ]


def broken_intervals(jobs: list[Work], chosen: list[int]) -> list[tuple[float, float]]:
    """Intervals in which too much is due when the chosen run by earliest deadline; none if all are met."""
    order = sorted(chosen, key=lambda index: jobs[index].arrives_s)
    left = {index: jobs[index].work_s for index in chosen}
    ready: list[tuple[float, int]] = []
    broken: list[tuple[float, float]] = []
    now_s, position = 0.0, 0
    while position < len(order) or ready:
        if not ready:
            now_s = max(now_s, jobs[order[position]].arrives_s)
        while position < len(order) and jobs[order[position]].arrives_s <= now_s + 1e-12:
            heappush(ready, (jobs[order[position]].due_s, order[position]))
            position += 1
        due_s, index = ready[0]
        next_s = jobs[order[position]].arrives_s if position < len(order) else math.inf
        step_s = min(left[index], next_s - now_s)
        left[index] -= step_s
        now_s += step_s
        if left[index] <= DONE_S:
            heappop(ready)
            if now_s > due_s + 1e-9:
                broken.append((_start_of(jobs, chosen, due_s), due_s))
    return broken


def _start_of(jobs: list[Work], chosen: list[int], end_s: float) -> float:
    """Where the interval to `end_s` begins in which the most is due beyond its length."""
    worst, start_s, due_s = -math.inf, 0.0, 0.0
    for index in sorted(chosen, key=lambda index: -jobs[index].arrives_s):
        job = jobs[index]
        if job.due_s > end_s:
            continue
        due_s += job.work_s
        if due_s - (end_s - job.arrives_s) > worst:
            worst, start_s = due_s - (end_s - job.arrives_s), job.arrives_s
    return start_s


def most_on_time(jobs: list[Work]) -> tuple[int, bool]:
    """The size of the largest set that can be met, and whether it is proven; else an upper bound of it."""
    count = len(jobs)
    possible = np.array([job.arrives_s + job.work_s <= job.due_s for job in jobs], dtype=float)
    rows: list[np.ndarray] = []
    limits: list[float] = []
    seen: set[tuple[float, float]] = set()
    bound = int(possible.sum())
    for _ in range(MOST_ROUNDS):
        constraints = LinearConstraint(np.array(rows), ub=np.array(limits)) if rows else ()
        solved = milp(
            -np.ones(count),
            integrality=np.ones(count),
            bounds=Bounds(0, possible),
            constraints=constraints,
            options={"time_limit": MOST_SECONDS},
        )
        if solved.x is None:
            return bound, False
        bound = min(bound, math.floor(-solved.mip_dual_bound + 1e-6))
        chosen = [index for index in range(count) if solved.x[index] > 0.5]  # noqa: PLR2004 - 0 or 1
        broken = [interval for interval in broken_intervals(jobs, chosen) if interval not in seen]
        if not broken:
            return len(chosen), solved.status == 0
        for start_s, end_s in dict.fromkeys(broken):
            seen.add((start_s, end_s))
            inside = [job.work_s if start_s <= job.arrives_s and job.due_s <= end_s else 0.0 for job in jobs]
            rows.append(np.array(inside))
            limits.append(end_s - start_s)
    return bound, False


def optimal_rps(experiment: Experiment, seed: int, level: float, capacity_rps: float) -> tuple[float, bool]:
    """The highest rate at which `level` could be on time, within 2 %; whether every step was proven."""
    count = experiment.requests
    proven = True

    def holds(rate_rps: float) -> bool:
        nonlocal proven
        found, is_proven = most_on_time(works(experiment, rate_rps, seed))
        proven = proven and is_proven
        return found >= level * count - 1e-9

    return enclosed(0.5 * capacity_rps, 4.0 * capacity_rps, holds)[1], proven


def arm_rps(experiment: Experiment, name: str, seed: int, level: float, capacity_rps: float) -> float:
    """What an arm reaches on the same stream, with the best of its settings."""
    experiment = replace(experiment, seeds=(seed,))
    arm = ARMS[name]
    return max(experiment.goodput_rps(arm, setting, level, capacity_rps) for setting in arm.settings)


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--preset", choices=sorted(PRESETS), default=PRESET)
    parser.add_argument("--trace", type=Path)
    arguments = parser.parse_args()
    count, seeds = arguments.requests, range(1, arguments.seeds + 1)
    preset = PRESETS[arguments.preset]
    if arguments.trace is not None:
        preset = on_trace(preset, arguments.trace)
    experiment = Experiment(preset.hardware, preset.workload, count, (1,))
    capacity_rps = experiment.capacity_rps()
    cases = [(seed, level, capacity_rps) for level in LEVELS for seed in seeds]
    with ProcessPoolExecutor() as pool:
        best = [pool.submit(optimal_rps, experiment, *case) for case in cases]
        arms = {name: [pool.submit(arm_rps, experiment, name, *case) for case in cases] for name in COMPARED}
        optimum = [future.result() for future in best]
        reached = {name: [future.result() for future in futures] for name, futures in arms.items()}
    rows = [
        {
            "level": level,
            "seed": seed,
            "optimum_rps": bound_rps,
            "proven": proven,
            "arms_rps": {name: reached[name][position] for name in COMPARED},
        }
        for position, ((seed, level, _), (bound_rps, proven)) in enumerate(zip(cases, optimum, strict=True))
    ]
    print_rows(f"{preset.title}, {count} requests", rows)
    for level in LEVELS:
        for name in COMPARED:
            parts = [row["arms_rps"][name] / row["optimum_rps"] for row in rows if row["level"] == level]
            print(f"{name} at {level:.0%}: {statistics.median(parts):.0%} of the optimum")
    name = f"cores/offline_optimum/{preset.name.replace('@', '_')}"
    print(write(name, {"preset": preset.name, "requests": count, "rows": rows}))


if __name__ == "__main__":
    main()
