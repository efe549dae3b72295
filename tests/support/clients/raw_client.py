"""A client of HTTP/1.1 that sends what no library would, byte for byte, on a connection for each request."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_FAILURES = re.compile(rb'"type": ?"(server_error|service_unavailable)"')
"""How an answer that has begun with 200 says that the server has failed."""


class Reply(NamedTuple):
    """What came back.

    Attributes:
        status: None when the server closed the connection without a word.
        is_whole: Whether the server closed the connection; else the client left it.
    """

    status: int | None
    content: bytes
    is_whole: bool

    @property
    def failed(self) -> bool:
        """Whether it says that the server is at fault."""
        return (self.status or 0) >= 500 or bool(_FAILURES.search(self.content))


def post(
    url: str, path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes, timeout_s: float = 30.0
) -> Reply:
    """Send a request with its length and these headers, whatever they say; read until the server closes.

    Leaves when nothing comes for `timeout_s`.
    """
    place = urlsplit(url)
    lines = [
        b"POST %s HTTP/1.1" % path.encode(),
        b"host: %s" % place.netloc.encode(),
        b"connection: close",
        b"content-length: %d" % len(body),
        *(name + b": " + value for name, value in headers),
    ]
    content, is_whole = bytearray(), True
    with socket.create_connection((place.hostname, place.port), timeout_s) as connection:
        # A request that is refused half-way is answered and the connection reset.
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        try:
            while piece := connection.recv(65536):
                content += piece
        except ConnectionError:
            pass
        except TimeoutError:
            is_whole = False
    status = _STATUS.match(content)
    return Reply(None if status is None else int(status[1]), bytes(content), is_whole)
