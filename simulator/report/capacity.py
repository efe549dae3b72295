"""How many prefill replicas a load needs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING, TypeAlias

from matplotlib.ticker import MaxNLocator

from simulator.report.canvas import (
    INK,
    LEAD,
    WIDE_IN,
    arm_styles,
    blank,
    kind_colours,
    legend_below,
    legend_height_in,
    percent_axis,
    theme,
)
from simulator.report.wording import level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


CapacityPoint: TypeAlias = tuple[int, float, Mapping[str, float]]
"""Prefill replicas, attainment of all requests, and attainment by tier."""


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
    handles = []
    boost = arm_styles([LEAD])[LEAD]
    counts = [replicas for replicas, *_ in ordered]
    values = [attainment for _, attainment, _ in ordered]
    handles += axes.plot(counts, values, color=boost.colour, linewidth=3, marker="o", zorder=4)
    dashes = cycle([(0, (5, 1.6)), (0, (1.2, 1.4)), (0, (4, 1.4, 1.2, 1.4))])
    for (tier, colour), dash, marker in zip(kind_colours(tiers).items(), dashes, cycle("s^vD"), strict=False):
        at = [(replicas, by_tier[tier]) for replicas, _, by_tier in ordered if tier in by_tier]
        handles += axes.plot(
            *zip(*at, strict=True), color=colour, linestyle=dash, marker=marker, linewidth=1.7
        )
    _target(axes, target)
    if chosen is not None:
        _chosen(axes, chosen)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    percent_axis(axes.yaxis)
    axes.set_ylim(top=1.03)
    axes.set_xlabel("prefill replicas")
    axes.set_ylabel("first tokens in time")
    legend_below(canvas, handles, labels)
    return canvas


def _target(axes: Axes, target: float) -> None:
    axes.axhline(target, color=INK, linewidth=0.9, zorder=2)
    axes.annotate(
        f"target {level(str(target))}",
        (1, target),
        xycoords=axes.get_yaxis_transform(),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=9.5,
        annotation_clip=False,
    )


def _chosen(axes: Axes, chosen: int) -> None:
    axes.axvline(chosen, color=INK, linewidth=1.1, linestyle=(0, (2, 2)), zorder=2)
    axes.annotate(
        f"{chosen} {'replica' if chosen == 1 else 'replicas'}",
        (chosen, 1),
        xycoords=axes.get_xaxis_transform(),
        xytext=(0, 4),
        textcoords="offset points",
        ha="center",
        weight="bold",
        annotation_clip=False,
    )
