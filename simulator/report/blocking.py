"""How long a pass goes on after it was decided to stop it, by arm, and by where it can stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from simulator.report.canvas import (
    GRID,
    HALO,
    INK,
    LEAD,
    MUTED,
    WIDE_IN,
    arm_styles,
    blank,
    faded,
    fitted,
    legend_below,
    legend_height_in,
    log_axis,
    only_vertical_grid,
    theme,
)
from simulator.report.wording import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from simulator.findings import ArmFindings, Blocking


_ROW_IN: Final = 0.74
_TALL_ROW_IN: Final = 1.05
_NUMBERS_IN: Final = 2.7
_FADE: Final = 0.55
_LEAST_MS: Final = 0.01
"""What a logarithmic axis shows of times that are shorter."""
_LABELS: Final = ("mean", "median", "median to 99th percentile", "up to the longest")


@theme()
def blocking_figure(arms: Sequence[ArmFindings], width_in: float = WIDE_IN) -> Figure:
    """A row per arm that ever stopped a pass: milliseconds from the decision until it stood still, log."""
    styles = arm_styles(item.arm for item in arms)
    stopping = [(item, item.blocking) for item in arms if item.blocking is not None]
    row_in = _ROW_IN if width_in >= WIDE_IN else _TALL_ROW_IN
    canvas = blank(width_in, len(stopping) * row_in + 0.75 + legend_height_in(_LABELS, width_in))
    axes = canvas.subplots()
    axes.set_xscale("log")
    for row, (item, blocking) in enumerate(stopping):
        _row(axes, row * row_in, blocking, styles[item.arm].colour)
        _names(axes, row * row_in, (item, blocking), width_in)
    only_vertical_grid(axes)
    axes.set_ylim(len(stopping) * row_in, 0)
    axes.set_xlabel("blocking time, ms")
    log_axis(axes.xaxis, axes.get_xlim(), width_in)
    legend_below(canvas, _handles(), _LABELS)
    return canvas


def _row(axes: Axes, top: float, blocking: Blocking, colour: str) -> None:
    middle = top + 0.5
    p50, p99, longest, mean = (
        max(value, _LEAST_MS) for value in (blocking.p50, blocking.p99, blocking.max, blocking.mean)
    )
    axes.plot([p50, p99], [middle, middle], color=faded(colour, _FADE), linewidth=11, solid_capstyle="butt")
    axes.plot([p50, longest], [middle, middle], color=colour, linewidth=1.6, solid_capstyle="butt")
    axes.plot([p50], [middle], color=colour, marker="|", markersize=17, markeredgewidth=3)
    axes.plot([mean], [middle], color="white", marker="D", markersize=7, markeredgecolor=INK, zorder=5)


def _names(axes: Axes, top: float, of: tuple[ArmFindings, Blocking], width_in: float) -> None:
    item, blocking = of
    numbers = f"mean {number(blocking.mean)} · p50 {number(blocking.p50)} · p99 {number(blocking.p99)} ms"
    across = axes.get_yaxis_transform()
    is_room = width_in >= WIDE_IN
    name = fitted(item.title, width_in if not is_room else width_in - _NUMBERS_IN)
    weight = "bold" if item.arm == LEAD else "normal"
    axes.text(0.004, top + 0.17, name, transform=across, va="center", weight=weight, in_layout=False)
    axes.annotate(
        numbers,
        (1, top + 0.17) if is_room else (0.004, top + 0.78),
        xycoords=across,
        ha="right" if is_room else "left",
        va="center",
        fontsize=9.5,
        color=INK,
    )


def _handles() -> list[Line2D | Patch]:
    return [
        Line2D([], [], linestyle="", marker="D", markersize=7, color="white", markeredgecolor=INK),
        Line2D([], [], linestyle="", marker="|", markersize=13, markeredgewidth=3, color=MUTED),
        Patch(color=faded(MUTED, _FADE)),
        Line2D([], [], linewidth=1.6, color=MUTED),
    ]


_PLACE_IN: Final = 0.34
_FRAME_IN: Final = 1.1
_NOTHING: Final = 0.05
"""Percent; less is written as nothing."""
GranularityPoint: TypeAlias = tuple[str, float, float, float]
"""A label, mean and 99th percentile of the blocking time in milliseconds, and the cost in percent."""


@theme()
def granularity_figure(points: Sequence[GranularityPoint], width_in: float = WIDE_IN) -> Figure:
    """One row per place: mean and 99th percentile on a log axis in milliseconds, and beside them its cost."""
    rows = sorted(points, key=lambda point: -point[1])
    is_wide = width_in >= WIDE_IN
    canvas = blank(width_in, _FRAME_IN + (_PLACE_IN if is_wide else 1.5 * _PLACE_IN) * len(rows))
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
