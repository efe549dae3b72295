"""Virtual time: what happens next happens at once."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class EventLoop:
    """Calls functions in order of their times; those of one time in the order in which they were given.

    Attributes:
        now_s: The time, seconds from the start.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._stopped = False

    def call_at(self, at_s: float, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function at a time, at the earliest now."""
        self._number += 1
        heappush(self._events, (max(at_s, self.now_s), self._number, function, arguments))

    def stop(self) -> None:
        """Let nothing more happen."""
        self._stopped = True

    def run(self, until_s: float = float("inf")) -> None:
        """Let everything happen that is due by `until_s`."""
        events = self._events
        while events and events[0][0] <= until_s and not self._stopped:
            self.now_s, _, function, arguments = heappop(events)
            function(*arguments)
