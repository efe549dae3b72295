"""The tables of docs/benchmarks/ that come from virtual time: presets, traces, the trade-off curve.

Traces are not part of the project; give their paths to have them simulated too. What is found of a preset is
written at once, with the commit that it was found at. `--only` keeps what the file has of the others.

    python -m benchmarks.cores.simulation [--trace mooncake_conversation.jsonl --trace
    azure_llm_2023_conv.csv]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, commit, is_dirty, print_table, result, write
from simulator.findings import Findings
from simulator.report.page import write_report
from simulator.report.plots import granularity_plot, save
from simulator.report.tables import blocking_table, goodput_table
from simulator.study.presets import PRESETS, Preset, on_trace
from simulator.study.study import Study
from simulator.study.tradeoff import tradeoff

REPORTED = "flowprefill-8b"
"""Its plots and report are written besides."""
CURVE_TOKENS = 8192
NAME = "cores/simulation"
SUMMARY = ("goodput_rps", "blocking_ms", "objective_ms", "cdf_rate_rps", "assumptions", "seed", "requests")


def summary(found: Findings) -> dict[str, Any]:
    """What of the findings is kept: distributions and timelines are drawn, and can be simulated again."""
    document = found.document()
    return {
        **{name: document[name] for name in SUMMARY},
        "points": {arm.arm: [asdict(point) for point in arm.points] for arm in found.arms},
    }


def show(found: Findings, took_s: float) -> None:
    """Goodput of each arm beside its first arm's, and how long its stops took."""
    for title, table in (
        (f"{found.title} ({took_s:.0f} s)", goodput_table(found)),
        ("blocking", blocking_table(found)),
    ):
        print_table(title, ["arm", *table.columns], [[row.title, *row.cells] for row in table.rows])


def main() -> None:
    """Simulate everything and write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", default=[])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--output", type=Path, default=RESULTS / "cores" / "simulation")
    arguments = parser.parse_args()
    presets: list[Preset] = [*PRESETS.values()]
    presets += [on_trace(PRESETS[REPORTED], path) for path in arguments.trace]
    curve = tradeoff(PRESETS[REPORTED].hardware, CURVE_TOKENS)
    results: dict[str, Any] = result(NAME) if arguments.only else {}
    results["tradeoff"] = [place._asdict() for place in curve]
    for preset in presets:
        if arguments.only and preset.name not in arguments.only:
            continue
        started_s = time.perf_counter()
        found = Study(preset, preset.arms, arguments.requests).findings(f"slackserve simulate {preset.name}")
        results[preset.name] = {**summary(found), "commit": commit(), "dirty": is_dirty()}
        print(write(NAME, results))
        show(found, time.perf_counter() - started_s)
        if preset.name == REPORTED:
            save(found, arguments.output, [granularity_plot(curve)])
            write_report(found, arguments.output, [granularity_plot(curve)])


if __name__ == "__main__":
    main()
