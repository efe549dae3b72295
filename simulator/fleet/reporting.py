"""When a replica reports to the router, in virtual time: as `telemetry.reporting.reporter` does.

Owns times only; what is reported is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from simulator.replica.loop import EventLoop
from telemetry.reporting.reporter import COALESCE_S, HEARTBEAT_S

Made = TypeVar("Made")


class VirtualReporter(Generic[Made]):
    """Reports soon after every change, and at every heartbeat."""

    def __init__(self, loop: EventLoop, make: Callable[[], Made]) -> None:
        self._loop = loop
        self._make = make
        self._deliver: Callable[[Made], None] | None = None
        self._answer_s = 0.0
        self._is_over: Callable[[], bool] = lambda: False
        self._answered_s = 0.0
        self._is_due = False
        self._appointment = 0

    def start(self, deliver: Callable[[Made], None], answer_s: float, is_over: Callable[[], bool]) -> None:
        """Report now and from now on.

        Args:
            deliver: Lets the router have a report.
            answer_s: From sending a report to the router's answer; the next one waits for it.
            is_over: Whether nothing will change any more, so that heartbeats can end.
        """
        self._deliver, self._answer_s, self._is_over = deliver, answer_s, is_over
        self._report(deliver)

    def changed(self) -> None:
        """Report soon, if at all; calls in quick succession become one report."""
        if self._deliver is not None and not self._is_due:
            self._is_due = True
            self._meet(max(self._loop.now_s, self._answered_s) + COALESCE_S)

    def _report(self, deliver: Callable[[Made], None]) -> None:
        self._is_due = False
        self._answered_s = self._loop.now_s + self._answer_s
        deliver(self._make())
        self._meet(self._answered_s + HEARTBEAT_S)

    def _meet(self, at_s: float) -> None:
        self._appointment += 1
        self._loop.call_at(at_s, self._due, self._appointment)

    def _due(self, appointment: int) -> None:
        if self._deliver is not None and appointment == self._appointment and not self._is_over():
            self._report(self._deliver)
