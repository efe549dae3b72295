"""What finer places to stop cost, and what they save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from simulator.report.canvas import HALO, WIDE_IN, blank, legend_below, log_axis, theme
from simulator.report.palette import GRID, LEAD, MUTED, arm_styles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

_ROW_IN: Final = 0.34
_FRAME_IN: Final = 1.1
_LEAST_MS: Final = 0.01
_NOTHING: Final = 0.05
"""Percent; less is written as nothing."""
GranularityPoint: TypeAlias = tuple[str, float, float, float]
"""A label, mean and 99th percentile of the blocking time in milliseconds, and throughput lost in percent."""


@theme()
def granularity_figure(points: Sequence[GranularityPoint], width_in: float = WIDE_IN) -> Figure:
    """One row per place: mean and 99th percentile on a log axis in milliseconds, and beside them its cost."""
    rows = sorted(points, key=lambda point: -point[1])
    is_wide = width_in >= WIDE_IN
    canvas = blank(width_in, _FRAME_IN + (_ROW_IN if is_wide else 1.5 * _ROW_IN) * len(rows))
    axes = canvas.subplots()
    axes.set_xscale("log")
    colour = arm_styles([LEAD])[LEAD].colour
    places = range(len(rows))
    means = [max(mean, _LEAST_MS) for _, mean, _, _ in rows]
    tails = [max(p99, _LEAST_MS) for _, _, p99, _ in rows]
    axes.hlines(places, means, tails, color=GRID, linewidth=3, zorder=2)
    (mean_dots,) = axes.plot(means, places, color=colour, linestyle="", marker="o", markersize=7, zorder=3)
    (tail_dots,) = axes.plot(
        tails, places, color="#0072b2", linestyle="", marker="s", markersize=6.5, zorder=3
    )
    for place, (_, _, p99, cost) in zip(places, rows, strict=True):
        axes.annotate(
            f"costs {_percent(cost)}",
            (max(p99, _LEAST_MS), place),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=MUTED,
            path_effects=HALO,
        )
    axes.set_yticks([*places], [label if is_wide else label.replace(", ", ",\n") for label, *_ in rows])
    axes.set_xlim(min(means) / 1.6, max(tails) * (2.2 if is_wide else 4.0))
    axes.grid(visible=False, axis="y")
    log_axis(axes.xaxis, axes.get_xlim(), width_in * 0.6)
    axes.set_xlabel("blocking time, ms")
    legend_below(canvas, [mean_dots, tail_dots], ["mean", "99th percentile"])
    return canvas


def _percent(cost: float) -> str:
    return "nothing" if cost < _NOTHING else f"{cost:.1f} %"
