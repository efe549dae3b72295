"""Goodput of all and of the worst class, on streams that no constant and no choice was made on, in pairs.

FlowPrefill's mixes on its three models, at 90 and at 99 % in time. Every arm gets the same streams. What the
peers have to choose, chunks and joined prompts, is the best for each figure on these very streams; SlackServe
runs with its defaults. The ratios to it are of means over the streams, with bootstrap intervals over the
streams at 95 %. With `--sigma` the predictions of all arms are off, log-normally.

    python -m benchmarks.cores.held_out [--sigma 0,0.3] [--streams 20] [--model 8b]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Final

import numpy as np

from benchmarks.report import print_rows, write
from simulator.arms.arms import ARMS
from simulator.cost.prediction_noise import PredictionNoise
from simulator.fleet.outcome import attainment_by, share
from simulator.replica.hardware import Hardware
from simulator.study.goodput import Experiment
from simulator.study.presets import PRESETS
from simulator.study.run import run

MODELS: Final = ("8b", "14b", "70b")
NAMES: Final = ("sedf-chunked", "sedf-resume", "slackserve-chunked", "slackserve")
OURS: Final = "slackserve"
FIRST_SEED: Final = 1000
"""Constants were chosen on seeds below."""
LOADS: Final = tuple(0.1 * 1.02**number for number in range(170))
LEVELS: Final = (0.9, 0.99)
BOOTSTRAPS: Final = 10_000
ALL: Final = "all"
WORST: Final = "worst class"


@dataclass(frozen=True)
class Case:
    """One arm with one setting on one stream.

    Attributes:
        setting: Its place among the arm's.
        sigma: Of the predictions' error.
    """

    model: str
    arm: str
    setting: int
    sigma: float
    seed: int
    requests: int


def hardware(model: str, sigma: float, seed: int = 0) -> Hardware:
    """A model's replica, with predictions that are off."""
    exact = PRESETS[f"flowprefill-{model}"].hardware
    return replace(exact, noise=PredictionNoise(sigma, seed=seed)) if sigma > 0 else exact


@cache
def capacity_rps(model: str) -> float:
    """Load 1: one prompt after the other, all the time."""
    preset = PRESETS[f"flowprefill-{model}"]
    return Experiment(preset.hardware, preset.workload, 0, (1,)).capacity_rps()


def goodputs(case: Case) -> dict[str, float]:
    """Requests per second by figure; 0 for never. Attainment is taken to fall with the load."""
    arm = ARMS[case.arm]
    preset, replica = PRESETS[f"flowprefill-{case.model}"], hardware(case.model, case.sigma, case.seed)

    @cache
    def attained(number: int) -> Mapping[str, float]:
        arrivals = preset.workload.stream(LOADS[number] * capacity_rps(case.model), case.requests, case.seed)
        jobs = run(arm, replica, arrivals, arm.settings[case.setting]).jobs
        by_kind = attainment_by(jobs, "kind")
        return {ALL: share(job.is_on_time for job in jobs), WORST: min(by_kind.values())}

    found = {}
    for whom, level in product((ALL, WORST), LEVELS):
        good, bad = -1, len(LOADS)
        while bad - good > 1:
            middle = (good + bad) // 2
            if attained(middle)[whom] >= level:
                good = middle
            else:
                bad = middle
        found[f"{whom} {level:.0%}"] = LOADS[good] * capacity_rps(case.model) if good >= 0 else 0.0
    return found


def compare(found: Mapping[Case, Mapping[str, float]]) -> list[dict[str, Any]]:
    """A row for each model, error, figure and arm, the arm with its best setting."""
    rows = []
    groups = dict.fromkeys((case.model, case.sigma) for case in found)
    figures = [*next(iter(found.values()))]
    for (model, sigma), figure in product(groups, figures):
        best: dict[str, tuple[int, list[float]]] = {}
        for name in NAMES:
            by_setting: dict[int, list[float]] = {}
            for case, value in found.items():
                if (case.model, case.sigma, case.arm) == (model, sigma, name):
                    by_setting.setdefault(case.setting, []).append(value[figure])
            best[name] = max(by_setting.items(), key=lambda item: statistics.fmean(item[1]))
        ours = best[OURS][1]
        for name, (setting, values) in best.items():
            low, ratio, high = ratio_interval(ours, values)
            rows.append(
                {
                    "model": model,
                    "sigma": sigma,
                    "figure": figure,
                    "arm": name,
                    "setting": dict(ARMS[name].settings[setting]),
                    "goodput_rps": statistics.fmean(values),
                    "ours over it": ratio,
                    "low": low,
                    "high": high,
                    "streams": values,
                }
            )
    return rows


def ratio_interval(ours: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """(lower end, ratio, upper end) of the ratio of two means over the same streams, 95 % by bootstrap."""
    pairs = np.array([ours, other])
    drawn = np.random.default_rng(1).integers(pairs.shape[1], size=(BOOTSTRAPS, pairs.shape[1]))
    means = pairs[:, drawn].mean(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = means[0] / means[1]
        ratio = pairs[0].mean() / pairs[1].mean()
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(ratio), float(high)


def main() -> None:
    """Simulate everything, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, default=[])
    parser.add_argument("--sigma", default="0")
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--output", default="held_out")
    options = parser.parse_args()
    cases = [
        Case(model, name, setting, float(sigma), FIRST_SEED + stream, options.requests)
        for model in options.model or MODELS
        for sigma in options.sigma.split(",")
        for name in NAMES
        for setting in range(len(ARMS[name].settings))
        for stream in range(options.streams)
    ]
    with ProcessPoolExecutor() as pool:
        found = dict(zip(cases, pool.map(goodputs, cases, chunksize=4), strict=True))
    rows = compare(found)
    shown = ["model", "sigma", "figure", "arm", "goodput_rps", "ours over it", "low", "high"]
    print_rows("requests per second", rows, {name: name for name in shown})
    settings = {"streams": options.streams, "requests": options.requests, "first_seed": FIRST_SEED}
    print(write(f"cores/{options.output}", {**settings, "rows": rows}))


if __name__ == "__main__":
    main()
