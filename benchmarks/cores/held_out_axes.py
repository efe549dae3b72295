"""The worst class's goodput along what the held-out comparison holds fixed, and without parts of SlackServe.

Objectives from half to twice the mix's, predictions that are off, log-normally or all in one direction, what
each boundary would cost, what a host would take to launch an eager pass, and peers that compose their passes
ahead, on held-out streams. Every other arm has at each place the setting that is best for its worst class
there, and is charged nothing. The break-even is what a boundary may cost until SlackServe is down to
suspend-and-resume, between two charges by a line.

    python -m benchmarks.cores.held_out_axes [--streams 3] [--model 8b]
    python -m benchmarks.cores.held_out_axes --model 8b --model 14b --model 70b --level 0.9 --level 0.99 \
        --axis sigma --value 0.3 --no-parts --output held_out_sigma
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

from benchmarks.cores.held_out import (
    FIRST_SEED,
    LEVELS,
    MODELS,
    WORST,
    Case,
    against,
    arm_of,
    goodputs,
)
from benchmarks.report import print_rows, write
from simulator.arms.by_class import BY_CLASS

OURS: Final = "targets"
PEER: Final = "sedf-resume"
ARMS_COMPARED: Final = (PEER, "sedf-chunked", "targets-chunked", OURS)
AXES: Final[Mapping[str, Sequence[float]]] = {
    "scale": (0.5, 1.0, 2.0),
    "sigma": (0.15, 0.3, 0.5),
    "bias": (0.7, 1.5),
    "charged_s": (20e-6, 100e-6, 400e-6),
    "launch_s": (0.030, 0.043),
    "hidden": (1.0,),
}
CHARGES: Final = ("charged_s", "launch_s")
CHUNKS: Final = (1024.0, 2048.0)
"""What takes the place of preemption is tried with both."""


def setting_of(name: str, value: float | None) -> int:
    """The place of a setting among the arm's."""
    values = [next(iter(setting.values()), None) for setting in arm_of(name).settings]
    return values.index(value)


def compared(
    cases: Mapping[str, Sequence[Sequence[Case]]], found: Mapping[Case, float], ours: str = OURS
) -> list[dict[str, Any]]:
    """A row for each arm: its mean with the setting that is best for it, and ours over it."""
    best = {
        name: max(tried, key=lambda of_setting: statistics.fmean(found[case] for case in of_setting))
        for name, tried in cases.items()
    }
    rows = [
        {
            "model": case.model,
            "sigma": case.sigma,
            "figure": WORST,
            "arm": name,
            "setting": dict(arm_of(case.arm).settings[case.setting]),
            "streams": [found[one] for one in of_setting],
        }
        for name, of_setting in best.items()
        for case in of_setting[:1]
    ]
    return against(rows, ours)


def break_even_s(charges: Sequence[tuple[float, float]]) -> float | None:
    """Where a ratio that falls with the charge is 1, by lines between (charge, ratio); None if nowhere."""
    for (low_s, above), (high_s, below) in pairwise(sorted(charges)):
        if above >= 1 > below:
            return low_s + (above - 1) / (above - below) * (high_s - low_s)
    return None


def along(base: Case, streams: int, axis: str, value: float) -> dict[str, list[list[Case]]]:
    """The cases of each arm and setting at a place on an axis; what is charged is charged to ours alone."""
    found = {}
    for name in ARMS_COMPARED:
        case = replace(base, arm=name)
        if axis not in CHARGES or name == OURS:
            case = replace(case, **{axis: value})
        settings = range(len(arm_of(name).settings))
        found[name] = [over_streams(replace(case, setting=setting), streams) for setting in settings]
    return found


def without_parts(base: Case, streams: int) -> dict[str, list[list[Case]]]:
    """The cases of SlackServe without one part each, preemption first."""
    found = {}
    for name in BY_CLASS:
        chunks = CHUNKS if name == "targets-chunked" else (None,)
        for chunk in chunks:
            case = replace(base, arm=name, setting=setting_of(name, chunk))
            title = name if chunk is None else f"{name} {chunk:.0f}"
            found[title] = [over_streams(case, streams)]
    found["slackserve"] = [over_streams(replace(base, arm="slackserve"), streams)]
    return found


def over_streams(case: Case, streams: int) -> list[Case]:
    """The same on each stream."""
    return [replace(case, seed=FIRST_SEED + stream) for stream in range(streams)]


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's options, by default of this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, default=[])
    parser.add_argument("--level", action="append", type=float, choices=LEVELS, default=[])
    parser.add_argument("--axis", action="append", choices=[*AXES], default=[])
    parser.add_argument("--value", type=float)
    parser.add_argument("--no-parts", action="store_true")
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--output", default="held_out_axes")
    return parser.parse_args(arguments)


def main() -> None:
    """Simulate everything, print tables, write JSON."""
    options = options_of()
    models, levels = options.model or MODELS[:1], options.level or [0.9]
    rows = []
    for level in levels:
        groups = {place: cases for model in models for place, cases in _places(model, options)}
        cases = sorted(
            {
                case
                for group in groups.values()
                for tried in group.values()
                for of_setting in tried
                for case in of_setting
            },
            key=repr,
        )
        with ProcessPoolExecutor(options.processes) as pool:
            figures = pool.map(partial(goodputs, whom=(WORST,), levels=(level,)), cases)
            found = {case: next(iter(one.values())) for case, one in zip(cases, figures, strict=True)}
        for (model, axis, value), group in groups.items():
            about = {"model": model, "level": level, "axis": axis, "value": value}
            rows += [{**about, **row} for row in compared(group, found)]
    results = {
        "streams": options.streams,
        "requests": options.requests,
        "first_seed": FIRST_SEED,
        "rows": rows,
        "break_even_s": {
            f"{model} {level:.0%}": charge_of(rows, model, level) for model in models for level in levels
        },
    }
    shown = ["model", "level", "axis", "value", "arm", "goodput_rps", "ours over it", "low", "high"]
    print_rows("the worst class, requests per second", rows, {name: name for name in shown})
    print(write(f"cores/{options.output}", results))


def _places(
    model: str, options: argparse.Namespace
) -> Iterator[tuple[tuple[str, str, float], dict[str, list[list[Case]]]]]:
    """What is simulated of a model: (model, axis, value), and the cases of each arm there."""
    base = Case(model, OURS, 0, 0.0, 0, options.requests)
    for axis in options.axis or AXES:
        for value in AXES[axis] if options.value is None else (options.value,):
            yield (model, axis, value), along(base, options.streams, axis, value)
    if not options.no_parts:
        yield (model, "without", 0.0), without_parts(base, options.streams)


def charge_of(rows: Sequence[Mapping[str, Any]], model: str, level: float) -> float | None:
    """The break-even of a model; None if there is none among what was charged."""
    mine = [row for row in rows if (row["model"], row["level"], row["arm"]) == (model, level, PEER)]
    free = [row["ours over it"] for row in mine if (row["axis"], row["value"]) == ("scale", 1.0)]
    charges = [(row["value"], row["ours over it"]) for row in mine if row["axis"] == "charged_s"]
    return break_even_s([*((0.0, ratio) for ratio in free), *charges])


if __name__ == "__main__":
    main()
