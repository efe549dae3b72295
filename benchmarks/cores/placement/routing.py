"""Placement policies against each other on eight prefill replicas in virtual time.

Every policy sees the same streams: the QwenTrace-like mix, and a recorded trace with its prefixes if one is
given, once with the router's refusals of what cannot be in time and once with nobody refused. Decoding and
transfers take no time, so that the first token is there when its prefill ends. Ratios are of the same
streams. Prints tables, writes results/cores/routing.json and docs/img/routing.svg; with `--bound` only what
no policy can do better than, to results/cores/routing_bound.json:

    python -m benchmarks.cores.placement.routing [--seeds 6] [--trace mooncake_conversation.jsonl] [--bound]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.report import print_rows, write
from router.placement.registry import POLICIES
from simulator.arms.arms import ARMS
from simulator.cost.decode_steps import INSTANT_DECODE
from simulator.fleet.fleet import simulate
from simulator.fleet.setup import FleetSetup
from simulator.report.canvas import blank, theme
from simulator.study.goodput import Experiment
from simulator.study.least_work import least_works
from simulator.study.presets import PRESETS, Preset, on_trace
from simulator.workload.arrivals import Arrival
from slo.predict.handoff import INSTANT_LINK

PRESET: Final = "flowprefill-8b"
REPLICAS: Final = 8
REQUESTS: Final = 2000
SEEDS: Final = 6
LEVEL: Final = 0.9
LOADS: Final = (0.6, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.6, 2.0, 2.4, 2.8)
"""Work offered per second and replica, nothing cached. Goodput is read between them."""
SHOWN: Final = LOADS[:6]
LEAD: Final = "least_harm"
BASE: Final = "round_robin"
REFUSES: Final = {"refusals": True, "nobody refused": False}
BOUND: Final = "no policy can do better"
LOOKS: Final = (
    ("#d55e00", "-", "o"),
    ("#3d4852", ":", "x"),
    ("#0072b2", "--", "s"),
    ("#56b4e9", ":", "^"),
    ("#009e73", "-.", "P"),
    ("#cc79a7", "--", "v"),
    ("#e69f00", "-.", "D"),
)
"""Of the policies, in their order: Okabe and Ito's colours; dash and marker tell the same."""
BOUND_LOOK: Final = ("#999999", "-", "")


@dataclass(frozen=True, slots=True)
class PlacementPoint:
    """A policy under one load.

    Attributes:
        refused: Fraction of the requests that was refused.
        utilisation: Busy fraction of the replicas until the last prefill ended.
        cached: Fraction of the prompt tokens that prefix caches held.
    """

    load: float
    attainment: float
    refused: float
    utilisation: float
    cached: float


@dataclass(frozen=True, slots=True)
class Asked:
    """What all policies are asked.

    Attributes:
        refuses: Whether the router refuses what no replica can have in time.
    """

    preset: Preset
    requests: int
    seed: int
    refuses: bool = True


def stream_of(asked: Asked, load: float) -> list[Arrival]:
    """The requests at a load."""
    preset = asked.preset
    experiment = Experiment(preset.hardware, preset.workload, asked.requests, (asked.seed,))
    return preset.workload.stream(load * experiment.capacity_rps() * REPLICAS, asked.requests, asked.seed)


def fleet_of(asked: Asked, policy: str) -> FleetSetup:
    """The replicas, and a router that places by a policy."""
    setup = FleetSetup(
        ARMS["slackserve"],
        asked.preset.hardware,
        REPLICAS,
        decode=INSTANT_DECODE,
        link=INSTANT_LINK,
        placement=policy,
        handoff_s=0.0,
    )
    return setup if asked.refuses else setup.taking_all()


def _run(asked: Asked, policy: str, load: float) -> PlacementPoint:
    served = simulate(fleet_of(asked, policy), stream_of(asked, load))
    jobs = [job for job in served.jobs if job.is_finished()]
    tokens = sum(job.num_tokens for job in jobs)
    cached = sum(job.hit_tokens for job in jobs) / tokens if tokens else 0
    return PlacementPoint(load, served.attainment, served.refused, served.prefill_utilisation, cached)


def _curve(asked: Asked, policy: str) -> list[PlacementPoint]:
    """Deep overload takes longest and says least: behind those shown, a curve ends below the level."""
    points: list[PlacementPoint] = []
    for load in LOADS:
        points.append(_run(asked, policy, load))
        if load > SHOWN[-1] and points[-1].attainment < LEVEL:
            break
    return points


def _bound(asked: Asked, load: float) -> PlacementPoint:
    """No policy can do better: the least work first, until all time until the last deadline is used up.

    A prompt is the work that it adds to a large pass. Prefixes are taken for cached everywhere once they have
    been seen; cached tokens are taken for no work.
    """
    arrivals = stream_of(asked, load)
    works = least_works(asked.preset.hardware.cost, arrivals)
    room_s = REPLICAS * max(arrival.at_s + (arrival.ttft_s or 0.0) for arrival in arrivals)
    met = np.searchsorted(np.cumsum(sorted(works)), room_s, side="right")
    return PlacementPoint(load, float(met) / len(works), 0.0, 1.0, 0.0)


def long_run_load(asked: Asked) -> float:
    """The load at which `LEVEL` of an endless stream's requests, those with the least work, take all time."""
    arrivals = stream_of(asked, 1.0)
    works = sorted(least_works(asked.preset.hardware.cost, arrivals))
    alone_s = sum(asked.preset.hardware.cost.prefill_s(arrival.tokens) for arrival in arrivals)
    return alone_s / sum(works[: round(LEVEL * len(works))])


