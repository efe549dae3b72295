"""The command `slackserve simulate`: its options, and what it does with them."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from deployments.options import check_directory, check_file, refuse_given, write_result, writing
from deployments.simulate import SimulateError
from simulator.findings import Findings
from simulator.study.presets import Preset

_LEVELS = ("0.90", "0.99")
_OF_PRESETS = ("preset", "trace", "operator_times", "arms", "requests", "seed", "workers")
"""What counts for nothing where a fleet of one's own is planned."""


def simulate(  # noqa: PLR0913 - each is an option of the command
    ctx: typer.Context,
    preset: Annotated[
        str, typer.Argument(help="flowprefill-8b, -14b, -70b, blog-70b or tiers-70b.")
    ] = "flowprefill-8b",
    *,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file of your own fleet: how many replicas does it need?")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Instead of the mix of a flowprefill preset: Mooncake .jsonl or Azure .csv."),
    ] = None,
    operator_times: Annotated[
        Path | None, typer.Option(help="Measured operators (Vidur's columns) instead of the built-in lines.")
    ] = None,
    arms: Annotated[
        str | None, typer.Option(help="Of the preset's arms only these, comma-separated.")
    ] = None,
    requests: Annotated[int, typer.Option(min=100, help="Requests of each of the two streams.")] = 3000,
    seed: Annotated[int, typer.Option(help="Everything random follows from it.")] = 1,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one per core by default.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all results here.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write plots (PNG, SVG) and report.html into this directory.")
    ] = None,
) -> None:
    """Compare schedulers in virtual time, with the code that serves; needs no accelerator."""
    from simulator.study.study import Study  # noqa: PLC0415 - only when asked for

    console = Console()
    check_file("--json", json_file, SimulateError)
    check_directory("--report", report, SimulateError)
    if config is not None:
        refuse_given(ctx, _OF_PRESETS, "with --config", SimulateError)
        from deployments.simulate.capacity_plan import make_plan  # noqa: PLC0415 - imports matplotlib

        make_plan(config, console, json_file, report)
        return
    chosen = _preset(preset, trace, operator_times)
    names = _arms(chosen, arms)
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=None)
        study = Study(chosen, names, requests, seed, workers)
        found = study.findings(
            shlex.join(["slackserve", *sys.argv[1:]]),
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    _show(found, console)
    if json_file is not None:
        document = json.dumps(found.document(), indent=1, allow_nan=False)
        write_result("--json", json_file, document + "\n", SimulateError)
        console.print(Text(f"written to {json_file}"))
    if report is not None:
        from simulator.report.page import write_report  # noqa: PLC0415 - imports matplotlib
        from simulator.report.plots import save  # noqa: PLC0415

        with writing("--report", report, SimulateError):
            save(found, report)
            written = write_report(found, report)
        console.print(Text(f"written to {written}"))


def _preset(name: str, trace: Path | None, operator_times: Path | None) -> Preset:
    from simulator.cost.operators import OperatorTableError  # noqa: PLC0415
    from simulator.study.presets import PRESETS, on_trace, with_operator_times  # noqa: PLC0415
    from simulator.workload.arrivals import TraceError  # noqa: PLC0415

    if name not in PRESETS:
        raise SimulateError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    preset = PRESETS[name]
    try:
        if operator_times is not None:
            preset = with_operator_times(preset, operator_times)
        return preset if trace is None else on_trace(preset, trace)
    except (OperatorTableError, TraceError) as error:
        raise SimulateError(str(error)) from None


def _arms(preset: Preset, asked: str | None) -> list[str]:
    if asked is None:
        return list(preset.arms)
    names = [name.strip() for name in asked.split(",")]
    for name in names:
        if name not in preset.arms:
            raise SimulateError(f"--arms: {preset.name} has no arm {name!r}; it has {', '.join(preset.arms)}")
    return names


def _show(found: Findings, console: Console) -> None:
    table = Table(
        title=Text(found.title), caption=Text(f"seed {found.seed}, {found.requests} requests a stream")
    )
    for heading in ("", "90 % in time", "", "99 % in time", "", "blocking mean", "p99", "stops a request"):
        table.add_column(heading, justify="left" if not heading and not table.columns else "right")
    first = found.arms[0].goodput_rps
    for arm in found.arms:
        cells = []
        for level in _LEVELS:
            rate = arm.goodput_rps[level]
            cells += [f"{rate:.2f}/s", f"{rate / first[level]:.2f}x" if first[level] else "-"]
        blocking = arm.blocking
        cells += ["-", "-"] if blocking is None else [f"{blocking.mean:.1f} ms", f"{blocking.p99:.1f} ms"]
        at = min(arm.points, key=lambda point: abs(point.rate_rps - arm.goodput_rps["0.90"]))
        table.add_row(arm.title, *cells, f"{at.preemptions:.2f}")
    console.print(table)
    rates = {point.rate_rps for arm in found.arms for point in arm.points}
    common = sorted(
        rate for rate in rates if all(any(p.rate_rps == rate for p in a.points) for a in found.arms)
    )
    shown = Table(title="in time, by kind")
    shown.add_column("")
    for rate in common:
        shown.add_column(f"{rate:.2f}/s", justify="right")
    for arm in found.arms:
        by_rate = {point.rate_rps: point for point in arm.points}
        for kind in by_rate[common[0]].by_kind if common else ():
            cells = [f"{by_rate[rate].by_kind[kind]:.1%}" for rate in common]
            shown.add_row(f"{arm.title}: {kind}", *cells)
    if common:
        console.print(shown)
