"""What uvicorn is made to bound, which has no limit of it: heads, waits for them, clients that do not read.

Owns what is replaced in uvicorn's protocols (`bound_connections`), and how a connection is cut. What a
request may hold once its head is here is `deployments.http.proxy`'s.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deployments.config.limits import LimitsConfig
from deployments.http import errors as http_errors
from deployments.http.connecting.upgrades import ignore_upgrades, waits
from telemetry import logs

if TYPE_CHECKING:
    from collections.abc import Callable

    from deployments.http.errors import HTTPError

_SEND_BUFFER_BYTES: Final = 64 * 1024
"""Of what a client has not read, in the kernel, which would take megabytes, so that no reader looked slow."""
_REQUEST_LINE_BYTES: Final = 8 * 1024
_BETWEEN_BYTES: Final = len(b": \r\n")
"""What a header has besides its name and its value."""
_DROP: Final = struct.pack("ii", 1, 0)
_NOTHING: Final = struct.pack("i", 0)


def bound_connections(limits: LimitsConfig) -> None:
    """Have every connection of this process bounded that is made from now on."""
    _bound_heads(HttpToolsProtocol, limits)  # h11 has a limit of its own
    for protocol in (HttpToolsProtocol, H11Protocol):
        _bound_headers(protocol, limits.header_timeout_s)
        _bound_idle(protocol)
        _bound_closing(protocol, limits.write_timeout_s)
    _one_at_a_time(HttpToolsProtocol)  # h11 has the one alone
    ignore_upgrades(HttpToolsProtocol)  # h11 reads on as it should


def is_open(transport: Any) -> bool:
    """Whether a connection has its socket still."""
    try:
        connection = transport.get_extra_info("socket")
    except AttributeError:  # over TLS, closed from both ends: asyncio has let go of everything
        return False
    return connection is not None and connection.fileno() >= 0


def reset(transport: Any) -> None:
    """Close a connection and drop what its client has not read: the kernel would keep it as long as that."""
    if is_open(transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP)
    transport.abort()


def age_s(transport: Any) -> float:
    """How long a connection has been open; 0 when its client has left, and uvicorn has let go of it."""
    connection = transport.get_protocol()
    return 0.0 if connection is None else time.monotonic() - connection._slackserve_since_s  # noqa: SLF001 - ours


def _is_unread(transport: Any) -> bool:
    """Whether a client has not taken all that was sent, in this process or in the kernel."""
    if transport.get_write_buffer_size():
        return True
    unsent = fcntl.ioctl(transport.get_extra_info("socket"), termios.TIOCOUTQ, _NOTHING)
    return unsent != _NOTHING


class _EndsOnceClosed:
    """A connection's transport that ends within a time once it is closed, though its client reads nothing.

    By itself it waits until everything is written, for a client that answers the kernel's probes for ever. It
    is closed by whoever has it, or by the loop behind a client that says that it will send nothing more.
    """

    def __init__(self, transport: Any, within_s: float) -> None:
        self._transport = transport
        self._within_s = within_s
        self._timer: asyncio.TimerHandle | None = None
        self.write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        """Close it once everything is written, or the time is over."""
        self.ends_in_time()
        self._transport.close()

    def ends_in_time(self) -> None:
        """It is about to be closed."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._within_s, self._end)

    def has_ended(self) -> None:
        """It is gone, and nothing keeps it for the time that it had."""
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        if is_open(self._transport) and _is_unread(self._transport):
            logs.event("slow_reader_left", closing=True)
            reset(self._transport)


def _bound_closing(protocol: Any, within_s: float) -> None:
    """Have every connection end that uvicorn closes, whyever it does, or that its client has half closed."""
    made, half_closed, lost = protocol.connection_made, protocol.eof_received, protocol.connection_lost

    def connection_made(connection: Any, transport: Any) -> None:
        made(connection, _EndsOnceClosed(transport, within_s))

    def eof_received(connection: Any) -> Any:
        connection.transport.ends_in_time()
        return half_closed(connection)

    def connection_lost(connection: Any, error: Exception | None) -> None:
        lost(connection, error)  # uvicorn closes it once more
        connection.transport.has_ended()

    protocol.connection_made, protocol.eof_received = connection_made, eof_received
    protocol.connection_lost = connection_lost


def _bound_idle(protocol: Any) -> None:
    """Have uvicorn end an idle connection for its client too, if that has not read everything."""
    idle = protocol.timeout_keep_alive_handler

    def timeout_keep_alive_handler(connection: Any) -> None:
        if not connection.transport.is_closing() and _is_unread(connection.transport):
            logs.event("slow_reader_left", idle=True)
            reset(connection.transport)
        else:
            idle(connection)

    protocol.timeout_keep_alive_handler = timeout_keep_alive_handler


