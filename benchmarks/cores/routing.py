"""Placement policies against each other on eight prefill replicas in virtual time.

Every policy sees the same streams: the QwenTrace-like mix, and a recorded trace with its prefixes if one is
given. Decoding and transfers take no time, so that the first token is there when its prefill ends. Prints
one table, writes results/routing.json and docs/img/routing.svg:

    python -m benchmarks.cores.routing [--trace mooncake_conversation.jsonl]
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.report import write
from simulator.arms.arms import ARMS
from simulator.cost.decode_steps import INSTANT_DECODE
from simulator.fleet.fleet import simulate
from simulator.fleet.setup import FleetSetup
from simulator.report.canvas import blank, theme
from simulator.study.goodput import Experiment
from simulator.study.presets import PRESETS, on_trace
from slo.predict.handoff import INSTANT_LINK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulator.study.presets import Preset
    from simulator.workload.arrivals import Arrival

PRESET: Final = "flowprefill-8b"
REPLICAS: Final = 8
REQUESTS: Final = 2000
SEED: Final = 1
LEVEL: Final = 0.9
LOADS: Final = (0.6, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.6, 2.0, 2.4)
"""Work offered per second and replica, nothing cached. Goodput is read between them."""
SHOWN: Final = LOADS[:6]
LEAD: Final = "least_harm"
BOUND: Final = "no policy can do better"
POLICIES: Final = (
    LEAD,
    "least_outstanding_tokens",
    "power_of_two_choices",
    "round_robin",
    "prefix_affinity",
)
LOOKS: Final = (
    ("#d55e00", "-", "o"),
    ("#0072b2", "--", "s"),
    ("#56b4e9", ":", "^"),
    ("#3d4852", ":", "x"),
    ("#009e73", "-.", "P"),
)
"""Okabe and Ito's colours; dash and marker tell the same."""


@dataclass(frozen=True, slots=True)
class RoutingCase:
    """One policy under one load."""

    workload: str
    policy: str
    load: float
    requests: int


