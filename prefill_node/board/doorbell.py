"""Wakes the governor when the scheduler has issued a step.

The board tells what runs to whoever looks; the doorbell says when to look. A datagram socket in Linux's
abstract namespace, named after the board: it has no file and goes with the process that listens. Such a
socket has no permissions either, so the kernel says who rings, and a flood costs the listener little.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

_CREDENTIALS: Final = struct.Struct("iII")
"""Process, user and group of a sender, as the kernel has them (`struct ucred`)."""
_MAX_RINGS: Final = 8
"""Read at once. The kernel keeps about ten, and the scheduler rings once a step: this many are a flood."""
_FLOOD_PAUSE_S: Final = 0.005


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
    """Calls `heard` in the running event loop after each ring, once for rings in quick succession.

    Only processes of the same user are heard. Once there are others it listens every five milliseconds, and
    in a flood it calls `heard` each time: the flood may have kept out a ring that was meant.
    """

    def __init__(self, board: Path, heard: Callable[[], None]) -> None:
        self._socket = _socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(_address(board))
        self._heard = heard
        self._user = os.geteuid()
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Listen no more."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._socket, self._drain)

    def _drain(self) -> None:
        users: list[int] = []
        with contextlib.suppress(BlockingIOError):  # all are read
            while len(users) < _MAX_RINGS:
                _, ancillary, _, _ = self._socket.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
                users.append(_user(ancillary))
        is_flood = len(users) == _MAX_RINGS
        if is_flood or any(user != self._user for user in users):
            self._loop.remove_reader(self._socket)
            self._pause = self._loop.call_later(_FLOOD_PAUSE_S, self._listen)
        if is_flood or self._user in users:
            self._heard()


def _user(ancillary: list[tuple[int, int, bytes]]) -> int:
    """The user who sent a message; the kernel adds it to each."""
    return int(_CREDENTIALS.unpack(ancillary[0][2][: _CREDENTIALS.size])[1])


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)  # noqa: FBT003 - the socket module's own signature
    return made


def _address(board: Path) -> str:
    return f"\0{board.name}"
