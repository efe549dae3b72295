"""How many requests are in time, against how many are offered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from matplotlib.lines import Line2D

from simulator.report.canvas import (
    HALO,
    INK,
    LEAD,
    MUTED,
    WIDE_IN,
    arm_styles,
    blank,
    legend_below,
    legend_height_in,
    percent_axis,
    theme,
)
from simulator.report.wording import is_finite, level, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from simulator.findings import ArmFindings
    from simulator.report.canvas import ArmStyle


_GOODPUT_MARK = "goodput"
_FROM: Final = 0.5
"""Lines leave the plot where half of the requests are late."""


@theme()
def attainment_figure(arms: Sequence[ArmFindings], width_in: float = WIDE_IN) -> Figure:
    """One line per arm: percent of requests in time against requests offered per second.

    Levels of goodput are horizontal lines; a ring where an arm meets one is its goodput.
    """
    labels = [*(item.title for item in arms), _GOODPUT_MARK]
    canvas = blank(width_in, min(4.6, width_in) + legend_height_in(labels, width_in))
    axes = canvas.subplots()
    styles = arm_styles(item.arm for item in arms)
    levels = sorted({key for item in arms for key in item.goodput_rps}, key=float)
    handles = []
    for item in arms:
        handles.append(_line(axes, item, styles[item.arm]))
        for key in levels:
            _goodput(axes, item, key, styles[item.arm])
    _levels(axes, levels, is_wide=width_in >= WIDE_IN)
    handles.append(_ring(MUTED))
    _frame(axes, arms)
    legend_below(canvas, handles, labels)
    return canvas


def _line(axes: Axes, item: ArmFindings, style: ArmStyle) -> Line2D:
    (line,) = axes.plot(
        [point.rate_rps for point in item.points],
        [point.attainment for point in item.points],
        color=style.colour,
        linestyle=style.dash,
        linewidth=style.width,
        marker=style.marker,
        markersize=4.5,
        zorder=style.layer,
    )
    return line


def _goodput(axes: Axes, item: ArmFindings, key: str, style: ArmStyle) -> None:
    goodput = item.goodput_rps.get(key, 0.0)
    if not is_finite(goodput) or goodput <= 0:
        return
    ring = _ring(style.colour)
    ring.set_data([goodput], [float(key)])
    ring.set_zorder(style.layer + 2)
    axes.add_line(ring)
    if item.arm == LEAD:
        axes.annotate(
            f"{number(goodput)}/s",
            (goodput, float(key)),
            xytext=(9, 4),
            textcoords="offset points",
            color=style.colour,
            weight="bold",
            path_effects=HALO,
            zorder=style.layer + 2,
        )


def _ring(colour: str) -> Line2D:
    return Line2D(
        [],
        [],
        color=colour,
        linestyle="",
        marker="o",
        markersize=9,
        markerfacecolor="white",
        markeredgewidth=2.2,
    )


def _levels(axes: Axes, levels: Sequence[str], *, is_wide: bool) -> None:
    for key in levels:
        axes.axhline(float(key), color=INK, linewidth=0.9, zorder=2)
        axes.annotate(
            f"{level(key)} in time" if is_wide else level(key),
            (1, float(key)),
            xycoords=axes.get_yaxis_transform(),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            annotation_clip=False,
        )


def _frame(axes: Axes, arms: Sequence[ArmFindings]) -> None:
    rates = [point.rate_rps for item in arms for point in item.points]
    if rates and min(rates) <= max(rates) / 2:
        axes.set_xlim(left=0)
    axes.set_ylim(_FROM, 1.0 + (1.0 - _FROM) / 25)
    percent_axis(axes.yaxis)
    axes.set_xlabel("offered load, requests/s")
    axes.set_ylabel("first tokens in time")
