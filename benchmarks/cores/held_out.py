"""Goodput of all and of the worst class, on streams that no constant and no choice was made on, in pairs.

FlowPrefill's mixes on its three models, at 90 and at 99 % in time. Every arm gets the same streams. What the
peers have to choose, chunks and joined prompts, is the best for each figure on these very streams; SlackServe
runs with its defaults. A goodput is the highest load on a grid of steps of 2 % that keeps the level, with
none of the next eight that does: attainment does not fall with each step. The ratios to it are of means over
the streams, with intervals of 95 % over the streams by Student's t, in which the step of the grid counts. A
stream whose goodput is below the lowest load that is tried has 0, and counts as that load: the mean is then a
bound. With `--sigma` the predictions of all arms are off, log-normally.

The arms of `simulator.arms.by_class` have the mix's kinds as classes, with the level that is asked for as the
target of each; to all others the requests are alike. `--beside RESULT` takes what an earlier result found on
the same streams for other arms, and for those of this run where it has found more. Each row says at which
commit its streams were last searched. With `--again` nothing is simulated, and what is made of the streams of
an earlier output is made anew, also of one of `held_out_axes`, which has the other axes and what each part of
SlackServe is worth. `held_out_further` goes on with more streams.

    python -m benchmarks.cores.held_out [--sigma 0,0.3] [--streams 20] [--model 8b] [--arm targets]
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Final

import numpy as np

from benchmarks.report import commit, print_rows, result, write, write_again, written
from simulator.arms.arm import Arm
from simulator.arms.arms import ARMS
from simulator.arms.by_class import BY_CLASS, with_classes
from simulator.cost.prediction_noise import PredictionNoise
from simulator.fleet.outcome import attainment_by, share
from simulator.replica.hardware import Hardware
from simulator.study.goodput import PRECISION, Experiment, highest
from simulator.study.presets import PRESETS
from simulator.study.run import run
from simulator.workload.arrivals import Mix

MODELS: Final = ("8b", "14b", "70b")
NAMES: Final = ("sedf-chunked", "sedf-resume", "slackserve-chunked", "slackserve")
OURS: Final = "slackserve"
FIRST_SEED: Final = 1000
"""Constants were chosen on seeds below."""
LOADS: Final = tuple(0.1 * PRECISION**number for number in range(170))
LEVELS: Final = (0.9, 0.99)
_T_975: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
"""The 97.5th percentile of Student's t, for 1 to 19 degrees of freedom."""
ALL: Final = "all"
WORST: Final = "worst class"


AHEAD: Final = ("fcfs-chunked", "sedf-chunked", "slackserve-chunked", "targets-chunked")
"""Arms without preemption, which know what they do next."""


@dataclass(frozen=True)
class Case:
    """One arm with one setting on one stream.

    Attributes:
        setting: Its place among the arm's.
        sigma: Of the predictions' error, and `bias` its median.
        scale: What the mix's objectives are multiplied by.
        charged_s: What each boundary adds to a pass of an arm of ours that can be stopped.
        launch_s: What the host takes to launch an eager pass, of the same arms.
        hidden: Part of the host's time for a pass that an arm without preemption hides, since it composes the
            next pass while one runs; what can be stopped is composed when the device is free.
    """

    model: str
    arm: str
    setting: int
    sigma: float
    seed: int
    requests: int
    bias: float = 1.0
    scale: float = 1.0
    charged_s: float = 0.0
    launch_s: float = 0.0
    hidden: float = 0.0


def arm_of(name: str) -> Arm:
    """Any arm by name."""
    return ARMS[name] if name in ARMS else BY_CLASS[name]


def offered(case: Case, level: float) -> tuple[Hardware, Mix]:
    """The replica and the mix, for an arm that aims at `level`, if it aims."""
    preset = PRESETS[f"flowprefill-{case.model}"]
    replica, mix = preset.hardware, preset.workload
    assert isinstance(mix, Mix)
    if case.sigma > 0 or case.bias != 1:
        replica = replace(replica, noise=PredictionNoise(case.sigma, case.bias, case.seed))
    charges = {"check_s": case.charged_s, "launch_s": case.launch_s}
    if any(charges.values()) and (case.arm == "slackserve" or case.arm in BY_CLASS):
        replica = replace(replica, cost=replace(replica.cost, **charges, _by_tokens={}))
    if case.hidden > 0 and case.arm in AHEAD:
        step_s = (1 - case.hidden) * replica.cost.step_s
        replica = replace(replica, cost=replace(replica.cost, step_s=step_s, _by_tokens={}))
    if case.scale != 1:
        kinds = {
            name: replace(kind, ttft_s=case.scale * (kind.ttft_s or 0)) for name, kind in mix.kinds.items()
        }
        mix = replace(mix, kinds=kinds)
    return with_classes(replica, mix, level) if case.arm in BY_CLASS else (replica, mix)


