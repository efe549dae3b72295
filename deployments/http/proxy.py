"""What a process that holds clients' connections does for clients that send or read slowly, or never leave.

That is an ingress behind a `deployments.http.door`, or Serve's HTTP proxy, which calls `middlewares`
(`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`) and has the limits in its environment. Serve hands a request to
its replica before the body is here, and the replica asks the proxy for each piece; with about a thousand such
bodies under way nobody is answered any more. So a request goes on only once it is whole. uvicorn also waits
for ever for headers and for readers, and takes headers and URLs of any size. What a request is worth is the
gatekeeper's to say, further in.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import termios
import time
import uuid
import weakref
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deployments.config.limits import LimitsConfig
from deployments.http import errors as http_errors
from slo.errors import FieldError
from telemetry import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from deployments.http.errors import HTTPError

IMPORT_PATH: Final = "deployments.http.proxy:middlewares"
_SEND_BUFFER_BYTES: Final = 64 * 1024
"""Of what a client has not read, in the kernel, which would take megabytes, so that no reader looked slow."""
_REQUEST_LINE_BYTES: Final = 8 * 1024
_BETWEEN_BYTES: Final = len(b": \r\n")
"""What a header has besides its name and its value."""
_TO_SERVE: Final = frozenset({b"serve-multiplexed-model-id", b"x-session-id"})
"""Serve's proxy goes by them, with underscores as well, when it chooses an ingress."""
_DROP: Final = struct.pack("ii", 1, 0)
_NOTHING: Final = struct.pack("i", 0)
_READY: Final = "/ready"
_PROXYS_HEALTH: Final = "/-/healthz"
_CLOSE: Final = (b"connection", b"close")
"""uvicorn closes the connection behind an answer with this header."""
LIMITS_VARIABLE: Final = "SLACKSERVE_LIMITS"
"""The section `limits` as JSON; without it the defaults hold."""


def middlewares() -> list[Middleware]:
    """What stands before each request in this proxy; also bounds how long headers may take."""
    limits = LimitsConfig.model_validate_json(os.environ.get(LIMITS_VARIABLE, "{}"))
    _bound_connections(limits)
    return [
        Middleware(ReadyUntilDrained),
        Middleware(ConnectionLimits, limits=limits),
    ]  # the last is before all


def bounded(app: ASGIApp, limits: LimitsConfig) -> ConnectionLimits:
    """The application with the same before it, for a server of uvicorn's in this process."""
    _bound_connections(limits)
    return ConnectionLimits(app, limits)


class ReadyUntilDrained:
    """Answers `/ready` for a proxy that Serve drains, or that knows of no replica: nobody else may connect.

    The ingress that would answer knows nothing of the proxy on the way, and Serve ends that, with its port.

    Args:
        app: Serve's proxy, which says so of itself under another path.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; part of ASGI."""
        if scope["type"] != "http" or scope["path"] != _READY or await self._is_healthy(scope, receive):
            await self._app(scope, receive, send)
            return
        body = {"status": "not ready", "reason": "the proxy of this node is draining, or knows of no replica"}
        await JSONResponse(body, 503)(scope, receive, send)

    async def _is_healthy(self, scope: Scope, receive: Receive) -> bool:
        is_healthy = False

        async def hear(message: Message) -> None:
            nonlocal is_healthy
            is_healthy = is_healthy or message.get("status") == HTTPStatus.OK

        await self._app({**scope, "path": _PROXYS_HEALTH}, receive, hear)
        return is_healthy


