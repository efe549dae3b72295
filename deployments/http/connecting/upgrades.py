"""A request that asks for another protocol, which is not spoken here, is read as if it did not ask.

RFC 9110, section 7.8, has a server ignore such an `Upgrade`: the JDK's HTTP client sends `Upgrade: h2c` with
what it posts in clear. httptools takes the request to be over behind its head, whatever body that announces,
and uvicorn then reads the body as the next request. WebSockets stay uvicorn's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import httptools

if TYPE_CHECKING:
    from collections.abc import Callable

_CONNECT: Final = b"CONNECT"
"""The method that asks for another protocol by itself."""


def waits(connection: Any) -> bool:
    """Whether no request of a connection of uvicorn's is being answered."""
    return connection.cycle is None or connection.cycle.response_complete


class RequestParser:
    """httptools' parser for a connection of uvicorn's, as uvicorn uses it.

    Behind the head of a request whose `Upgrade` is ignored, another one takes over, which is given the head
    without that header. Nobody hears of the head that the first one has read.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._is_in_head = False
        self.on_url: Callable[[bytes], None] = connection.on_url
        self.on_body: Callable[[bytes], None] = connection.on_body
        self._parser = self._another()

    def _another(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has its own
        return parser

    def let_go(self) -> None:
        """Nothing more comes; without this the connection would stay until the garbage collector finds it."""
        vars(self).clear()

    def feed_data(self, data: bytes) -> None:
        """Read a piece of what the client sends.

        Raises:
            httptools.HttpParserUpgrade: The connection becomes a WebSocket.
            httptools.HttpParserError: It is not HTTP, or asks for a tunnel.
        """
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._is_ignored():
                    raise
                data = data[upgrade.args[0] :]
            else:
                return
            if self._parser.get_method() == _CONNECT:  # which the next parser would take for one as well
                raise httptools.HttpParserInvalidMethodError("there are no tunnels here")
            head = self._head()
            self._parser = self._another()
            self._parser.feed_data(head)

    def _is_ignored(self) -> bool:
        """Whether an `Upgrade` is, as uvicorn decides; while another request is answered, each is."""
        if not self._parser.should_upgrade():
            return False
        connection = self._connection
        return not (waits(connection) and connection._should_upgrade())  # noqa: SLF001 - uvicorn's

    def _head(self) -> bytes:
        """The head that was read last, without its `Upgrade`."""
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        lines = [name + b": " + value for name, value in self._connection.headers if name != b"upgrade"]
        return b"\r\n".join([b"%b %b HTTP/%b" % (method, self._connection.url, version), *lines, b"", b""])

    def on_message_begin(self) -> None:
        """Hear from httptools that a request begins."""
        self._is_in_head = True
        self._connection.on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Hear of a header from httptools; what comes behind the body is none (RFC 9110, section 6.5.1)."""
        if self._is_in_head:
            self._connection.on_header(name, value)

    def on_headers_complete(self) -> None:
        """Hear from httptools that a head is here."""
        self._is_in_head = False
        if not self._is_ignored():
            self._connection.on_headers_complete()

    def on_message_complete(self) -> None:
        """Hear from httptools that a request is here."""
        if not self._is_ignored():
            self._connection.on_message_complete()

    def get_method(self) -> bytes:
        """The method of the request."""
        return self._parser.get_method()

    def get_http_version(self) -> str:
        """Its version of HTTP."""
        return self._parser.get_http_version()

    def should_keep_alive(self) -> bool:
        """Whether another request may come behind it."""
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        """Whether it asks for another protocol."""
        return self._parser.should_upgrade()


def ignore_upgrades(protocol: Any) -> None:
    """Have uvicorn read requests by `RequestParser`, on connections that are made from now on."""
    made, lost = protocol.connection_made, protocol.connection_lost

    def connection_made(connection: Any, transport: Any) -> None:
        connection.parser = RequestParser(connection)
        made(connection, transport)

    def connection_lost(connection: Any, error: Exception | None) -> None:
        parser = connection.parser
        lost(connection, error)
        parser.let_go()

    protocol.connection_made, protocol.connection_lost = connection_made, connection_lost