@cache
def capacity_rps(model: str) -> float:
    """Load 1: one prompt after the other, all the time."""
    preset = PRESETS[f"flowprefill-{model}"]
    return Experiment(preset.hardware, preset.workload, 0, (1,)).capacity_rps()


def goodputs(
    case: Case,
    whom: Sequence[str] = (ALL, WORST),
    levels: Sequence[float] = LEVELS,
    arm: Arm | None = None,
) -> dict[str, float]:
    """Requests per second by figure; 0 for never.

    `arm` is one that takes the place of the case's.
    """
    attained = attainments(case, arm_of(case.arm) if arm is None else arm)
    found = {}
    for who, level in product(whom, levels):
        good, bad = -1, len(LOADS)
        while bad - good > 1:
            middle = (good + bad) // 2
            if attained(middle, level)[who] >= level:
                good = middle
            else:
                bad = middle
        found[figure_of(who, level)] = goodput_rps(case, highest_that_attains(attained, who, level, good))
    return found


def figure_of(who: str, level: float) -> str:
    """What a goodput is called."""
    return f"{who} {level:.0%}"


def attainments(case: Case, arm: Arm) -> Callable[[int, float], Mapping[str, float]]:
    """Gives what all and the worst class attain at a place on the grid of loads, by what is aimed at."""

    @cache
    def at_target(number: int, target: float) -> Mapping[str, float]:
        replica, mix = offered(case, target)
        arrivals = mix.stream(LOADS[number] * capacity_rps(case.model), case.requests, case.seed)
        jobs = run(arm, replica, arrivals, arm.settings[case.setting]).jobs
        by_kind = attainment_by(jobs, "kind")
        return {ALL: share(job.is_on_time for job in jobs), WORST: min(by_kind.values())}

    return lambda number, level: at_target(number, level if case.arm in BY_CLASS else LEVELS[0])


def highest_that_attains(
    attained: Callable[[int, float], Mapping[str, float]], who: str, level: float, good: int
) -> int:
    """See `highest`; -1 for none."""
    return highest(good, lambda number: attained(number, level)[who] >= level, len(LOADS))


def goodput_rps(case: Case, number: int) -> float:
    """What a place on the grid of loads stands for; 0 for none."""
    return LOADS[number] * capacity_rps(case.model) if number >= 0 else 0.0


def place_of(model: str, rate_rps: float) -> int:
    """The place on the grid of loads of a goodput, or the one nearest a mean; -1 for none."""
    if rate_rps <= 0:
        return -1
    return round(math.log(rate_rps / capacity_rps(model) / LOADS[0], PRECISION))


def at_best(found: Mapping[Case, Mapping[str, float]]) -> list[dict[str, Any]]:
    """A row for each model, error, figure and arm, the arm with its best setting."""
    values: dict[tuple[str, float], dict[str, dict[str, dict[int, list[float]]]]] = {}
    for case, figures in found.items():
        group = values.setdefault((case.model, case.sigma), {})
        for figure, value in figures.items():
            by_setting = group.setdefault(figure, {}).setdefault(case.arm, {})
            by_setting.setdefault(case.setting, []).append(value)
    rows = []
    for (model, sigma), by_figure in values.items():
        for figure, by_arm in by_figure.items():
            for name, by_setting in by_arm.items():
                setting, streams = max(by_setting.items(), key=lambda item: statistics.fmean(item[1]))
                row = {"model": model, "sigma": sigma, "figure": figure, "arm": name, "commit": commit()}
                rows.append({**row, "setting": dict(arm_of(name).settings[setting]), "streams": streams})
    return rows


def against(rows: Sequence[dict[str, Any]], ours: str) -> list[dict[str, Any]]:
    """The rows with their means, one arm's over them, in pairs, and how many streams are below the loads."""
    streams = [on_grid(row["model"], row["streams"]) for row in rows]
    groups = {
        (row["model"], row["sigma"], row["figure"]): of_ours
        for row, of_ours in zip(rows, streams, strict=True)
        if row["arm"] == ours
    }
    full = []
    for row, of_row in zip(rows, streams, strict=True):
        low, ratio, high = ratio_interval(groups[row["model"], row["sigma"], row["figure"]], of_row)
        compared = {"goodput_rps": statistics.fmean(of_row), "ours over it": ratio, "low": low, "high": high}
        full.append({**row, **compared, "below": row["streams"].count(0.0)})
    return full


