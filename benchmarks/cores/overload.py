"""Three tiers on one replica at loads below and beyond what it can do: who is in time, and who is refused.

The preset `tiers-70b`. Load 1 is what one prompt after the other would take. Of what an arm has to choose,
the setting is taken with which most requests are in time at that load. A request that was refused is not in
time.

    python -m benchmarks.cores.overload
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from statistics import fmean
from typing import Any, Final

from benchmarks.report import print_rows, write
from simulator.arms.arms import ARMS, TIER_ARMS
from simulator.fleet.outcome import attainment_by, share
from simulator.study.goodput import Experiment
from simulator.study.presets import PRESETS
from slo.tiers import BACKGROUND, PREMIUM, STANDARD

PRESET: Final = PRESETS["tiers-70b"]
LOADS: Final = {0.5: 8000, 0.9: 8000, 1.5: 8000, 3.0: 4000}
"""And how many requests each stream has."""
SEEDS: Final = (1001, 1002)
"""Constants were chosen on seeds below 1,000."""
TIERS: Final = (PREMIUM, STANDARD, BACKGROUND)


def row(load: float, name: str) -> dict[str, Any]:
    """An arm at a load, with its best setting."""
    experiment = Experiment(PRESET.hardware, PRESET.workload, LOADS[load], SEEDS)
    rate_rps = load * experiment.capacity_rps()
    settings = ARMS[name].settings
    return max((at(experiment, name, index, rate_rps, load) for index in range(len(settings))), key=_in_time)


def _in_time(found: dict[str, Any]) -> float:
    return float(found["in time"]["all"])


def at(experiment: Experiment, name: str, index: int, rate_rps: float, load: float) -> dict[str, Any]:
    """An arm with one of its settings at a rate."""
    arm = ARMS[name]
    runs = experiment.runs(arm, rate_rps, arm.settings[index])
    jobs = [job for each in runs for job in each.jobs]
    by_tier = attainment_by(jobs, "tier")
    served = [[job for job in each.jobs if math.isfinite(job.first_token_s)] for each in runs]
    tokens = sum(job.num_tokens for of_run in served for job in of_run)
    took_s = sum(max(job.first_token_s for job in of_run) for of_run in served)
    refused = Counter(job.refused for job in jobs if job.refused)
    return {
        "load": load,
        "rate_rps": rate_rps,
        "arm": name,
        "setting": dict(arm.settings[index]),
        "in time": {
            **{tier: 100 * by_tier[tier] for tier in TIERS},
            "all": 100 * share(job.is_on_time for job in jobs),
        },
        "tokens_per_s": tokens / took_s,
        "refused": 100 * fmean(bool(job.refused) for job in jobs),
        "reasons": dict(refused),
    }


def main() -> None:
    """Simulate everything, print a table, write JSON."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    cases = list(product(LOADS, TIER_ARMS))
    with ProcessPoolExecutor(2) as pool:
        rows = list(pool.map(row, *zip(*cases, strict=True)))
    print_rows("three tiers", rows)
    write("cores/overload", {"seeds": SEEDS, "requests": LOADS, "rows": rows})


if __name__ == "__main__":
    main()
