"""`slackserve simulate --config`: how many replicas a fleet needs for its load and objectives."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deployments.options import write_result, writing
from deployments.simulate import SimulateError
from simulator.planning.files import load_fleet
from simulator.planning.plan import CapacityPlan, plan
from simulator.report.plots import capacity_plot, png_bytes, svg_bytes
from slo.files.strict_yaml import FleetConfigError

_PLOT_IN = 9.2


def make_plan(config: Path, console: Console, json_file: Path | None, report: Path | None) -> None:
    """Plan the fleet in a file, print the plan, and write what was asked for."""
    try:
        fleet = load_fleet(config)
        setup, demand = fleet.setup(), fleet.demand()
    except FleetConfigError as error:
        raise SimulateError(str(error)) from None
    with Console(stderr=True).status("simulating") as status:
        found = plan(setup, demand, lambda replicas: status.update(f"simulated {replicas} prefill replicas"))
    _show(found, console)
    if json_file is not None:
        document = json.dumps(found.document(), indent=1, allow_nan=False)
        write_result("--json", json_file, document + "\n", SimulateError)
        console.print(Text(f"written to {json_file}"))
    if report is not None:
        figure = capacity_plot(found.capacity_points, found.target, found.chosen).draw(_PLOT_IN)
        with writing("--report", report, SimulateError):
            (report / "capacity.png").write_bytes(png_bytes(figure))
            (report / "capacity.svg").write_bytes(svg_bytes(figure))
        console.print(Text(f"written to {report / 'capacity.png'}"))


def _show(found: CapacityPlan, console: Console) -> None:
    tiers = list(found.points[0].by_tier)
    title = f"{found.arm}, {found.rate_rps:g} requests/s, {found.target:.0%} of each tier in time"
    if (lost := found.outage) is not None:
        title += f", {lost.replicas} prefill replicas lost from {lost.at_s:g} to {lost.at_s + lost.for_s:g} s"
    table = Table(title=title)
    for heading in ("prefill replicas", "in time", *tiers, "refused", "busy", "queue"):
        table.add_column(heading, justify="right")
    for point in found.points:
        shares = [f"{point.by_tier[tier]:.1%}" for tier in tiers]
        row = (str(point.replicas), f"{point.attainment:.1%}", *shares, f"{point.refused:.1%}")
        style = "bold" if point.replicas == found.chosen else None
        queue = "keeps up" if point.keeps_up else "grows"
        table.add_row(*row, f"{point.utilisation:.0%}", queue, style=style)
    console.print(table)
    if found.chosen is None or found.decode_replicas is None:
        tier, why = "prefill" if found.chosen is None else "decode", ": some requests cannot be met alone."
        if found.chosen is None and lost is not None:
            why = " with this outage: plan without it to see whether any does at all."
        console.print(f"No number of {tier} replicas keeps these objectives{why}")
        return
    console.print(
        f"{found.chosen} prefill and {found.decode_replicas} decode replicas. Prefill work alone would fill "
        f"{found.load:.1f}; decode uses {found.decode_kv_usage:.0%} of its KV memory."
    )