@dataclass(frozen=True, slots=True)
class RoutingPoint:
    """What came of it.

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


_presets: dict[str, Preset] = {}


def _adopt(trace: Path | None) -> None:
    _presets["mix"] = PRESETS[PRESET]
    if trace is not None:
        _presets["trace"] = on_trace(PRESETS[PRESET], trace)


def _stream(case: RoutingCase) -> list[Arrival]:
    preset = _presets[case.workload]
    experiment = Experiment(preset.hardware, preset.workload, case.requests, (SEED,))
    return preset.workload.stream(case.load * experiment.capacity_rps() * REPLICAS, case.requests, SEED)


def _run(case: RoutingCase) -> RoutingPoint:
    arrivals = _stream(case)
    setup = FleetSetup(
        ARMS["slackserve"],
        _presets[case.workload].hardware,
        REPLICAS,
        decode=INSTANT_DECODE,
        link=INSTANT_LINK,
        placement=case.policy,
        handoff_s=0.0,
    )
    served = simulate(setup, arrivals)
    jobs = [job for job in served.jobs if job.is_finished()]
    tokens = sum(job.num_tokens for job in jobs)
    hits = sum(job.hit_tokens for job in jobs)
    return RoutingPoint(
        case.load,
        served.attainment,
        served.refused,
        served.prefill_utilisation,
        hits / tokens if tokens else 0,
    )


def _curve(workload: str, policy: str, requests: int) -> list[RoutingPoint]:
    """Deep overload takes longest and says least: behind those shown, a curve ends below the level."""
    points: list[RoutingPoint] = []
    for load in LOADS:
        points.append(_run(RoutingCase(workload, policy, load, requests)))
        if load > SHOWN[-1] and points[-1].attainment < LEVEL:
            break
    return points


def _bound(case: RoutingCase) -> RoutingPoint:
    """No policy can do better: the least work first, until all time until the last deadline is used up.

    Prefixes are taken for cached everywhere once they have been seen; cached tokens are taken for no work.
    """
    arrivals = _stream(case)
    cost = _presets[case.workload].hardware.cost
    seen: set[int] = set()
    works = []
    for arrival in arrivals:
        known = sum(1 for block in arrival.blocks if block in seen) * arrival.block_tokens
        seen.update(arrival.blocks)
        left = max(1, arrival.tokens - min(known, arrival.tokens - 1))
        works.append(cost.times([(left, arrival.tokens - left)]).total_s)
    room_s = REPLICAS * max(arrival.at_s + (arrival.ttft_s or 0.0) for arrival in arrivals)
    met = 0
    for work_s in sorted(works):
        room_s -= work_s
        if room_s < 0:
            break
        met += 1
    return RoutingPoint(case.load, met / len(works), 0.0, 1.0, 0.0)


def goodput(points: Sequence[RoutingPoint]) -> float | None:
    """The load at which attainment falls through the level, read between points; None if it never does."""
    for before, after in pairwise(points):
        if before.attainment >= LEVEL > after.attainment:
            part = (before.attainment - LEVEL) / (before.attainment - after.attainment)
            return before.load + part * (after.load - before.load)
    return None if points[-1].attainment >= LEVEL else 0.0


def show(console: Console, workload: str, curves: dict[str, list[RoutingPoint]]) -> None:
    """One table of a workload."""
    console.width = max(console.width, 110)
    table = Table(title=f"{workload}: % of requests in time, by load on {REPLICAS} replicas")
    for heading in ("policy", *(f"{load:g}" for load in SHOWN), "goodput", "x round robin"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    base = goodput(curves["round_robin"])
    for policy, points in curves.items():
        found = goodput(points)
        shown = "-" if found is None else f"{found:.2f}"
        ratio = "-" if not found or not base else f"{found / base:.2f}"
        table.add_row(policy, *(f"{100 * p.attainment:.1f}" for p in points if p.load in SHOWN), shown, ratio)
    console.print(table)


def draw(found: dict[str, dict[str, list[RoutingPoint]]], path: Path) -> None:
    """Attainment over load, one panel for each workload."""
    titles = {"mix": "Mixed prompts", "trace": "Recorded conversations, prefixes shared"}
    with theme():
        figure = blank(4.6 * len(found), 4.4)
        for number, (workload, curves) in enumerate(found.items(), start=1):
            axes = figure.add_subplot(1, len(found), number)
            for (policy, points), (colour, dash, marker) in zip(
                curves.items(), (*LOOKS, ("#999999", "-", "")), strict=True
            ):
                name = policy.replace("_", " ")
                width = 2.6 if policy == LEAD else 1.4
                loads, values = [p.load for p in points], [100 * p.attainment for p in points]
                axes.plot(
                    loads, values, color=colour, linestyle=dash, marker=marker, linewidth=width, label=name
                )
            axes.axhline(100 * LEVEL, color="#616e7c", linewidth=0.8)
            axes.set_ylim(50, 101)
            axes.set_xlabel("work offered per second and replica (s)")
            axes.set_ylabel("requests in time (%)")
            axes.set_title(titles[workload])
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path)


def main() -> None:
    """Simulate everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--plot", type=Path, default=Path("docs/img/routing.svg"))
    arguments = parser.parse_args()
    _adopt(arguments.trace)
    found: dict[str, dict[str, list[RoutingPoint]]] = {}
    with ProcessPoolExecutor(arguments.workers, initializer=_adopt, initargs=(arguments.trace,)) as pool:
        for workload in _presets:
            workloads = [workload] * len(POLICIES)
            counts = [arguments.requests] * len(POLICIES)
            curves = dict(zip(POLICIES, pool.map(_curve, workloads, POLICIES, counts), strict=True))
            curves[BOUND] = [_bound(RoutingCase(workload, BOUND, load, arguments.requests)) for load in LOADS]
            found[workload] = curves
            show(Console(), workload, curves)
    results: dict[str, Any] = {
        "preset": PRESET,
        "replicas": REPLICAS,
        "requests": arguments.requests,
        "seed": SEED,
        "level": LEVEL,
        "workloads": {
            workload: {
                policy: {"goodput_load": goodput(points), "points": [asdict(point) for point in points]}
                for policy, points in curves.items()
            }
            for workload, curves in found.items()
        },
    }
    draw(found, arguments.plot)
    print(write("routing", results))


if __name__ == "__main__":
    main()
