"""A crowd of clients that send or read next to nothing, in a process of its own so that it slows nobody.

    python slow_clients.py URL KEY READERS UPLOADS RAMP_S slow|quick

Connects them evenly over RAMP_S seconds. Each uploads a byte of a body, or reads sixteen of a long answer,
every five seconds. Says in JSON, when all have been closed or time is up, how old each connection was when
the server closed it; null for one that it did not close. Quick ones read at once.
"""

from __future__ import annotations

import contextlib
import json
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
    is_quick: bool
    closed_after_s: float | None = None

    def is_open(self) -> bool:
        state = self.connection.getsockopt(socket.IPPROTO_TCP, _TCP_STATE, 1)
        return struct.unpack("B", state)[0] == _ESTABLISHED

    def act(self) -> None:
        """Whether it is closed does not show here: a reader has not read so far."""
        with contextlib.suppress(OSError):
            if self.is_quick:
                while self.connection.recv(65536):
                    pass
            elif self.is_reader:
                self.connection.recv(16)
            else:
                self.connection.send(b" ")


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
    return _Client(is_reader, connection, now_s, now_s, is_quick)


def main(url: str, key: str, readers: int, uploads: int, ramp_s: float, *, is_quick: bool) -> None:
    """See the module."""
    place, count = urlsplit(url), readers + uploads
    clients: list[_Client] = []
    started_s = time.monotonic()
    while True:
        now_s = time.monotonic()
        while len(clients) < count and now_s - started_s >= ramp_s * len(clients) / count:
            is_reader = len(clients) * readers % count < readers
            clients.append(_connect(place, key, is_reader=is_reader, is_quick=is_quick))
        waiting = [client for client in clients if client.closed_after_s is None]
        for client in waiting:
            if not client.is_open():
                client.closed_after_s = now_s - client.opened_s
            elif is_quick or now_s - client.active_s >= EVERY_S:
                client.active_s = now_s
                client.act()
        if len(clients) == count and (not waiting or now_s - started_s > ramp_s + PATIENCE_S):
            break
        time.sleep(min(_LOOK_S, ramp_s / count) if len(clients) < count else _LOOK_S)
    found = {
        name: [client.closed_after_s for client in clients if client.is_reader is is_reader]
        for name, is_reader in (("readers", True), ("uploads", False))
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    _, url_, key_, readers_, uploads_, ramp_s_, how = sys.argv
    main(url_, key_, int(readers_), int(uploads_), float(ramp_s_), is_quick=how == "quick")
