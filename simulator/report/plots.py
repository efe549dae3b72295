"""Which plots belong to a comparison, how each is read, and their files.

Owns their order, names, headings and captions. The same values give the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, TypeAlias

from simulator.report.attainment import attainment_figure
from simulator.report.blocking import blocking_figure, granularity_figure
from simulator.report.canvas import PNG_DPI, WIDE_IN, theme
from simulator.report.capacity import capacity_figure
from simulator.report.distributions import ttft_figure
from simulator.report.goodput import goodput_figure
from simulator.report.timeline import timeline_figure
from simulator.report.wording import level, rate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from simulator.findings import Findings
    from simulator.report.blocking import GranularityPoint
    from simulator.report.capacity import CapacityPoint


Draw: TypeAlias = "Callable[[float], Figure]"
"""Draws a plot at a width in inches."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot of a report.

    Attributes:
        name: Of its files, without ending.
        heading: What it shows, a few words.
        caption: How it is read, a sentence or two.
    """

    name: str
    heading: str
    caption: str
    draw: Draw


def plots(findings: Findings) -> list[Plot]:
    """Those that the findings have data for, in the order of the report."""
    arms = findings.arms
    at = f"at {rate(findings.cdf_rate_rps)}"
    found = []
    if any(item.goodput_rps for item in arms):
        found.append(_goodput(findings))
    if any(item.points for item in arms):
        found.append(_attainment(findings))
    if any(values for item in arms for values in item.ttft_ms.values()):
        found.append(
            Plot(
                "ttft",
                f"Time to first token {at}",
                "Each curve says which part of the requests of a kind has its first token after so long; "
                "where it crosses the vertical line is the part that is in time, so higher is better.",
                partial(_ttft, findings),
            )
        )
    if any(item.timeline for item in arms):
        found.append(
            Plot(
                "timeline",
                f"A few seconds of one replica {at}",
                "Each row is a request, from its arrival to its first token; solid is running, hatched is "
                "suspended, a coloured thin line is waiting. A cross is a deadline that is missed, and a red "
                "line how late the first token is.",
                partial(_timeline, findings),
            )
        )
    if any(item.blocking for item in arms):
        found.append(_blocking(findings))
    return found


def granularity_plot(points: Sequence[GranularityPoint]) -> Plot:
    """Blocking time against throughput, as a part of a report."""
    return Plot(
        "granularity",
        "What finer places to stop cost",
        "Each row is a way to make a running prefill stoppable; further left is a shorter wait for urgent "
        "requests, and beside it stands the throughput that it costs.",
        lambda width_in: granularity_figure(points, width_in),
    )


def capacity_plot(plan: Sequence[CapacityPoint], target: float, chosen: int | None = None) -> Plot:
    """Attainment against replicas, as a part of a report."""
    return Plot(
        "capacity",
        "How many prefill replicas it takes",
        "The first number of replicas whose line is above the target is enough for this load.",
        lambda width_in: capacity_figure(plan, target, chosen, width_in),
    )


def _goodput(findings: Findings) -> Plot:
    keys = sorted({key for item in findings.arms for key in item.goodput_rps}, key=float)
    levels = " or ".join(map(level, keys))
    return Plot(
        "goodput",
        "Goodput",
        f"The highest rate at which {levels} of all first tokens are still in time; longer is better.",
        lambda width_in: goodput_figure(findings.arms, width_in),
    )


def _attainment(findings: Findings) -> Plot:
    return Plot(
        "attainment",
        "Attainment against load",
        "Each line says which part of all first tokens is in time as more requests are offered; a ring where "
        "it meets a horizontal line is its goodput, so further right is better.",
        lambda width_in: attainment_figure(findings.arms, width_in),
    )


def _blocking(findings: Findings) -> Plot:
    return Plot(
        "blocking",
        "Blocking time",
        "How long a running pass still goes on after it was decided to stop it, on a logarithmic axis; "
        "further left is better.",
        lambda width_in: blocking_figure(findings.arms, width_in),
    )


def _ttft(findings: Findings, width_in: float) -> Figure:
    return ttft_figure(findings.arms, findings.objective_ms, width_in)


def _timeline(findings: Findings, width_in: float) -> Figure:
    return timeline_figure(findings.arms, tuple(findings.objective_ms), width_in)


@theme()
def svg_bytes(figure: Figure) -> bytes:
    """A figure as SVG, without a date, its text as outlines."""
    buffer = BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


@theme()
def png_bytes(figure: Figure) -> bytes:
    """A figure as PNG."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return buffer.getvalue()


def save(findings: Findings, directory: Path, more: Sequence[Plot] = ()) -> list[Path]:
    """Write each plot as `NAME.png` and `NAME.svg` and return their paths.

    Args:
        findings: Plots that they have no data for are left out.
        directory: Made where it does not exist.
        more: Plots beyond those of the findings.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for plot in [*plots(findings), *more]:
        for ending, write in (("png", png_bytes), ("svg", svg_bytes)):
            path = directory / f"{plot.name}.{ending}"
            path.write_bytes(write(plot.draw(WIDE_IN)))
            paths.append(path)
    return paths
