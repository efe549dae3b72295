"""How far the host may run ahead of the device.

On an accelerator the host launches kernels long before they run, so that a check on the host stops only
what has not been launched. Owns the bound: before boundary k is launched, the device has passed boundary
k - depth. Nothing else waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class LaunchAhead(Protocol):
    """Called at each boundary of a forward pass, before it is decided whether to go on."""

    def start(self) -> None:
        """A forward pass begins."""
        ...

    def reach(self) -> None:
        """The host is at the next boundary."""
        ...


class HostOnly:
    """The host computes: it is never ahead."""

    def start(self) -> None:
        """Nothing to do."""

    def reach(self) -> None:
        """Nothing to do."""


class EventBound:
    """Keeps the host at most `depth` boundaries ahead of the device.

    With a depth of 1 or more the device always has a boundary's work in its queue while the host waits.

    Args:
        depth: Boundaries that may be launched and not finished, at least 1.
        new_event: Makes a mark in the device's stream of work.

    Raises:
        ValueError: for a depth below 1.
    """

    def __init__(self, depth: int, new_event: Callable[[], torch.cuda.Event]) -> None:
        if depth < 1:
            raise ValueError(f"launch_ahead must be at least 1, not {depth}")
        self._events = [new_event() for _ in range(depth)]
        self._reached = 0

    def start(self) -> None:
        """Forget the marks of the last forward pass."""
        self._reached = 0

    def reach(self) -> None:
        """Wait until the device has passed the boundary `depth` back, then mark this one."""
        event = self._events[self._reached % len(self._events)]
        if self._reached >= len(self._events):
            event.synchronize()
        event.record()
        self._reached += 1
