"""Which plots belong to a comparison, how each is read, and their files.

Owns their order, names, headings and captions. The same values give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from simulator.findings import Findings
from simulator.report.bars import GranularityPoint, blocking_figure, goodput_figure, granularity_figure
from simulator.report.canvas import PNG_DPI, WIDE_IN, theme
from simulator.report.curves import CapacityPoint, attainment_figure, capacity_figure, ttft_figure
from simulator.report.tables import goodput_levels
from simulator.report.timeline import timeline_figure
from simulator.report.wording import level, rate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot of a report.

    Attributes:
        name: Of its files, without ending.
        heading: What it shows, a few words.
        caption: How it is read, a sentence or two.
        draw: Draws it at a width in inches.
    """

    name: str
    heading: str
    caption: str
    draw: Callable[[float], Figure]


def plots(findings: Findings) -> list[Plot]:
    """Those that the findings have data for, in the order of the report."""
    arms = findings.arms
    at = f"at {rate(findings.cdf_rate_rps)}"
    levels = " or ".join(map(level, goodput_levels(arms)))
    has_data = {
        "goodput": any(item.goodput_rps for item in arms),
        "attainment": any(item.points for item in arms),
        "ttft": any(values for item in arms for values in item.ttft_ms.values()),
        "timeline": any(item.timeline for item in arms),
        "blocking": any(item.blocking for item in arms),
    }
    candidates = (
        Plot(
            "goodput",
            "Goodput",
            f"The highest rate at which {levels} of all first tokens are still in time; longer is better.",
            partial(goodput_figure, arms),
        ),
        Plot(
            "attainment",
            "Attainment against load",
            "Each line says which part of all first tokens is in time as more requests are offered; a ring "
            "where it meets a horizontal line is its goodput, so further right is better.",
            partial(attainment_figure, arms),
        ),
        Plot(
            "ttft",
            f"Time to first token {at}",
            "Each curve says which part of the requests of a kind has its first token after so long; "
            "where it crosses the vertical line is the part that is in time, so higher is better.",
            partial(ttft_figure, arms, findings.objective_ms),
        ),
        Plot(
            "timeline",
            f"A few seconds of one replica {at}",
            "Each row is a request, from its arrival to its first token; solid is running, hatched is "
            "suspended, a coloured thin line is waiting. A cross is a deadline that is missed, and a red "
            "line how late the first token is.",
            partial(timeline_figure, arms, tuple(findings.objective_ms)),
        ),
        Plot(
            "blocking",
            "Blocking time",
            "How long a running pass still goes on after it was decided to stop it, on a logarithmic axis; "
            "further left is better.",
            partial(blocking_figure, arms),
        ),
    )
    return [plot for plot in candidates if has_data[plot.name]]


def granularity_plot(points: Sequence[GranularityPoint]) -> Plot:
    """Blocking time against throughput, as a part of a report."""
    return Plot(
        "granularity",
        "What finer places to stop cost",
        "Each row is a way to make a running prefill stoppable; further left is a shorter wait for urgent "
        "requests, and beside it stands the throughput that it costs.",
        partial(granularity_figure, points),
    )


def capacity_plot(plan: Sequence[CapacityPoint], target: float, chosen: int | None = None) -> Plot:
    """Attainment against replicas, as a part of a report."""
    return Plot(
        "capacity",
        "How many prefill replicas it takes",
        "The first number of replicas whose line is above the target is enough for this load.",
        partial(capacity_figure, plan, target, chosen),
    )


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
    """Write the plots that have data, and `more`, as `NAME.png` and `NAME.svg`; return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for plot in [*plots(findings), *more]:
        for ending, write in (("png", png_bytes), ("svg", svg_bytes)):
            path = directory / f"{plot.name}.{ending}"
            path.write_bytes(write(plot.draw(WIDE_IN)))
            paths.append(path)
    return paths
