"""What a process that holds clients' connections does for clients that send or read slowly, or never leave.

That is an ingress behind a `deployments.http.door`, or Serve's HTTP proxy, which calls `middlewares`
(`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`) and has the limits in its environment. Serve hands a request to
its replica before the body is here, and the replica asks the proxy for each piece; with about a thousand such
bodies under way nobody is answered any more. So a request goes on only once it is whole. uvicorn also waits
for ever for headers and for readers, and takes headers and URLs of any size: what it is made to bound is in
`deployments.http.connecting.bounds`. What a request is worth is the gatekeeper's to say, further in.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import uuid
import weakref
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError
from starlette.middleware import Middleware
from starlette.responses import JSONResponse

from deployments.config import ConfigError
from deployments.config.limits import LimitsConfig, may_read_for_s
from deployments.http import errors as http_errors
from deployments.http.connecting.bounds import age_s, bound_connections, reset
from deployments.http.connecting.lengths import is_longer
from deployments.http.connecting.origins import readable_by_pages
from slo.errors import FieldError
from slo.files.strict_yaml import explain
from telemetry import logs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from deployments.http.errors import HTTPError

IMPORT_PATH: Final = "deployments.http.proxy:middlewares"
_TO_SERVE: Final = frozenset({b"serve-multiplexed-model-id", b"x-session-id"})
"""Serve's proxy goes by them, with underscores as well, when it chooses an ingress."""
_READY: Final = "/ready"
_PROXYS_HEALTH: Final = "/-/healthz"
_CLOSE: Final = (b"connection", b"close")
"""uvicorn closes the connection behind an answer with this header."""
_PART_BYTES: Final = 64 * 1024
LIMITS_VARIABLE: Final = "SLACKSERVE_LIMITS"
"""The section `limits` as JSON; without it, or where it is empty, the defaults hold."""


def middlewares() -> list[Middleware]:
    """What stands before each request in this proxy; also bounds how long headers may take.

    Raises:
        ConfigError: the environment's limits are none.
    """
    limits = _limits(os.environ.get(LIMITS_VARIABLE, "").strip() or "{}")
    bound_connections(limits)
    return [
        Middleware(ReadyUntilDrained),
        Middleware(ConnectionLimits, limits=limits),
    ]  # the last is before all


def _limits(text: str) -> LimitsConfig:
    try:
        limits = LimitsConfig.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(explain(error, LIMITS_VARIABLE)) from None
    json.loads(text, object_pairs_hook=_refuse_twice)
    return limits


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    """Of a key that is given twice, pydantic takes the last."""
    keys = [key for key, _ in pairs]
    if (twice := next((key for key in keys if keys.count(key) > 1), None)) is not None:
        raise ConfigError(f"{LIMITS_VARIABLE}: the key {twice!r} is given twice")


def bounded(app: ASGIApp, limits: LimitsConfig) -> ConnectionLimits:
    """The application with the same before it, for a server of uvicorn's in this process."""
    bound_connections(limits)
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
        if exchange.refusal is not None:
            pass
        elif is_longer(scope["headers"], self._limits.max_body_bytes):
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
        await readable_by_pages(refusal.response(scope["path"]), self._limits)(scope, receive, send)

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
        self._body = io.BytesIO()
        """What has come of it, until it is whole."""
        self._pieces: list[Message] = []
        """The whole body and its end, to be handed on."""
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
                        self._take(message.get("body", b""))
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            if self.refusal is None:
                self.refusal = http_errors.too_slow(limits.body_timeout_s)
        finally:
            self._all.is_whole(self)
        if self.refusal is not None:
            self.drop()
            return False
        if self._size:
            body = self._body.getvalue()  # no copy
            self._pieces.append({"type": "http.request", "body": body, "more_body": True})
            self._body = io.BytesIO()
        # Apart: Serve's proxy keeps the last piece for as long as it waits for another.
        self._pieces.append({"type": "http.request", "body": b"", "more_body": False})
        return True

    def _take(self, piece: bytes) -> None:
        """Keep a piece with those before it: each may be a single byte, and would cost hundreds by itself."""
        if self._size + len(piece) > (limit := self._all.limits.max_body_bytes):
            self.refusal = http_errors.too_large(limit)
        else:
            self._body.write(piece)
            self._size += len(piece)
            self._all.takes(len(piece))

    def give_up(self, why: HTTPError) -> None:
        """Refuse a request that is not whole; its bytes are held no more, and its task goes on soon."""
        if self._size and self.refusal is None:
            self.refusal = why
            self.drop()
            assert self._until is not None
            if not self._until.expired():  # otherwise its task is about to go on anyway
                self._until.reschedule(asyncio.get_running_loop().time())

    async def receive(self) -> Message:
        """The body, its end, and then whatever else the client does."""
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
        limit_s = may_read_for_s(self._all.limits.write_timeout_s, len(message.get("body", b"")))
        transport = getattr(self._send, "__self__").transport  # noqa: B009 - a bound method of uvicorn's
        if message["type"] == "http.response.start" and age_s(transport) > self._all.limits.connection_age_s:
            message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
        try:
            async with asyncio.timeout(limit_s):
                for part in _parts(message):
                    await self._send(part)
        except TimeoutError:
            logs.event("slow_reader_left", limit_s=limit_s)
            # The server then says that the client has gone, and Serve cancels the request as for any other.
            reset(transport)

    def drop(self) -> None:
        """Nothing of the body is held any more."""
        self._body = io.BytesIO()
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


def _parts(message: Message) -> Iterator[Message]:
    """A piece of an answer as several: uvicorn waits for a slow reader before each, not after the last."""
    body = message.get("body", b"")
    last = max(0, len(body) - 1) // _PART_BYTES * _PART_BYTES
    for begin in range(0, last, _PART_BYTES):
        yield {**message, "body": body[begin : begin + _PART_BYTES], "more_body": True}
    yield {**message, "body": body[last:]} if last else message


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
