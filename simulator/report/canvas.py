"""A blank figure in the style of all plots, and which colour, dash and marker stands for what.

Owns fonts, sizes, axes and where legends go: below the axes, never on the data. The colours are those of
Okabe and Ito for arms and of Paul Tol for kinds; both can be told apart with any colour vision, and arms also
by dash and marker. Matplotlib's process-wide settings are changed only within `theme`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from simulator.report.wording import plain

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis


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

    @property
    def line(self) -> dict[str, Any]:
        """As Matplotlib takes it."""
        return {
            "color": self.colour,
            "linestyle": self.dash,
            "linewidth": self.width,
            "zorder": self.layer,
        }


_KNOWN: Final[Mapping[str, ArmStyle]] = {
    LEAD: ArmStyle("#d55e00", "-", "o", width=3.0, layer=4.0),
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
    spare = cycle(_SPARE)
    return {arm: _KNOWN[arm] if arm in _KNOWN else next(spare) for arm in dict.fromkeys(arms)}


def faded(colour: str, strength: float) -> str:
    """A colour mixed with white, so that nothing shows through."""
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * strength):02x}" for part in parts)


def kind_colours(kinds: Iterable[str]) -> dict[str, str]:
    """By name, in their order."""
    return {kind: _KINDS[place % len(_KINDS)] for place, kind in enumerate(dict.fromkeys(kinds))}


WIDE_IN: Final = 9.2
"""Width of a figure for a desktop, inches."""
NARROW_IN: Final = 4.1
"""Width of a figure for a phone, inches; the type is as large as in the wide one."""
PNG_DPI: Final = 160

_LABEL_CHARACTERS: Final = 40
_CHARACTER_IN: Final = 0.085
_HEADING_CHARACTER_IN: Final = 0.108
_HANDLE_IN: Final = 0.62
_LEGEND_LINE_IN: Final = 0.23
_DECADE_IN: Final = 2.2
"""Room that a decade of an axis needs for three numbers."""
_FEW_TIMES: Final = 4.0
"""An axis whose ends are closer than this is numbered evenly."""

HALO: Final = (withStroke(linewidth=3.5, foreground="white"),)
"""Keeps marks and words apart from the lines that they lie on."""

_STYLE: Final[Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelsize": 10.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9aa5b1",
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": "#9aa5b1",
    "ytick.color": "#9aa5b1",
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.handlelength": 2.6,
    "legend.columnspacing": 1.6,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "hatch.linewidth": 1.1,
    "svg.fonttype": "path",
    "svg.hashsalt": "slackserve",
}


@contextmanager
def theme() -> Iterator[None]:
    """Draw and save in our style; also a decorator."""
    with mpl.rc_context(_STYLE):
        yield


def blank(width_in: float, height_in: float) -> Figure:
    """A figure that arranges its own parts."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.04, hspace=0.04)
    figure = Figure(figsize=(width_in, height_in), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def fitted(name: str, width_in: float) -> str:
    """A name in one line of a figure, cut where it is longer."""
    max_characters = int((width_in - 0.3) / _HEADING_CHARACTER_IN)
    return name if len(name) <= max_characters else f"{name[: max_characters - 1].rstrip()}…"


def note(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    """Words beside a place in the data, `offset` points from it."""
    axes.annotate(text, at, xytext=offset, textcoords="offset points", **style)


def legend_height_in(labels: Sequence[str], width_in: float) -> float:
    """Room that `legend_below` takes."""
    columns = _columns(labels, width_in)
    lines = max((_wrapped(label).count("\n") + 1 for label in labels), default=0)
    return -(-len(labels) // columns) * lines * _LEGEND_LINE_IN + 0.15


def legend_below(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """A legend under all axes, in as many columns as fit."""
    if handles:
        names = [_wrapped(label) for label in labels]
        columns = _columns(labels, figure.get_figwidth())
        figure.legend(handles, names, loc="outside lower center", ncols=columns)


def log_axis(axis: Axis, limits: tuple[float, float], width_in: float) -> None:
    """Plain numbers on a logarithmic axis: at 1, 2 and 5 where there is room, otherwise at powers of ten."""
    low, high = limits
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    if low > 0 and high < low * _FEW_TIMES:
        axis.set_major_locator(MaxNLocator(4))
        axis.set_minor_locator(NullLocator())
        return
    decades = max(math.log10(high / low), 1e-3) if low > 0 else 1.0
    steps = (1, 2, 5) if width_in / decades > _DECADE_IN else (1,)
    axis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axis.set_minor_formatter(NullFormatter())


def percent_axis(axis: Axis) -> None:
    """Fractions as percent, without decimals that say nothing."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{plain(round(value * 100, 6)) or 0} %"))


def only_vertical_grid(axes: Axes) -> None:
    """For rows of bars: no ticks and lines but those of the numbers."""
    axes.grid(visible=False, axis="y")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _wrapped(label: str) -> str:
    return textwrap.fill(label, _LABEL_CHARACTERS)


def _columns(labels: Sequence[str], width_in: float) -> int:
    longest = max((min(len(label), _LABEL_CHARACTERS) for label in labels), default=1)
    fitting = int((width_in - 0.2) / (longest * _CHARACTER_IN + _HANDLE_IN))
    return max(1, min(fitting, len(labels)))
