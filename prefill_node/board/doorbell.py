"""Wakes the governor when the scheduler has issued a step.

The board tells what runs to whoever looks; the doorbell says when to look. A datagram socket in Linux's
abstract namespace, named after the board: it has no file and goes with the process that listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_MANY = 4096


class Doorbell:
    """Rings in another process of the host; one that cannot be heard is no error."""

    def __init__(self, board: Path) -> None:
        self._socket = _socket()
        self._address = _address(board)

    def ring(self) -> None:
        """Have the other side look at the board."""
        with contextlib.suppress(OSError):  # nobody listens, or has not yet heard the last rings
            self._socket.sendto(b"!", self._address)

    def close(self) -> None:
        """Ring no more."""
        self._socket.close()


class Doorkeeper:
    """Calls `heard` in the running event loop after each ring, once for rings in quick succession."""

    def __init__(self, board: Path, heard: Callable[[], None]) -> None:
        self._socket = _socket()
        self._socket.bind(_address(board))
        self._heard = heard
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._drain)

    def close(self) -> None:
        """Listen no more."""
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._socket.recv(_MANY):
                pass
        self._heard()


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)  # noqa: FBT003 - the socket module's own signature
    return made


def _address(board: Path) -> str:
    return f"\0{board.name}"