class ConnectionLimits:
    """Bounds what each request, and all of a proxy together, may hold and for how long.

    Args:
        app: What is behind: Serve's proxy, or the ingress.
        limits: What a client may send.
    """

    def __init__(self, app: ASGIApp, limits: LimitsConfig) -> None:
        self._app = app
        self._limits = limits
        self._in_flight_bytes = 0
        self._arriving: dict[_Exchange, None] = {}
        """Requests that are not whole yet, the oldest first."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; part of ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(self, receive, send)
        if (odd := _not_text(scope["headers"])) is not None:
            exchange.refusal = http_errors.bad_field(FieldError(odd, "is not UTF-8", "send text"))
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if exchange.refusal is not None:
            pass
        elif length.isdigit() and int(length) > self._limits.max_body_bytes:
            exchange.refusal = http_errors.too_large(self._limits.max_body_bytes)
        else:
            try:
                if await exchange.arrived():
                    await self._app(_without_choice(scope), exchange.receive, exchange.send)
            finally:
                exchange.drop()
        if exchange.refusal is not None and not exchange.started:
            await self._refuse(exchange.refusal, scope, receive, exchange.written)

    async def _refuse(self, refusal: HTTPError, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if given.isascii() and given.isprintable() and given else uuid.uuid4().hex
        # Without closing: what is still under way would reset the connection before the client has read why.
        # It is read and forgotten, for as long as headers may take.
        refusal.headers["x-request-id"] = request_id[:128]
        logs.event(
            "request_refused",
            request_id=request_id[:128],
            path=scope["path"][:200],
            status=refusal.status,
            code=refusal.code,
            why=refusal.message,
        )
        await refusal.response()(scope, receive, send)

    def begins(self, exchange: _Exchange) -> None:
        """A request comes that is not whole."""
        self._arriving[exchange] = None

    def is_whole(self, exchange: _Exchange) -> None:
        """Nothing more of a request comes, or is waited for."""
        self._arriving.pop(exchange, None)

    def takes(self, size: int) -> None:
        """Count bytes that have arrived; when they are too many, give up what has been on its way longest.

        Whoever sends slowly, with or without a key, would otherwise keep all others from sending.
        """
        self._in_flight_bytes += size
        limit = self._limits.max_bytes_in_flight
        if self._in_flight_bytes <= limit:
            return
        for oldest in self._arriving:  # none leaves before its task goes on
            oldest.give_up(http_errors.too_much_in_flight(limit))
            if self._in_flight_bytes <= limit:
                return

    def gives_back(self, size: int) -> None:
        """Bytes are held no more."""
        self._in_flight_bytes -= size

    @property
    def limits(self) -> LimitsConfig:
        """What holds here."""
        return self._limits


class _Exchange:
    """One request: what it has sent, until when the rest may come, and whether it is answered."""

    def __init__(self, all_: ConnectionLimits, receive: Receive, send: Send) -> None:
        self._all = all_
        self._receive = receive
        self._send = send
        self._pieces: list[Message] = []
        self._size = 0
        """Of what has not been handed on."""
        self._handed_on: list[weakref.finalize[[int], _Piece]] = []
        self._until: asyncio.Timeout | None = None
        self.started = False
        self.refusal: HTTPError | None = None

    async def arrived(self) -> bool:
        """Wait until the body is here; False when it is refused, or its client has gone."""
        limits = self._all.limits
        self._all.begins(self)
        try:
            async with asyncio.timeout(limits.body_timeout_s) as self._until:
                while self.refusal is None:
                    message = await self._receive()
                    if message["type"] != "http.request":
                        return False
                    if self.refusal is None:  # it has not been given up meanwhile
                        self._pieces.append(message)
                        self._take(len(message.get("body", b"")))
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            if self.refusal is None:
                self.refusal = http_errors.too_slow(limits.body_timeout_s)
        finally:
            self._all.is_whole(self)
        if self.refusal is not None:
            self.drop()
        elif self._size:  # Serve's proxy keeps the last piece for as long as it waits for another
            self._pieces = [*({**piece, "more_body": True} for piece in self._pieces), _end_of_body()]
        return self.refusal is None

    def _take(self, size: int) -> None:
        if self._size + size > (limit := self._all.limits.max_body_bytes):
            self.refusal = http_errors.too_large(limit)
        else:
            self._size += size
            self._all.takes(size)

    def give_up(self, why: HTTPError) -> None:
        """Refuse a request that is not whole; its bytes are held no more, and its task goes on soon."""
        if self._size and self.refusal is None:
            self.refusal = why
            self.drop()
            assert self._until is not None
            self._until.reschedule(asyncio.get_running_loop().time())

    async def receive(self) -> Message:
        """The pieces of the body, and then whatever else the client does."""
        if not self._pieces:
            return await self._receive()
        piece = _Piece(self._pieces.pop(0))
        size = len(piece.get("body", b""))
        self._size -= size
        self._handed_on.append(weakref.finalize(piece, self._all.gives_back, size))
        return piece

    async def send(self, message: Message) -> None:
        """Pass a piece of the answer on, unless the request has been refused here."""
        if self.refusal is None:
            self.started = True
            await self.written(message)

    async def written(self, message: Message) -> None:
        """Give a piece of the answer to the client, and leave a client that does not take it."""
        limit_s = self._all.limits.write_timeout_s
        transport = getattr(self._send, "__self__").transport  # noqa: B009 - a bound method of uvicorn's
        if message["type"] == "http.response.start" and self._is_old(transport):
            message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
        try:
            async with asyncio.timeout(limit_s):
                await self._send(message)
        except TimeoutError:
            logs.event("slow_reader_left", limit_s=limit_s)
            # The server then says that the client has gone, and Serve cancels the request as for any other.
            _reset(transport)
        if transport.is_closing():  # once everything is written, which may be never
            asyncio.get_running_loop().call_later(limit_s, _end, transport)

    def _is_old(self, transport: Any) -> bool:
        since_s = transport.get_protocol()._slackserve_since_s  # noqa: SLF001 - ours
        return bool(time.monotonic() - since_s > self._all.limits.connection_age_s)

    def drop(self) -> None:
        """Nothing of the body is held any more."""
        self._pieces.clear()
        self._all.gives_back(self._size)
        self._size = 0
        for give_back in self._handed_on:
            give_back()  # once, if nobody has before


class _Piece(dict[str, Any]):
    """A piece of a body that was handed on, and counts for as long as anybody in this process has it.

    Serve's proxy has it until the ingress has fetched it, as a plain message, which may never be.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _end_of_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


