"""How long first tokens take, by kind of request."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from simulator.report.canvas import (
    INK,
    WIDE_IN,
    arm_styles,
    blank,
    legend_below,
    legend_height_in,
    log_axis,
    percent_axis,
    theme,
)
from simulator.report.wording import is_finite, milliseconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from simulator.findings import ArmFindings
    from simulator.report.canvas import ArmStyle


_PANEL_IN: Final = 3.0
_LEAST_MS: Final = 0.1
"""What a logarithmic axis shows of times that are shorter."""


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
    handles: dict[str, Line2D] = {}
    for axes, kind in zip(panels, kinds, strict=False):
        for item in arms:
            line = _curve(axes, item.ttft_ms.get(kind, ()), styles[item.arm])
            handles.setdefault(item.arm, line)
        _objective(axes, objective_ms.get(kind))
        _frame(axes, kind, width_in / columns)
    for axes in panels[len(kinds) :]:
        axes.set_visible(False)
    legend_below(canvas, [handles[item.arm] for item in arms if item.arm in handles], labels)
    return canvas


def _curve(axes: Axes, percentiles: Sequence[float], style: ArmStyle) -> Line2D:
    steps = max(len(percentiles) - 1, 1)
    shown = [
        (max(value, _LEAST_MS), place / steps) for place, value in enumerate(percentiles) if is_finite(value)
    ]
    (line,) = axes.plot(
        [value for value, _ in shown],
        [fraction for _, fraction in shown],
        color=style.colour,
        linestyle=style.dash,
        linewidth=style.width,
        zorder=style.layer,
    )
    return line


def _objective(axes: Axes, objective_ms: float | None) -> None:
    axes.set_xscale("log")
    if objective_ms is None or not is_finite(objective_ms) or objective_ms <= 0:
        return
    axes.axvline(objective_ms, color=INK, linewidth=1.1, zorder=2)
    low, high = axes.get_xlim()
    place = math.log(objective_ms / low) / math.log(high / low)
    axes.annotate(
        f"objective {milliseconds(objective_ms)}",
        (objective_ms, 1),
        xycoords=axes.get_xaxis_transform(),
        xytext=(0, 3),
        textcoords="offset points",
        ha="left" if place < 0.3 else "right" if place > 0.7 else "center",  # noqa: PLR2004 - stays in its panel
        fontsize=9,
        annotation_clip=False,
    )


def _frame(axes: Axes, kind: str, panel_in: float) -> None:
    axes.set_title(kind, pad=20)
    axes.set_ylim(0, 1.02)
    percent_axis(axes.yaxis)
    axes.tick_params(labelleft=True)
    axes.set_xlabel("time to first token, ms")
    log_axis(axes.xaxis, axes.get_xlim(), panel_in)
