"""How much each arm serves in time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from matplotlib.patches import Patch

from simulator.report.canvas import (
    LEAD,
    MUTED,
    REFERENCE,
    WIDE_IN,
    arm_styles,
    blank,
    faded,
    fitted,
    legend_below,
    only_vertical_grid,
    theme,
)
from simulator.report.tables import goodput
from simulator.report.wording import is_finite, level, number, ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from simulator.findings import ArmFindings


_BAR_IN: Final = 0.26
_NAME_IN: Final = 0.34
_REFERENCE_NAME: Final = 0.3
"""Part of the width for the name of what is compared with."""
_FADES: Final = (1.0, 0.5, 0.3)
"""How strong the colour is at the lowest level, the next, and so on."""


@theme()
def goodput_figure(arms: Sequence[ArmFindings], width_in: float = WIDE_IN) -> Figure:
    """A group of bars per arm, one bar per level: requests per second, and the ratio to the reference."""
    levels = sorted({key for item in arms for key in item.goodput_rps}, key=float)
    reference = next((item for item in arms if item.arm == REFERENCE), None)
    group = len(levels) * _BAR_IN + _NAME_IN
    canvas = blank(width_in, len(arms) * group + 1.2)
    axes = canvas.subplots()
    styles = arm_styles(item.arm for item in arms)
    top = 0.0
    for item in arms:
        _name(axes, item, top, width_in)
        for place, key in enumerate(levels):
            middle = top + _NAME_IN + (place + 0.5) * _BAR_IN
            colour = faded(styles[item.arm].colour, _FADES[place % len(_FADES)])
            _bar(axes, item, (goodput(item, key), middle, _label(item, reference, key, width_in)), colour)
        top += group
    _frame(axes, arms, top, width_in)
    fades = [Patch(color=faded(MUTED, _FADES[place % len(_FADES)])) for place in range(len(levels))]
    legend_below(canvas, fades, [f"{level(key)} in time" for key in levels])
    return canvas


def _name(axes: Axes, item: ArmFindings, top: float, width_in: float) -> None:
    axes.text(
        0,
        top + _NAME_IN / 2 + 0.04,
        fitted(item.title, width_in),
        va="center",
        weight="bold" if item.arm == LEAD else "normal",
        in_layout=False,
    )


def _label(item: ArmFindings, reference: ArmFindings | None, key: str, width_in: float) -> str:
    value = goodput(item, key)
    if value <= 0:
        return "never"
    text = f"{number(value)}/s"
    if reference is None or reference is item or goodput(reference, key) <= 0:
        return text
    name = fitted(reference.title, width_in * _REFERENCE_NAME)
    return f"{text}  {ratio(value, goodput(reference, key))} {name}"


def _bar(axes: Axes, item: ArmFindings, bar: tuple[float, float, str], colour: str) -> None:
    value, middle, text = bar
    axes.barh(middle, value, height=_BAR_IN * 0.86, color=colour)
    axes.annotate(
        text,
        (value, middle),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=9.5,
        weight="bold" if item.arm == LEAD else "normal",
    )


def _frame(axes: Axes, arms: Sequence[ArmFindings], bottom: float, width_in: float) -> None:
    only_vertical_grid(axes)
    longest = max(
        (value for item in arms for value in item.goodput_rps.values() if is_finite(value)), default=0
    )
    room = 1.3 if width_in >= WIDE_IN else 1.75
    axes.set_xlim(0, (longest or 1.0) * room)
    axes.set_ylim(bottom + 0.05, 0)
    axes.set_xlabel("goodput, requests/s")
