"""Rows of bars and dots: goodput and blocking time by arm, and blocking time by where a pass can stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from simulator.findings import ArmFindings, Blocking
from simulator.report.canvas import (
    GRID,
    HALO,
    INK,
    LEAD,
    MUTED,
    REFERENCE,
    WIDE_IN,
    arm_styles,
    blank,
    faded,
    fitted,
    legend_below,
    legend_height_in,
    log_axis,
    note,
    only_vertical_grid,
    theme,
)
from simulator.report.tables import goodput, goodput_levels
from simulator.report.wording import level, number, ratio

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_BAR_IN: Final = 0.26
_NAME_IN: Final = 0.34
_REFERENCE_NAME: Final = 0.3
"""Part of the width for the name of what is compared with."""
_FADES: Final = (1.0, 0.5, 0.3)
"""How strong the colour is at the lowest level, the next, and so on."""

_ROW_IN: Final = 0.74
_TALL_ROW_IN: Final = 1.05
_NUMBERS_IN: Final = 2.7
_FADE: Final = 0.55
_LEAST_MS: Final = 0.01
"""What a logarithmic axis shows of times that are shorter."""
_LABELS: Final = ("mean", "median", "median to 99th percentile", "up to the longest")

_PLACE_IN: Final = 0.34
_FRAME_IN: Final = 1.1
_NOTHING: Final = 0.05
"""Percent; less is written as nothing."""
GranularityPoint: TypeAlias = tuple[str, float, float, float]
"""A label, mean and 99th percentile of the blocking time in milliseconds, and the cost in percent."""


@theme()
def goodput_figure(arms: Sequence[ArmFindings], width_in: float = WIDE_IN) -> Figure:
    """A group of bars per arm, one bar per level: requests per second, and the ratio to the reference."""
    levels = goodput_levels(arms)
    reference = next((item for item in arms if item.arm == REFERENCE), None)
    group = len(levels) * _BAR_IN + _NAME_IN
    canvas = blank(width_in, len(arms) * group + 1.2)
    axes = canvas.subplots()
    styles = arm_styles(item.arm for item in arms)
    for row, item in enumerate(arms):
        top = row * group
        weight = "bold" if item.arm == LEAD else "normal"
        name = fitted(item.title, width_in)
        axes.text(0, top + _NAME_IN / 2 + 0.04, name, va="center", weight=weight, in_layout=False)
        for place, key in enumerate(levels):
            value, middle = goodput(item, key), top + _NAME_IN + (place + 0.5) * _BAR_IN
            colour = faded(styles[item.arm].colour, _FADES[place % len(_FADES)])
            axes.barh(middle, value, height=_BAR_IN * 0.86, color=colour)
            text = _served(value, item, reference, key, width_in)
            note(axes, text, (value, middle), (5, 0), va="center", fontsize=9.5, weight=weight)
    only_vertical_grid(axes)
    longest = max((goodput(item, key) for item in arms for key in levels), default=0)
    axes.set_xlim(0, (longest or 1.0) * (1.3 if width_in >= WIDE_IN else 1.75))
    axes.set_ylim(len(arms) * group + 0.05, 0)
    axes.set_xlabel("goodput, requests/s")
    fades = [Patch(color=faded(MUTED, _FADES[place % len(_FADES)])) for place in range(len(levels))]
    legend_below(canvas, fades, [f"{level(key)} in time" for key in levels])
    return canvas


def _served(value: float, item: ArmFindings, reference: ArmFindings | None, key: str, width_in: float) -> str:
    if value <= 0:
        return "never"
    text = f"{number(value)}/s"
    if reference is None or reference is item or goodput(reference, key) <= 0:
        return text
    name = fitted(reference.title, width_in * _REFERENCE_NAME)
    return f"{text}  {ratio(value, goodput(reference, key))} {name}"


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
        _times(axes, row * row_in + 0.5, blocking, styles[item.arm].colour)
        _names(axes, row * row_in, item, blocking, width_in)
    only_vertical_grid(axes)
    axes.set_ylim(len(stopping) * row_in, 0)
    axes.set_xlabel("blocking time, ms")
    log_axis(axes.xaxis, axes.get_xlim(), width_in)
    handles: list[Artist] = [
        Line2D([], [], linestyle="", marker="D", markersize=7, color="white", markeredgecolor=INK),
        Line2D([], [], linestyle="", marker="|", markersize=13, markeredgewidth=3, color=MUTED),
        Patch(color=faded(MUTED, _FADE)),
        Line2D([], [], linewidth=1.6, color=MUTED),
    ]
    legend_below(canvas, handles, _LABELS)
    return canvas


def _times(axes: Axes, middle: float, blocking: Blocking, colour: str) -> None:
    p50, p99, longest, mean = (
        max(value, _LEAST_MS) for value in (blocking.p50, blocking.p99, blocking.max, blocking.mean)
    )
    axes.plot([p50, p99], [middle, middle], color=faded(colour, _FADE), linewidth=11, solid_capstyle="butt")
    axes.plot([p50, longest], [middle, middle], color=colour, linewidth=1.6, solid_capstyle="butt")
    axes.plot([p50], [middle], color=colour, marker="|", markersize=17, markeredgewidth=3)
    axes.plot([mean], [middle], color="white", marker="D", markersize=7, markeredgecolor=INK, zorder=5)


def _names(axes: Axes, top: float, item: ArmFindings, blocking: Blocking, width_in: float) -> None:
    numbers = f"mean {number(blocking.mean)} · p50 {number(blocking.p50)} · p99 {number(blocking.p99)} ms"
    across = axes.get_yaxis_transform()
    is_room = width_in >= WIDE_IN
    name = fitted(item.title, width_in - _NUMBERS_IN if is_room else width_in)
    weight = "bold" if item.arm == LEAD else "normal"
    axes.text(0.004, top + 0.17, name, transform=across, va="center", weight=weight, in_layout=False)
    at, side = ((1, top + 0.17), "right") if is_room else ((0.004, top + 0.78), "left")
    axes.annotate(numbers, at, xycoords=across, ha=side, va="center", fontsize=9.5, color=INK)


@theme()
def granularity_figure(points: Sequence[GranularityPoint], width_in: float = WIDE_IN) -> Figure:
    """One row per place: mean and 99th percentile on a log axis in milliseconds, and beside them its cost."""
    rows = sorted(points, key=lambda point: -point[1])
    is_wide = width_in >= WIDE_IN
    canvas = blank(width_in, _FRAME_IN + (_PLACE_IN if is_wide else 1.5 * _PLACE_IN) * len(rows))
    axes = canvas.subplots()
    axes.set_xscale("log")
    places = range(len(rows))
    means = [max(mean, _LEAST_MS) for _, mean, _, _ in rows]
    tails = [max(p99, _LEAST_MS) for _, _, p99, _ in rows]
    axes.hlines(places, means, tails, color=GRID, linewidth=3, zorder=2)
    dots: dict[str, Any] = {"linestyle": "", "zorder": 3}
    handles = [
        *axes.plot(means, places, color=arm_styles([LEAD])[LEAD].colour, marker="o", markersize=7, **dots),
        *axes.plot(tails, places, color="#0072b2", marker="s", markersize=6.5, **dots),
    ]
    for place, tail, (*_, cost) in zip(places, tails, rows, strict=True):
        text = "costs nothing" if cost < _NOTHING else f"costs {cost:.1f} %"
        note(axes, text, (tail, place), (8, 0), va="center", fontsize=9, color=MUTED, path_effects=HALO)
    axes.set_yticks([*places], [label if is_wide else label.replace(", ", ",\n") for label, *_ in rows])
    axes.set_xlim(min(means) / 1.6, max(tails) * (2.2 if is_wide else 4.0))
    axes.grid(visible=False, axis="y")
    log_axis(axes.xaxis, axes.get_xlim(), width_in * 0.6)
    axes.set_xlabel("blocking time, ms")
    legend_below(canvas, handles, ["mean", "99th percentile"])
    return canvas
