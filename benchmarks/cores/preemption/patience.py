"""What it is worth that a stop waits, by how much of the objective it may wait: `preemption.patience`.

SlackServe with its defaults but for that, on FlowPrefill's mix of the 8B: as predicted, with predictions that
are off, and where a host takes 43 ms to launch a pass. The streams are those on which constants are chosen;
what the default is worth on others is `held_out`'s.

    python -m benchmarks.cores.preemption.patience [--streams 4] [--processes 2]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any, Final

from benchmarks.cores.held_out import Case, goodputs, ratio_interval
from benchmarks.report import print_rows, write
from simulator.arms.arm import Arm
from simulator.arms.arms import SERVERS

MODEL: Final = "8b"
PATIENCES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
PLACES: Final[Mapping[str, Mapping[str, float]]] = {
    "as predicted": {},
    "off by a log-normal factor, sigma 0.3": {"sigma": 0.3},
    "30 % too low": {"bias": 0.7},
    "43 ms to launch a pass": {"launch_s": 0.043},
}


def figures(case: Case, patience: float) -> dict[str, float]:
    """The goodputs of one stream, requests per second."""
    preemption = replace(SERVERS.preemption, patience=patience)
    arm = Arm("slackserve", "SlackServe", replace(SERVERS, preemption=preemption).build)
    return goodputs(case, arm=arm)


def main() -> None:
    """Simulate, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--processes", type=int)
    options = parser.parse_args()
    base = Case(MODEL, "slackserve", 0, 0.0, 0, options.requests)
    seeds = range(1, options.streams + 1)
    jobs = [
        (place, patience, replace(base, seed=seed, **changed))
        for place, changed in PLACES.items()
        for patience in PATIENCES
        for seed in seeds
    ]
    found: dict[tuple[str, float], dict[str, list[float]]] = {}
    with ProcessPoolExecutor(options.processes) as pool:
        all_figures = pool.map(figures, [case for *_, case in jobs], [patience for _, patience, _ in jobs])
        for (place, patience, _), of_stream in zip(jobs, all_figures, strict=True):
            for figure, value in of_stream.items():
                found.setdefault((place, patience), {}).setdefault(figure, []).append(value)
    rows: list[dict[str, Any]] = []
    for (place, patience), by_figure in found.items():
        for figure, streams in by_figure.items():
            low, ratio, high = ratio_interval(streams, found[place, 0.0][figure])
            row = {"place": place, "patience": patience, "figure": figure, "streams": streams}
            compared = {
                "goodput_rps": statistics.fmean(streams),
                "over none": ratio,
                "low": low,
                "high": high,
            }
            rows.append({**row, **compared})
    shown = ["place", "patience", "figure", "goodput_rps", "over none", "low", "high"]
    print_rows("requests per second", rows, {name: name for name in shown})
    about = {"model": MODEL, "first_seed": seeds[0], "streams": options.streams, "requests": options.requests}
    print(write("cores/patience", {**about, "rows": rows}))


if __name__ == "__main__":
    main()
