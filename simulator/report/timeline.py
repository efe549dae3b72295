"""What prefill replicas do for a few seconds: under some arms, or in the past of a server.

Owns which requests and seconds of arms are shown, and the figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from simulator.findings import ArmFindings, Life, State
from simulator.report.canvas import (
    HALO,
    INK,
    LEAD,
    MISSED,
    MUTED,
    REFERENCE,
    WIDE_IN,
    blank,
    faded,
    fitted,
    kind_colours,
    legend_below,
    legend_height_in,
    only_vertical_grid,
    theme,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_SHOWN: Final = (REFERENCE, "sedf", LEAD)
_MOST_ARMS: Final = 3
_MOST_ROWS: Final = 24


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds of virtual time."""

    start_s: float
    end_s: float

    def is_worked_on(self, life: Life) -> bool:
        """Whether it does more than wait in here."""
        return any(
            span.state is not State.WAITING and span.end_s > self.start_s and span.start_s < self.end_s
            for span in life.spans
        )


def shown_arms(arms: Sequence[ArmFindings]) -> list[ArmFindings]:
    """At most three arms to compare: without and with order, and with everything, where there are such."""
    have = [item for item in arms if item.timeline]
    wanted = [item for item in have if item.arm in _SHOWN]
    others = [item for item in reversed(have) if item.arm not in _SHOWN]
    if len(wanted) < 2:  # noqa: PLR2004 - one alone compares nothing
        wanted += others[: _MOST_ARMS - len(wanted)]
    return [item for item in have if item in wanted]


def common_window(arms: Sequence[ArmFindings]) -> Window:
    """The seconds that all their timelines cover, or all seconds where they have none in common.

    It ends early enough for every request that is worked on in it to have a row.
    """
    starts = [min(life.arrived_s for life in item.timeline) for item in arms]
    ends = [max(life.ended_s for life in item.timeline) for item in arms]
    have_common = max(starts) < min(ends)
    window = Window(max(starts), min(ends)) if have_common else Window(min(starts), max(ends))
    end_s = window.end_s
    for item in arms:
        begun = sorted(
            min(span.start_s for span in life.spans if span.state is not State.WAITING)
            for life in item.timeline
            if window.is_worked_on(life)
        )
        if len(begun) > _MOST_ROWS and begun[_MOST_ROWS] > window.start_s:
            end_s = min(end_s, begun[_MOST_ROWS])
    return Window(window.start_s, end_s)


@dataclass(frozen=True, slots=True)
class LifeRows:
    """The rows of one replica, from the top, and how many more requests found no room."""

    title: str
    lives: Sequence[Life]
    left_out: int = 0


def shown_rows(item: ArmFindings, window: Window) -> LifeRows:
    """Requests in order of arrival; those that are worked on go before those that only wait."""
    begun = sorted(item.timeline, key=lambda life: life.arrived_s)
    lives = [life for life in begun if life.ended_s > window.start_s and life.arrived_s < window.end_s]
    first = sorted(lives, key=lambda life: not window.is_worked_on(life))[:_MOST_ROWS]
    chosen = {life.number for life in first}
    rows = [life for life in lives if life.number in chosen]
    return LifeRows(item.title, rows, len(lives) - len(rows))


_ROW_IN: Final = 0.135
_PANEL_IN: Final = 0.5
_TALL_PANEL_IN: Final = 0.75
"""What a panel takes beside its rows, with the title in one line or two."""
_NOTE_IN: Final = 2.8
_BAR: Final = 0.74
_THIN: Final = 0.2
_FADED: Final = 0.45
_SLACK: Final = "#b8c2cc"


def timeline_figure(
    arms: Sequence[ArmFindings], kinds: Sequence[str] = (), width_in: float = WIDE_IN
) -> Figure:
    """Arms above each other on one time axis.

    Kinds get their colours in the order given; others that occur follow.
    """
    shown = shown_arms(arms)
    if not shown:
        return blank(width_in, 1)
    window = common_window(shown)
    occurring = [life.kind for item in shown for life in item.timeline]
    return lives_figure([shown_rows(item, window) for item in shown], window, [*kinds, *occurring], width_in)


