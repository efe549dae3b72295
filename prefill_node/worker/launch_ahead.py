"""How far the host may run ahead of the device.

On an accelerator the host launches kernels long before they run, so that a check on the host stops only
what has not been launched. Owns the bound: before boundary k is launched, the device has no more to do than
so many seconds, as far as is predicted. Boundaries lie at very unequal distances, so their number bounds
nothing. Nothing else waits for the device.

Nothing is predicted before the first prompt of a client. What runs until then are the probes of the warm-up
and of a profile, which nobody stops; a stop that is ordered all the same may find everything launched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

_NAP_S: Final = 1e-4
"""How often a waiting host looks whether the device was faster than predicted."""


class LaunchAhead(Protocol):
    """Called at each boundary of a forward pass, before it is decided whether to go on."""

    def start(self, at_s: Sequence[float]) -> None:
        """A forward pass begins, in which each boundary is reached after so many seconds, as predicted."""
        ...

    def reach(self, boundary: int) -> None:
        """The host is at a boundary."""
        ...


class HostOnly:
    """The host computes: it is never ahead."""

    def start(self, at_s: Sequence[float]) -> None:
        """Nothing to do."""

    def reach(self, boundary: int) -> None:
        """Nothing to do."""


class Event(Protocol):
    """A mark in the device's stream of work, such as `torch.cuda.Event`."""

    def record(self) -> None:
        """Set it behind what has been launched."""
        ...

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...


class TimeBound:
    """Keeps the host at most so many seconds ahead of the device.

    A mark is set at each boundary. What lies between the last mark that the device has passed and the place
    where the host is, is known to be left; how long it takes is predicted. So the host waits for the last
    mark that is farther back than the bound, and from then on until the prediction says that no more than the
    bound is left, or the device passes the next mark. The device always has work while the host waits. Where
    nothing is predicted the host does not wait: a pass that is measured must not take longer than it will.

    Args:
        ahead_s: Seconds of work that may be launched and not done.
        new_event: Makes a mark.

    Raises:
        ValueError: for a bound that is not positive, as it would starve the device.
    """

    def __init__(
        self,
        ahead_s: float,
        new_event: Callable[[], Event],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not ahead_s > 0:
            raise ValueError(f"the launch-ahead must be positive, not {ahead_s} s")
        self._ahead_s = ahead_s
        self._new_event = new_event
        self._clock = clock
        self._sleep = sleep
        self._events: list[Event] = []
        self._at_s: Sequence[float] = ()
        self._is_known = False
        self._reached: list[int] = []
        self._near = 0
        self._passed: tuple[int, float] = (-1, 0.0)

    def start(self, at_s: Sequence[float]) -> None:
        """Forget the marks of the last forward pass."""
        self._at_s = at_s
        self._is_known = bool(at_s) and at_s[-1] > 0
        self._reached.clear()
        self._near = 0
        self._passed = (-1, 0.0)

    def reach(self, boundary: int) -> None:
        """Mark this boundary, and wait until the device is near enough."""
        here = len(self._reached)
        if here == len(self._events):
            self._events.append(self._new_event())
        self._events[here].record()
        self._reached.append(boundary)
        if not self._is_known:
            return
        near_s = self._at_s[boundary] - self._ahead_s
        while self._near < here and self._at_s[self._reached[self._near]] < near_s:
            self._near += 1
        if self._near == 0:
            return
        far = self._near - 1
        self._events[far].synchronize()
        if self._passed[0] != far:
            self._passed = far, self._clock()
        until_s = self._passed[1] + near_s - self._at_s[self._reached[far]]
        next_mark = self._events[self._near]
        while (left_s := until_s - self._clock()) > 0 and not next_mark.query():
            self._sleep(min(left_s, _NAP_S))
