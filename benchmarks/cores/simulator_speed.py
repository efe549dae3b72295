"""How fast the simulator is: requests served per second of wall time, by one process.

One replica at a load of 0.9, for FlowPrefill's rule and for our defaults; the best of several runs, which
other work on the machine lengthens least. The decisions are the servers' own code and take most of it.

    python -m benchmarks.cores.simulator_speed
"""

from __future__ import annotations

import argparse
import time
from typing import Final

from benchmarks.report import write
from simulator.arms.arms import ARMS
from simulator.study.goodput import Experiment
from simulator.study.presets import PRESETS
from simulator.study.run import run

PRESET: Final = "flowprefill-8b"
MEASURED: Final = ("sedf-resume", "slackserve")
LOAD: Final = 0.9
REQUESTS: Final = 4000
SEED: Final = 1
RUNS: Final = 10


def requests_per_s(name: str) -> float:
    """Requests of one stream per second of wall time, with an arm."""
    preset, arm = PRESETS[PRESET], ARMS[name]
    capacity_rps = Experiment(preset.hardware, preset.workload, REQUESTS, (SEED,)).capacity_rps()
    arrivals = preset.workload.stream(LOAD * capacity_rps, REQUESTS, SEED)
    times_s = []
    for _ in range(RUNS):
        started_s = time.perf_counter()
        run(arm, preset.hardware, arrivals, arm.settings[0])
        times_s.append(time.perf_counter() - started_s)
    return REQUESTS / min(times_s)


def main() -> None:
    """Measure both and write one JSON."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    found = {name: requests_per_s(name) for name in MEASURED}
    for name, rate in found.items():
        print(f"{ARMS[name].title}: {rate:,.0f} requests per second")
    about = {"preset": PRESET, "replicas": 1, "load": LOAD, "requests": REQUESTS, "seed": SEED, "runs": RUNS}
    print(write("cores/simulator_speed", {**about, "requests_per_s": found}))


if __name__ == "__main__":
    main()