@theme()
def lives_figure(
    rows: Sequence[LifeRows],
    window: Window,
    kinds: Sequence[str],
    width_in: float,
    time_label: str = "time, s",
) -> Figure:
    """Panels above each other on one time axis, each request a row: waiting, running, suspended, late.

    `kinds` are all that occur; they get their colours in this order.
    """
    colours = kind_colours(kinds)
    seen = {life.kind for panel in rows for life in panel.lives}
    handles, labels = _legend({kind: colours[kind] for kind in colours if kind in seen})
    heights = [max(len(panel.lives), 4) * _ROW_IN for panel in rows]
    around_in = len(rows) * (_PANEL_IN if width_in >= WIDE_IN else _TALL_PANEL_IN) + 0.5
    canvas = blank(width_in, sum(heights) + around_in + legend_height_in(labels, width_in))
    panels = canvas.subplots(len(rows), squeeze=False, sharex=True, height_ratios=heights).flatten()
    for axes, panel in zip(panels, rows, strict=True):
        for row, life in enumerate(panel.lives):
            _life(axes, life, row, window, colours[life.kind])
        # The note is beside the name, or below it where there is little room.
        is_wide = width_in >= WIDE_IN
        name = fitted(panel.title, width_in - _NOTE_IN) if is_wide else f"{fitted(panel.title, width_in)}\n"
        _frame(axes, name, panel.lives, panel.left_out)
    panels[-1].set_xlim(0, window.end_s - window.start_s)
    panels[-1].set_xlabel(time_label)
    legend_below(canvas, handles, labels)
    return canvas


def _life(axes: Axes, life: Life, row: int, window: Window, colour: str) -> None:
    for span in life.spans:
        start_s, end_s = max(span.start_s, window.start_s), min(span.end_s, window.end_s)
        if start_s < end_s:
            height = _THIN if span.state is State.WAITING else _BAR
            stretch, place = (start_s - window.start_s, end_s - start_s), (row - height / 2, height)
            axes.broken_barh([stretch], place, **_look(span.state, colour))
    if life.due_s is None:
        return
    is_missed = life.ended_s > life.due_s
    due_s, ended_s = life.due_s - window.start_s, min(life.ended_s, window.end_s) - window.start_s
    if is_missed and ended_s > max(due_s, 0):
        late = [max(due_s, 0), ended_s]
        axes.plot(late, [row + 0.44] * 2, color=MISSED, linewidth=1.6, solid_capstyle="butt")
    if ended_s < due_s and not is_missed:
        axes.plot([max(ended_s, 0), due_s], [row] * 2, color=_SLACK, linewidth=0.8, zorder=1)
    if 0 <= due_s <= window.end_s - window.start_s:
        marker = _missed_mark() if is_missed else _due_mark()
        marker.set(data=([due_s], [row]), zorder=5, path_effects=[*HALO])
        axes.add_line(marker)


def _look(state: State, colour: str) -> dict[str, Any]:
    match state:
        case State.WAITING:
            return {"color": faded(colour, _FADED), "linewidth": 0}
        case State.RUNNING:
            return {"color": colour, "linewidth": 0}
        case State.SUSPENDED:
            return {"facecolor": "white", "edgecolor": colour, "hatch": "//////", "linewidth": 0.8}


def _frame(axes: Axes, title: str, lives: Sequence[Life], left_out: int) -> None:
    axes.set_title(title)
    due = [life for life in lives if life.due_s is not None]
    missed = sum(life.ended_s > life.due_s for life in due if life.due_s is not None)
    note = f"{missed} of {len(due)} late" + (f", {left_out} more not shown" if left_out else "")
    axes.set_title(note, loc="right", fontsize=9.5, weight="normal", color=MISSED if missed else MUTED)
    only_vertical_grid(axes)
    axes.set_ylim(max(len(lives), 4) - 0.4, -0.6)
    axes.set_ylabel("requests", color=MUTED, fontsize=9.5)


def _due_mark() -> Line2D:
    return Line2D([], [], linestyle="", color=INK, marker="|", markersize=9, markeredgewidth=1.6)


def _missed_mark() -> Line2D:
    return Line2D([], [], linestyle="", color=MISSED, marker="x", markersize=6, markeredgewidth=2)


def _legend(colours: Mapping[str, str]) -> tuple[list[Artist], list[str]]:
    kinds: list[Artist] = [Patch(color=colour) for colour in colours.values()]
    states: list[Artist] = [
        Line2D([], [], color=faded(MUTED, _FADED), linewidth=2.5),
        Patch(color=MUTED),
        Patch(facecolor="white", edgecolor=MUTED, hatch="//////"),
        _due_mark(),
        _missed_mark(),
        Line2D([], [], color=MISSED, linewidth=1.6),
    ]
    names = ["waiting", "running", "suspended", "deadline met", "deadline missed", "late"]
    return [*kinds, *states], [*colours, *names]
