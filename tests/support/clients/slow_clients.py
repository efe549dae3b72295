"""A crowd of clients that send or read next to nothing, in a process of its own so that it slows nobody.

    python slow_clients.py URL KEY READERS UPLOADS RAMP_S slow|quick

Connects them evenly over RAMP_S seconds. Each uploads a byte of a body, or reads sixteen of a long answer,
every five seconds. Says in JSON, when all have been closed or time is up, how old each connection was when
the server closed it; null for one that it did not close. Quick ones read at once.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import sys
import time
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

EVERY_S = 5.0
PATIENCE_S = 90.0
_LOOK_S = 0.25
_ESTABLISHED = 1
_TCP_STATE = 11  # TCP_INFO, which begins with the state


@dataclass
class _Client:
    is_reader: bool
    connection: socket.socket
    opened_s: float
    active_s: float
    closed_after_s: float | None = None

    def is_open(self) -> bool:
        state = self.connection.getsockopt(socket.IPPROTO_TCP, _TCP_STATE, 1)
        return struct.unpack("B", state)[0] == _ESTABLISHED

    def dawdle(self) -> None:
        """Whether it is closed does not show here: a reader has not read so far."""
        with contextlib.suppress(OSError):
            if self.is_reader:
                self.connection.recv(16)
            else:
                self.connection.send(b" ")

    def read(self) -> bool:
        """Read what there is; False when there is no more to come."""
        try:
            return bool(self.connection.recv(65536))
        except BlockingIOError:
            return True
        except OSError:
            return False


def _connect(place: SplitResult, key: str, *, is_reader: bool, is_quick: bool) -> _Client:
    body = json.dumps(
        {"model": "tiny", "prompt": "slow", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {place.netloc}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body) if is_reader else 1000}\r\n\r\n"
    ).encode()
    connection = socket.socket()
    if not is_quick:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((place.hostname, place.port))
    connection.sendall(head + (body if is_reader else body[:10]))
    connection.setblocking(False)
    now_s = time.monotonic()
    return _Client(is_reader, connection, now_s, now_s)


class _Crowd:
    """The clients so far. Takes next to nothing itself: the server that it disturbs has the same cores."""

    def __init__(self, *, is_quick: bool) -> None:
        self.clients: list[_Client] = []
        self._open: list[_Client] = []
        self._is_quick = is_quick
        self._readable = selectors.DefaultSelector()
        self._looked_s = 0.0

    def add(self, client: _Client) -> None:
        """One more; it is open."""
        self.clients.append(client)
        self._open.append(client)
        if self._is_quick:
            self._readable.register(client.connection, selectors.EVENT_READ, client)

    def act(self, now_s: float) -> None:
        """What quick ones can read they read; of the others look now and then who is due, or closed."""
        for key, _ in self._readable.select(0) if self._is_quick else ():
            if not key.data.read():
                self._readable.unregister(key.fileobj)
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        for client in self._open:
            if not client.is_open():
                client.closed_after_s = now_s - client.opened_s
            elif not self._is_quick and now_s - client.active_s >= EVERY_S:
                client.active_s = now_s
                client.dawdle()
        self._open = [client for client in self._open if client.closed_after_s is None]

    def has_ended(self) -> bool:
        """Whether the server has closed all of them."""
        return not self._open


def main(url: str, key: str, readers: int, uploads: int, ramp_s: float, *, is_quick: bool) -> None:
    """See the module."""
    place, count = urlsplit(url), readers + uploads
    crowd = _Crowd(is_quick=is_quick)
    started_s = time.monotonic()
    while True:
        now_s = time.monotonic()
        while (begun := len(crowd.clients)) < count and now_s - started_s >= ramp_s * begun / count:
            is_reader = begun * readers % count < readers
            crowd.add(_connect(place, key, is_reader=is_reader, is_quick=is_quick))
        crowd.act(now_s)
        if begun == count and (crowd.has_ended() or now_s - started_s > ramp_s + PATIENCE_S):
            break
        time.sleep(min(_LOOK_S, ramp_s / count) if begun < count else _LOOK_S)
    found = {
        name: [client.closed_after_s for client in crowd.clients if client.is_reader is is_reader]
        for name, is_reader in (("readers", True), ("uploads", False))
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    _, url_, key_, readers_, uploads_, ramp_s_, how = sys.argv
    main(url_, key_, int(readers_), int(uploads_), float(ramp_s_), is_quick=how == "quick")
