"""Which colour, dash and marker stands for what, the same in every plot and table.

Owns the look of arms and kinds. The colours are those of Okabe and Ito for arms and of Paul Tol for kinds;
both can be told apart with any colour vision, and arms also by dash and marker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LEAD: Final = "slackserve"
REFERENCE: Final = "fcfs"

INK: Final = "#1f2933"
MUTED: Final = "#616e7c"
GRID: Final = "#e4e7eb"
MISSED: Final = "#c81e1e"

Dash: TypeAlias = "str | tuple[int, tuple[float, ...]]"


@dataclass(frozen=True, slots=True)
class ArmStyle:
    """How an arm is drawn; the lead is thicker and lies on top."""

    colour: str
    dash: Dash
    marker: str
    width: float = 1.7
    layer: float = 3.0


_LEAD_STYLE: Final = ArmStyle("#d55e00", "-", "o", width=3.0, layer=4.0)
_KNOWN: Final[Mapping[str, ArmStyle]] = {
    LEAD: _LEAD_STYLE,
    "fcfs": ArmStyle("#3d4852", (0, (1.2, 1.4)), "s"),
    "fcfs-chunked": ArmStyle("#9aa5b1", (0, (5, 1.6)), "D"),
    "sedf": ArmStyle("#56b4e9", (0, (4, 1.4, 1.2, 1.4)), "^"),
    "sedf-chunked": ArmStyle("#0072b2", (0, (6, 1.6)), "v"),
    "sedf-recompute": ArmStyle("#cc79a7", (0, (2.4, 1.4)), "P"),
    "sedf-resume": ArmStyle("#009e73", (0, (7, 1.4, 1.2, 1.4)), "X"),
}
_SPARE: Final = (
    ArmStyle("#e69f00", "-", "<"),
    ArmStyle("#882255", (0, (3, 1.4)), ">"),
    ArmStyle("#332288", (0, (1.2, 1.4)), "h"),
    ArmStyle("#999933", (0, (5, 1.4, 1.2, 1.4)), "p"),
)
_KINDS: Final = ("#4477aa", "#ccbb44", "#228833", "#aa3377", "#66ccee", "#8c8c8c")


def arm_styles(arms: Iterable[str]) -> dict[str, ArmStyle]:
    """By name. Arms that are not known by name share the spare styles in their order."""
    styles: dict[str, ArmStyle] = {}
    spare = 0
    for arm in arms:
        if arm in styles:
            continue
        if arm in _KNOWN:
            styles[arm] = _KNOWN[arm]
        else:
            styles[arm] = _SPARE[spare % len(_SPARE)]
            spare += 1
    return styles


def faded(colour: str, strength: float) -> str:
    """A colour mixed with white, so that nothing shows through."""
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * strength):02x}" for part in parts)


def kind_colours(kinds: Iterable[str]) -> dict[str, str]:
    """By name, in their order."""
    return {kind: _KINDS[place % len(_KINDS)] for place, kind in enumerate(dict.fromkeys(kinds))}