def on_grid(model: str, streams: Sequence[float]) -> list[float]:
    """Goodputs, with the lowest that could have been found in place of those below it."""
    least_rps = LOADS[0] * capacity_rps(model)
    return [max(least_rps, each) for each in streams]


def completed(name: str, wanted: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """These rows and those of an earlier result on the same streams; of an arm that is in both, the better.

    Raises:
        ValueError: if the streams are not the same.
    """
    earlier = written(name)
    results = earlier["results"]
    if differing := [key for key, value in wanted.items() if results[key] != value]:
        raise ValueError(f"{name} has other streams: its {', '.join(differing)} differ; give the same here")
    best = {(row["model"], row["sigma"], row["figure"], row["arm"]): row for row in rows}
    known = {place[:3] for place in best}
    for row in results["rows"]:
        place = row["model"], row["sigma"], row["figure"], row["arm"]
        if place[:3] in known and (place not in best or _mean(row) > _mean(best[place])):
            best[place] = {"commit": earlier["about"]["commit"], **row}
    return list(best.values())


def _mean(row: Mapping[str, Any]) -> float:
    return statistics.fmean(on_grid(row["model"], row["streams"]))


def compare_again(name: str, ours: str) -> None:
    """Write what is made of a result's streams by now."""
    write_again(name, "compared", {"rows": compared(result(name)["rows"], ours)})


def compared(rows: Sequence[dict[str, Any]], ours: str) -> list[dict[str, Any]]:
    """These rows, also of several axes, with one arm's over them."""
    places = [tuple(row.get(name) for name in ("model", "level", "axis", "value")) for row in rows]
    groups = {place: [row for row, its in zip(rows, places, strict=True) if its == place] for place in places}
    return [row for group in groups.values() for row in against(group, ours)]


def ratio_interval(ours: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """(lower end, ratio, upper end) of the ratio of two means over the same streams, 95 %.

    By the variance of a ratio of means (Cochran, Sampling Techniques, section 6.4) and Student's t; each
    goodput lies anywhere within its step of the grid besides.
    """
    mine, theirs = np.array([ours, other])
    ratio = mine.mean() / theirs.mean()
    count = len(mine)
    if count < 2:  # noqa: PLR2004 - a variance needs two
        return 0.0, float(ratio), math.inf
    of_streams = np.var(mine - ratio * theirs, ddof=1) / theirs.mean() ** 2
    of_grid = 2 * (ratio * (PRECISION - 1)) ** 2 / 12
    reach = _T_975[min(count, len(_T_975) + 1) - 2] * math.sqrt((of_streams + of_grid) / count)
    return float(ratio - reach), float(ratio), float(ratio + reach)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's options, by default of this process; ends it if they do not go together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, default=[])
    parser.add_argument("--arm", action="append", choices=[*ARMS, *BY_CLASS], default=[])
    parser.add_argument("--ours", help="by default slackserve, or the only arm")
    parser.add_argument("--sigma", default="0")
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--chunk", type=float, action="append", help="only this of the arms' chunk sizes")
    parser.add_argument("--beside")
    parser.add_argument("--output", default="held_out")
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args(arguments)
    options.arm = options.arm or [*NAMES]
    options.ours = options.ours or (options.arm[0] if len(options.arm) == 1 else OURS)
    if options.ours not in options.arm and options.beside is None:
        parser.error(f"--ours {options.ours} is not among the arms: {', '.join(options.arm)}")
    return options


def main() -> None:
    """Simulate everything, print a table, write JSON."""
    options = options_of()
    if options.again:
        compare_again(f"cores/{options.output}", options.ours)
        return
    cases = [
        Case(model, name, setting, float(sigma), FIRST_SEED + stream, options.requests)
        for model in options.model or MODELS
        for sigma in options.sigma.split(",")
        for name in options.arm
        for setting, values in enumerate(arm_of(name).settings)
        if options.chunk is None or values.get("chunk_tokens") in options.chunk
        for stream in range(options.streams)
    ]
    with ProcessPoolExecutor(options.processes) as pool:
        found = dict(zip(cases, pool.map(goodputs, cases, chunksize=4), strict=True))
    rows = at_best(found)
    settings = {"streams": options.streams, "requests": options.requests, "first_seed": FIRST_SEED}
    beside = {}
    if options.beside is not None:
        rows = completed(options.beside, settings, rows)
        beside = {"beside": options.beside}
    rows = against(rows, options.ours)
    shown = ["model", "sigma", "figure", "arm", "goodput_rps", "ours over it", "low", "high"]
    print_rows("requests per second", rows, {name: name for name in shown})
    print(write(f"cores/{options.output}", {**settings, **beside, "rows": rows}))


if __name__ == "__main__":
    main()
