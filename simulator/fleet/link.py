"""The way of KV cache from prefill to decode: bytes over a link, one transfer after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from simulator.replica.loop import EventLoop
from slo.predict.handoff import Link


@dataclass(slots=True, eq=False)
class Transfer:
    """KV cache on its way.

    Attributes:
        arrived: Called when all of it is there.
    """

    size_bytes: float
    arrived: Callable[[], None]
    cancelled: bool = False


class Ingest:
    """The link into one decode replica; transfers share it first come, first served.

    Attributes:
        busy_s: Time for which bytes have been moving, transfers that were cancelled included.
    """

    def __init__(self, loop: EventLoop, link: Link) -> None:
        self.busy_s = 0.0
        self._loop = loop
        self._link = link
        self._waiting: deque[Transfer] = deque()
        self._moving: Transfer | None = None
        self._since_s = 0.0

    def send(self, size_bytes: float, arrived: Callable[[], None]) -> Transfer:
        """Move `size_bytes` once everything before it has been moved."""
        transfer = Transfer(size_bytes, arrived)
        self._waiting.append(transfer)
        if self._moving is None:
            self._next()
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """Give a transfer up: its source is gone. One that has arrived stays."""
        transfer.cancelled = True
        if transfer is self._moving:
            self._free()

    def _next(self) -> None:
        while self._waiting:
            transfer = self._waiting.popleft()
            if not transfer.cancelled:
                self._moving = transfer
                self._since_s = self._loop.now_s
                took_s = transfer.size_bytes / self._link.bytes_ps
                self._loop.call_at(self._since_s + took_s, self._moved, transfer)
                return

    def _moved(self, transfer: Transfer) -> None:
        if transfer.cancelled:
            return
        self._loop.call_at(self._loop.now_s + self._link.latency_s, self._arrive, transfer)
        self._free()

    def _free(self) -> None:
        self.busy_s += self._loop.now_s - self._since_s
        self._moving = None
        self._next()

    @staticmethod
    def _arrive(transfer: Transfer) -> None:
        if not transfer.cancelled:
            transfer.arrived()
