"""How many requests of a batch are under way at a time, and when none is sent.

As in TCP's congestion avoidance (RFC 5681) the number grows by one with as many answers as it has, and halves
with a refusal; refusals of what was sent before the last one do not count again. While a server asks for time
(`Retry-After`) nothing is sent.
"""

from __future__ import annotations

from typing import Final

_SHORTEST_BACK_OFF_S: Final = 1.0
_LONGEST_BACK_OFF_S: Final = 60.0


class BatchPace:
    """Takes the time from its caller, seconds of one clock.

    Args:
        most: Requests at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._room = float(most)
        self._halved_s = self.next_s = float("-inf")
        self._back_off_s = _SHORTEST_BACK_OFF_S

    @property
    def room(self) -> int:
        """How many requests may be under way."""
        return int(self._room)

    def answered(self) -> None:
        """The server has answered one."""
        self._room = min(float(self._most), self._room + 1.0 / self._room)
        self._back_off_s = _SHORTEST_BACK_OFF_S

    def refused(self, now_s: float, sent_s: float, wait_s: float | None) -> None:
        """The server takes no request now.

        Args:
            now_s: Now.
            sent_s: When the refused one was sent.
            wait_s: How long it asks to be left alone; None when it does not say, for twice as long as before.
        """
        if sent_s < self._halved_s:
            self.next_s = max(self.next_s, now_s + (wait_s or 0.0))
            return
        if wait_s is None:
            wait_s = self._back_off_s
            self._back_off_s = min(_LONGEST_BACK_OFF_S, 2 * self._back_off_s)
        self.next_s = max(self.next_s, now_s + wait_s)
        self._halved_s = now_s
        self._room = max(1.0, self._room / 2)