def _bound_heads(protocol: Any, limits: LimitsConfig) -> None:
    """Have uvicorn bound the bytes in which no head becomes whole and no byte of a body comes."""
    limit = limits.max_header_bytes + limits.max_headers * _BETWEEN_BYTES + _REQUEST_LINE_BYTES
    answer = _written_out(
        http_errors.too_many_headers(
            f"the request line and the headers are more than {limit} bytes, by limits.max_header_bytes"
        )
    )
    received = protocol.data_received

    def going_on(callback: Callable[..., None]) -> Callable[..., None]:
        def called(connection: Any, *given: bytes) -> None:
            connection._slackserve_head_bytes = 0  # noqa: SLF001 - ours
            callback(connection, *given)

        return called

    def data_received(connection: Any, data: bytes) -> None:
        while data and not connection.transport.is_closing():
            if (size := limit - connection._slackserve_head_bytes) <= 0:  # noqa: SLF001
                leave(connection)
                return
            piece, data = data[:size], data[size:]
            connection._slackserve_head_bytes += len(piece)  # noqa: SLF001
            received(connection, piece)

    def leave(connection: Any) -> None:
        logs.event("large_head_left", limit_bytes=limit)
        if waits(connection) and not _is_unread(connection.transport):
            connection.transport.write(answer)
            connection.transport.close()
        else:
            reset(connection.transport)

    protocol._slackserve_head_bytes = 0  # noqa: SLF001
    protocol.data_received = data_received
    protocol.on_headers_complete = going_on(protocol.on_headers_complete)
    protocol.on_body = going_on(protocol.on_body)


def _one_at_a_time(protocol: Any) -> None:
    """Have uvicorn close a connection once it has answered, if another request came before that.

    It would keep the other, read no further, and tell the newest alone that the client has gone: the one that
    is being answered would be generated to its end for nobody.
    """
    began, received = protocol.on_headers_complete, protocol.data_received

    def on_headers_complete(connection: Any) -> None:
        if waits(connection):
            began(connection)
        elif not connection._slackserve_ends:  # noqa: SLF001 - ours
            logs.event("pipelined_request_left")
            connection._slackserve_ends = True  # noqa: SLF001
            connection.cycle.keep_alive = False

    def unless_it_ends(callback: Callable[..., None]) -> Callable[..., None]:
        def called(connection: Any, *given: bytes) -> None:
            if not connection._slackserve_ends:  # noqa: SLF001
                callback(connection, *given)

        return called

    protocol._slackserve_ends = False  # noqa: SLF001
    protocol.on_headers_complete = on_headers_complete
    protocol.data_received = unless_it_ends(received)
    protocol.on_body = unless_it_ends(protocol.on_body)
    protocol.on_message_complete = unless_it_ends(protocol.on_message_complete)


def _written_out(refusal: HTTPError) -> bytes:
    """An answer as it goes over the connection, where no request is there to be answered."""
    response = refusal.response()
    status = HTTPStatus(refusal.status)
    return b"\r\n".join(
        [
            f"HTTP/1.1 {status.value} {status.phrase}".encode(),
            *(name + b": " + value for name, value in response.raw_headers),
            b"connection: close",
            b"",
            bytes(response.body),
        ]
    )


def _bound_headers(protocol: Any, timeout_s: float) -> None:
    """Have uvicorn bound how long headers take, and what the kernel holds of an answer."""
    made, received = protocol.connection_made, protocol.data_received

    def watch(connection: Any) -> None:
        timer = getattr(connection, "_slackserve_timer", None)
        if not waits(connection):
            if timer is not None:
                timer.cancel()
                connection._slackserve_timer = None  # noqa: SLF001 - ours
        elif timer is None:
            connection._slackserve_timer = connection.loop.call_later(timeout_s, late, connection)  # noqa: SLF001

    def late(connection: Any) -> None:
        connection._slackserve_timer = None  # noqa: SLF001
        if waits(connection) and not connection.transport.is_closing():
            logs.event("slow_headers_left", limit_s=timeout_s)
            connection.transport.close()

    def connection_made(connection: Any, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        connection._slackserve_since_s = time.monotonic()  # noqa: SLF001
        made(connection, transport)
        watch(connection)

    def data_received(connection: Any, data: bytes) -> None:
        received(connection, data)
        watch(connection)

    protocol.connection_made, protocol.data_received = connection_made, data_received
