"""When a replica reports to the router, in virtual time: as `telemetry.reporting.reporter` does.

Owns times only; what is reported is the caller's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from telemetry.reporting.reporter import COALESCE_S, HEARTBEAT_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulator.replica.loop import EventLoop


class VirtualReporter:
    """Reports soon after every change, and at every heartbeat.

    Args:
        loop: The time.
        deliver: Makes a report now and lets the router have it.
        answer_s: From sending a report to the router's answer; the next one waits for it.
        is_over: Whether nothing will change any more, so that heartbeats can end.
    """

    def __init__(
        self, loop: EventLoop, deliver: Callable[[], None], answer_s: float, is_over: Callable[[], bool]
    ) -> None:
        self._loop = loop
        self._deliver = deliver
        self._answer_s = answer_s
        self._is_over = is_over
        self._answered_s = 0.0
        self._is_due = False
        self._appointment = 0

    def changed(self) -> None:
        """Report soon; calls in quick succession become one report."""
        if not self._is_due:
            self._is_due = True
            self._meet(max(self._loop.now_s, self._answered_s) + COALESCE_S)

    def report(self) -> None:
        """Report now."""
        self._is_due = False
        self._answered_s = self._loop.now_s + self._answer_s
        self._deliver()
        self._meet(self._answered_s + HEARTBEAT_S)

    def _meet(self, at_s: float) -> None:
        self._appointment += 1
        self._loop.call_at(at_s, self._due, self._appointment)

    def _due(self, appointment: int) -> None:
        if appointment == self._appointment and not self._is_over():
            self.report()
