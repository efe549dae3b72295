"""Curves of the requests in time: against load, against replicas, and against the time to first token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Final, TypeAlias

from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from simulator.findings import ArmFindings
from simulator.report.canvas import (
    HALO,
    INK,
    LEAD,
    MUTED,
    WIDE_IN,
    arm_styles,
    blank,
    kind_colours,
    legend_below,
    legend_height_in,
    log_axis,
    note,
    percent_axis,
    theme,
)
from simulator.report.tables import goodput, goodput_levels
from simulator.report.wording import is_finite, level, milliseconds, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_FROM: Final = 0.5
"""Lines leave the plot where half of the requests are late."""
_PANEL_IN: Final = 3.0
_LEAST_MS: Final = 0.1
"""What a logarithmic axis shows of times that are shorter."""

CapacityPoint: TypeAlias = tuple[int, float, Mapping[str, float]]
"""Prefill replicas, attainment of all requests, and attainment by tier."""


@theme()
def attainment_figure(arms: Sequence[ArmFindings], width_in: float = WIDE_IN) -> Figure:
    """One line per arm: percent of requests in time against requests offered per second.

    Levels of goodput are horizontal lines; a ring where an arm meets one is its goodput.
    """
    labels = [*(item.title for item in arms), "goodput"]
    canvas = blank(width_in, min(4.6, width_in) + legend_height_in(labels, width_in))
    axes = canvas.subplots()
    styles = arm_styles(item.arm for item in arms)
    levels = goodput_levels(arms)
    handles: list[Line2D] = []
    for item in arms:
        style = styles[item.arm]
        rates = [point.rate_rps for point in item.points]
        attained = [point.attainment for point in item.points]
        handles += axes.plot(rates, attained, marker=style.marker, markersize=4.5, **style.line)
        for key in levels:
            if (reached_rps := goodput(item, key)) > 0:
                at = (reached_rps, float(key))
                axes.add_line(_ring(style.colour, at, style.layer + 2))
                if item.arm == LEAD:
                    text = {"color": style.colour, "weight": "bold", "zorder": style.layer + 2}
                    note(axes, f"{number(reached_rps)}/s", at, (9, 4), path_effects=HALO, **text)
    for key in levels:
        _level_line(axes, float(key), f"{level(key)} in time" if width_in >= WIDE_IN else level(key))
    handles.append(_ring(MUTED))
    rates = [point.rate_rps for item in arms for point in item.points]
    if rates and min(rates) <= max(rates) / 2:
        axes.set_xlim(left=0)
    axes.set_ylim(_FROM, 1.0 + (1.0 - _FROM) / 25)
    percent_axis(axes.yaxis)
    axes.set_xlabel("offered load, requests/s")
    axes.set_ylabel("first tokens in time")
    legend_below(canvas, handles, labels)
    return canvas


def _ring(colour: str, at: tuple[float, float] | None = None, layer: float = 2.0) -> Line2D:
    ring = Line2D([], [], color=colour, linestyle="", marker="o", markersize=9, zorder=layer)
    ring.set(markerfacecolor="white", markeredgewidth=2.2)
    if at is not None:
        ring.set_data([at[0]], [at[1]])
    return ring


def _level_line(axes: Axes, fraction: float, name: str) -> None:
    axes.axhline(fraction, color=INK, linewidth=0.9, zorder=2)
    right = axes.get_yaxis_transform()
    note(axes, name, (1, fraction), (6, 0), xycoords=right, va="center", fontsize=9.5, annotation_clip=False)


@theme()
def ttft_figure(
    arms: Sequence[ArmFindings], objective_ms: Mapping[str, float | None], width_in: float = WIDE_IN
) -> Figure:
    """One panel per kind: fraction of requests whose first token took at most so long, milliseconds, log."""
    kinds = list(dict.fromkeys([*objective_ms, *(kind for item in arms for kind in item.ttft_ms)]))
    kinds = [kind for kind in kinds if any(item.ttft_ms.get(kind) for item in arms)]
    columns = max(1, min(len(kinds), int(width_in / _PANEL_IN)))
    if len(kinds) == columns + 1 and columns > 2:  # noqa: PLR2004 - two rows of two rather than three and one
        columns = -(-len(kinds) // 2)
    rows = max(1, math.ceil(len(kinds) / columns))
    labels = [item.title for item in arms]
    canvas = blank(width_in, rows * _PANEL_IN + legend_height_in(labels, width_in))
    panels = canvas.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    styles = arm_styles(item.arm for item in arms)
    handles: list[Line2D] = []
    for axes, kind in zip(panels, kinds, strict=False):
        handles = []
        for item in arms:
            values = item.ttft_ms.get(kind, ())
            steps = max(len(values) - 1, 1)
            shown = [(max(ms, _LEAST_MS), place / steps) for place, ms in enumerate(values) if is_finite(ms)]
            handles += axes.plot(
                [ms for ms, _ in shown], [fraction for _, fraction in shown], **styles[item.arm].line
            )
        _objective(axes, objective_ms.get(kind))
        axes.set_title(kind, pad=20)
        axes.set_ylim(0, 1.02)
        percent_axis(axes.yaxis)
        axes.tick_params(labelleft=True)
        axes.set_xlabel("time to first token, ms")
        log_axis(axes.xaxis, axes.get_xlim(), width_in / columns)
    for axes in panels[len(kinds) :]:
        axes.set_visible(False)
    legend_below(canvas, handles, labels)
    return canvas


def _objective(axes: Axes, objective_ms: float | None) -> None:
    axes.set_xscale("log")
    if objective_ms is None or not is_finite(objective_ms) or objective_ms <= 0:
        return
    axes.axvline(objective_ms, color=INK, linewidth=1.1, zorder=2)
    low, high = axes.get_xlim()
    place = math.log(objective_ms / low) / math.log(high / low)
    side = "left" if place < 0.3 else "right" if place > 0.7 else "center"  # noqa: PLR2004 - stays in its panel
    top = axes.get_xaxis_transform()
    text = f"objective {milliseconds(objective_ms)}"
    note(axes, text, (objective_ms, 1), (0, 3), xycoords=top, ha=side, fontsize=9, annotation_clip=False)


@theme()
def capacity_figure(
    plan: Sequence[CapacityPoint], target: float, chosen: int | None = None, width_in: float = WIDE_IN
) -> Figure:
    """Percent of first tokens in time against prefill replicas, with the target and the number chosen."""
    ordered = sorted(plan, key=lambda point: point[0])
    tiers = list(dict.fromkeys(tier for _, _, by_tier in ordered for tier in by_tier))
    labels = ["all requests", *tiers]
    canvas = blank(width_in, min(4.4, width_in) + legend_height_in(labels, width_in))
    axes = canvas.subplots()
    counts = [replicas for replicas, *_ in ordered]
    values = [attainment for _, attainment, _ in ordered]
    colour = arm_styles([LEAD])[LEAD].colour
    handles = axes.plot(counts, values, color=colour, linewidth=3, marker="o", zorder=4)
    dashes = cycle([(0, (5, 1.6)), (0, (1.2, 1.4)), (0, (4, 1.4, 1.2, 1.4))])
    for (tier, colour), dash, marker in zip(kind_colours(tiers).items(), dashes, cycle("s^vD"), strict=False):
        at = [(replicas, by_tier[tier]) for replicas, _, by_tier in ordered if tier in by_tier]
        handles += axes.plot(
            *zip(*at, strict=True), color=colour, linestyle=dash, marker=marker, linewidth=1.7
        )
    _level_line(axes, target, f"target {level(str(target))}")
    if chosen is not None:
        axes.axvline(chosen, color=INK, linewidth=1.1, linestyle=(0, (2, 2)), zorder=2)
        top = axes.get_xaxis_transform()
        text = f"{chosen} {'replica' if chosen == 1 else 'replicas'}"
        note(axes, text, (chosen, 1), (0, 4), xycoords=top, ha="center", weight="bold", annotation_clip=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    percent_axis(axes.yaxis)
    axes.set_ylim(top=1.03)
    axes.set_xlabel("prefill replicas")
    axes.set_ylabel("first tokens in time")
    legend_below(canvas, handles, labels)
    return canvas
