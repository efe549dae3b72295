"""What finer places to stop cost, and what they save."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from simulator.report.canvas import HALO, WIDE_IN, blank, legend_below, log_axis, theme
from simulator.report.palette import INK, LEAD, arm_styles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

GranularityPoint: TypeAlias = tuple[str, float, float, float]
"""A label, mean and 99th percentile of the blocking time in milliseconds, and throughput lost in percent."""


@theme()
def granularity_figure(points: Sequence[GranularityPoint], width_in: float = WIDE_IN) -> Figure:
    """Blocking time, milliseconds on a log axis, against the throughput that it costs, percent."""
    axes_in = min(4.8, width_in)
    canvas = blank(width_in, axes_in)
    axes = canvas.subplots()
    axes.set_yscale("log")
    ordered = sorted(points, key=lambda point: (point[3], -point[1]))
    costs = [cost for *_, cost in ordered]
    colour = arm_styles([LEAD])[LEAD].colour
    means = [mean for _, mean, _, _ in ordered]
    tails = [p99 for _, _, p99, _ in ordered]
    (tail,) = axes.plot(costs, tails, color="#0072b2", linestyle=(0, (5, 1.6)), marker="s", linewidth=2)
    (mean,) = axes.plot(costs, means, color=colour, marker="o", linewidth=2.6)
    for label, _, p99, cost in ordered:
        axes.annotate(
            label,
            (cost, p99),
            xytext=(6, 6),
            textcoords="offset points",
            fontsize=9.5,
            color=INK,
            path_effects=HALO,
        )
    axes.margins(x=0.12, y=0.14)
    low, high = axes.get_xlim()
    axes.set_xlim(right=high + (high - low) * (0.1 if width_in >= WIDE_IN else 0.25))
    log_axis(axes.yaxis, axes.get_ylim(), axes_in)
    axes.set_xlabel("throughput lost, %")
    axes.set_ylabel("blocking time, ms")
    legend_below(canvas, [mean, tail], ["mean", "99th percentile"])
    return canvas