def _not_text(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The name of a header that Serve's proxy would fail to read."""
    for name, value in headers:
        try:
            name.decode(), value.decode()
        except UnicodeDecodeError:
            return name.decode("latin-1")
    return None


def _without_choice(scope: Scope) -> Scope:
    """A request without the headers by which its client would have a say in Serve's choice of an ingress."""
    kept = [header for header in scope["headers"] if header[0].lower().replace(b"_", b"-") not in _TO_SERVE]
    return scope if len(kept) == len(scope["headers"]) else {**scope, "headers": kept}


def _reset(transport: Any) -> None:
    """Close a connection and drop what its client has not read: the kernel would keep it as long as that."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP)
    transport.abort()


def _end(transport: Any) -> None:
    """End the closing of a connection that waits for its client to read."""
    if transport.get_extra_info("socket").fileno() >= 0 and transport.get_write_buffer_size():
        logs.event("slow_reader_left", closing=True)
        _reset(transport)


def _is_unread(transport: Any) -> bool:
    """Whether a client has not taken all that was sent, in this process or in the kernel."""
    if transport.get_write_buffer_size():
        return True
    unsent = fcntl.ioctl(transport.get_extra_info("socket"), termios.TIOCOUTQ, _NOTHING)
    return unsent != _NOTHING


def _bound_connections(limits: LimitsConfig) -> None:
    _bound_heads(HttpToolsProtocol, limits)  # h11 has a limit of its own
    for protocol in (HttpToolsProtocol, H11Protocol):
        _bound_headers(protocol, limits.header_timeout_s)
        _bound_idle(protocol)
    _one_at_a_time(HttpToolsProtocol)  # h11 has the one alone


def _bound_idle(protocol: Any) -> None:
    """Have uvicorn end an idle connection for its client too, if that has not read everything."""
    idle = protocol.timeout_keep_alive_handler

    def timeout_keep_alive_handler(connection: Any) -> None:
        if not connection.transport.is_closing() and _is_unread(connection.transport):
            logs.event("slow_reader_left", idle=True)
            _reset(connection.transport)
        else:
            idle(connection)

    protocol.timeout_keep_alive_handler = timeout_keep_alive_handler


def _waits(connection: Any) -> bool:
    """Whether no request of a connection is being answered."""
    return connection.cycle is None or connection.cycle.response_complete


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
        if _waits(connection) and not _is_unread(connection.transport):
            connection.transport.write(answer)
            connection.transport.close()
        else:
            _reset(connection.transport)

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
        if _waits(connection):
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
        if not _waits(connection):
            if timer is not None:
                timer.cancel()
                connection._slackserve_timer = None  # noqa: SLF001 - ours
        elif timer is None:
            connection._slackserve_timer = connection.loop.call_later(timeout_s, late, connection)  # noqa: SLF001

    def late(connection: Any) -> None:
        connection._slackserve_timer = None  # noqa: SLF001
        if _waits(connection) and not connection.transport.is_closing():
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
