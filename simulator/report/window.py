"""Which requests and which seconds a timeline shows.

Owns the choice only; nothing here draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from simulator.findings import State
from simulator.report.palette import LEAD, REFERENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulator.findings import ArmFindings, Life

_SHOWN: Final = (REFERENCE, "sedf", LEAD)
_MOST_ARMS: Final = 3
_MOST_ROWS: Final = 24


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds of virtual time."""

    start_s: float
    end_s: float

    def shows(self, life: Life) -> bool:
        """Whether any of it falls in here."""
        return life.ended_s > self.start_s and life.arrived_s < self.end_s

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
    if max(starts) < min(ends):
        return _shortened(Window(max(starts), min(ends)), arms)
    return _shortened(Window(min(starts), max(ends)), arms)


def _shortened(window: Window, arms: Sequence[ArmFindings]) -> Window:
    end_s = window.end_s
    for item in arms:
        starts = sorted(
            min(span.start_s for span in life.spans if span.state is not State.WAITING)
            for life in item.timeline
            if window.is_worked_on(life)
        )
        if len(starts) > _MOST_ROWS and starts[_MOST_ROWS] > window.start_s:
            end_s = min(end_s, starts[_MOST_ROWS])
    return Window(window.start_s, end_s)


def shown_rows(item: ArmFindings, window: Window) -> tuple[list[Life], int]:
    """Requests in order of arrival, and how many more there are that found no room.

    Those that are worked on go before those that only wait.
    """
    lives = sorted((life for life in item.timeline if window.shows(life)), key=lambda life: life.arrived_s)
    first = sorted(lives, key=lambda life: not window.is_worked_on(life))[:_MOST_ROWS]
    chosen = {life.number for life in first}
    rows = [life for life in lives if life.number in chosen]
    return rows, len(lives) - len(rows)