def goodput(points: Sequence[PlacementPoint]) -> float | None:
    """The load at which attainment falls through the level, read between points; None if it never does."""
    for before, after in pairwise(points):
        if before.attainment >= LEVEL > after.attainment:
            part = (before.attainment - LEVEL) / (before.attainment - after.attainment)
            return before.load + part * (after.load - before.load)
    return None if points[-1].attainment >= LEVEL else 0.0


def _mean(curves: Sequence[Sequence[PlacementPoint]]) -> list[PlacementPoint]:
    """The mean over streams at each load that all of them have."""
    return [
        PlacementPoint(*np.mean([astuple(each) for each in at], axis=0).tolist())
        for at in zip(*curves, strict=False)
    ]


def summary(by_policy: dict[str, list[list[PlacementPoint]]]) -> list[dict[str, Any]]:
    """By policy: the mean curve, the mean goodput, and its ratio to round robin on the same streams."""
    base = [goodput(points) for points in by_policy[BASE]]
    rows = []
    for policy, curves in by_policy.items():
        found = [goodput(points) for points in curves]
        ratios = [mine / theirs for mine, theirs in zip(found, base, strict=True) if mine and theirs]
        is_known = None not in found
        rows.append(
            {
                "policy": policy,
                "points": [asdict(point) for point in _mean(curves)],
                "goodput_load": float(np.mean([each or 0.0 for each in found])) if is_known else None,
                "ratio": [float(np.mean(ratios)), min(ratios), max(ratios)] if is_known and ratios else None,
            }
        )
    return rows


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """One table."""
    shown = []
    for row in rows:
        cells = {
            f"{p['load']:g}": f"{100 * p['attainment']:.1f}" for p in row["points"] if p["load"] in SHOWN
        }
        ratio = "-" if row["ratio"] is None else "{:.2f} ({:.2f} to {:.2f})".format(*row["ratio"])
        found = "-" if row["goodput_load"] is None else row["goodput_load"]
        shown.append({"policy": row["policy"], **cells, "goodput": found, "x round robin": ratio})
    print_rows(f"{title}: % of requests in time, by load on {REPLICAS} replicas", shown)


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Attainment over load, one panel for each workload."""
    titles = {"mix": "Mixed prompts", "trace": "Recorded conversations, prefixes shared"}
    with theme():
        figure = blank(4.6 * len(found), 4.4)
        for number, (workload, rows) in enumerate(found.items(), start=1):
            axes = figure.add_subplot(1, len(found), number)
            looks = {**dict(zip(POLICIES, cycle(LOOKS), strict=False)), BOUND: BOUND_LOOK}
            for row in rows:
                policy, points = row["policy"], row["points"]
                colour, dash, marker = looks[policy]
                look: dict[str, Any] = {"color": colour, "linestyle": dash, "marker": marker}
                look |= {"linewidth": 2.6 if policy == LEAD else 1.4, "label": policy.replace("_", " ")}
                axes.plot([p["load"] for p in points], [100 * p["attainment"] for p in points], **look)
            axes.axhline(100 * LEVEL, color="#616e7c", linewidth=0.8)
            axes.set_ylim(50, 101)
            axes.set_xlabel("work offered per second and replica (s)")
            axes.set_ylabel("requests in time (%)")
            axes.set_title(titles[workload])
        handles_labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(*handles_labels, loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path)


def bounds(asked: Sequence[Asked]) -> dict[str, Any]:
    """What no policy can do better than: the mean curve, goodput by stream, and that of the long run."""
    curves = [[_bound(each, load) for load in LOADS] for each in asked]
    return {
        "points": [{"load": point.load, "attainment": point.attainment} for point in _mean(curves)],
        "goodput_load": [goodput(points) for points in curves],
        "long_run_load": [long_run_load(each) for each in asked],
    }


def main() -> None:
    """Simulate everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--bound", action="store_true")
    parser.add_argument("--plot", type=Path, default=Path("docs/img/routing.svg"))
    arguments = parser.parse_args()
    presets = {"mix": PRESETS[PRESET]}
    if arguments.trace is not None:
        presets["trace"] = on_trace(PRESETS[PRESET], arguments.trace)
    seeds = range(1, arguments.seeds + 1)
    about: dict[str, Any] = {
        "preset": PRESET,
        "replicas": REPLICAS,
        "requests": arguments.requests,
        "seeds": [*seeds],
        "level": LEVEL,
    }
    if arguments.bound:
        limits = {
            workload: bounds([Asked(preset, arguments.requests, seed) for seed in seeds])
            for workload, preset in presets.items()
        }
        print(write("cores/routing_bound", {**about, "workloads": limits}))
        return
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with ProcessPoolExecutor(arguments.workers) as pool:
        for workload, preset in presets.items():
            found[workload] = {}
            for case, refuses in REFUSES.items():
                asked = [Asked(preset, arguments.requests, seed, refuses) for seed in seeds]
                running = {
                    policy: [pool.submit(_curve, each, policy) for each in asked] for policy in POLICIES
                }
                curves = {policy: [each.result() for each in futures] for policy, futures in running.items()}
                curves[BOUND] = [[_bound(each, load) for load in LOADS] for each in asked]
                found[workload][case] = summary(curves)
                show(f"{workload}, {case}", found[workload][case])
    draw({workload: cases["refusals"] for workload, cases in found.items()}, arguments.plot)
    print(write("cores/routing", {**about, "workloads": found}))


if __name__ == "__main__":
    main()
