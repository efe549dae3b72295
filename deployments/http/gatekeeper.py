"""What happens to every HTTP request before it reaches a route: an id, limits of size and time, an API key.

Also counts and logs the requests that were refused, here or further in, in one place.

Plain ASGI, so that streaming and client disconnects pass through untouched.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

from ray.exceptions import TaskCancelledError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from deployments.config.limits import LimitsConfig
from deployments.http import errors as http_errors
from deployments.http.connecting.lengths import is_longer
from deployments.http.connecting.origins import other_origin
from deployments.http.errors import HTTPError
from deployments.http.key_watch import KeysNotReadError, KeyWatch
from slo.errors import AuthenticationError, FieldError
from slo.request import INTERNAL_HEADER_PREFIX, REQUEST_ID_HEADER
from telemetry import logs
from telemetry.catalogue import REJECTIONS, REQUESTS
from telemetry.instruments import Instruments

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


SERVER_ID_HEADER: Final = "x-slackserve-id"
"""On every answer: the id that the server gave the request, which no client can choose."""
_HEALTH: Final = "/health"
OPEN_PATHS: Final = frozenset({_HEALTH, "/ready"})
"""Paths that need no API key; without one they tell less."""
_SERVER_ID_HEADER: Final = SERVER_ID_HEADER.encode()
_REQUEST_ID: Final = re.compile(r"[\w.:\-]{1,128}", re.ASCII)
_PROXY_HEADERS: Final = frozenset({"x-request-timeout-seconds", "x-request-disconnect-disabled"})
"""Ray Serve's proxy obeys them: a client could have its work go on after it has left."""
_COMPRESSED: Final = frozenset({"gzip", "x-gzip", "deflate", "br", "zstd", "compress", "x-compress"})
"""Content codings; some clients name a charset in their place, and send the body as it is."""
_VALID_REQUEST_ID: Final = "use up to 128 letters, digits or one of _ . : -"


class Gatekeeper:
    """Gives each request its id and tenant (in `request.state`), or refuses it.

    Serve's proxy has given the request an id already if the client gave none, and puts it on the response.

    Args:
        app: The application behind.
        keys: Known API keys.
        limits: What a client may send.
    """

    def __init__(self, app: ASGIApp, keys: KeyWatch, limits: LimitsConfig) -> None:
        self._app = app
        self._keys = keys
        self._limits = limits
        self._instruments: Instruments | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection; part of ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = [_header(name, value) for name, value in scope["headers"]]
        state = scope.setdefault("state", {})
        state["request_id"] = state["server_id"] = secrets.token_hex(8)
        state["headers"] = headers
        started = False

        async def note_start(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (_SERVER_ID_HEADER, state["server_id"].encode())]
            await send(message)

        try:
            state["request_id"] = _request_id(scope["headers"]) or state["request_id"]
            self._check(scope, headers, state)
            body = await self._body(receive)
            await self._app(scope, body.receive, note_start)
        except (TaskCancelledError, ClientDisconnect):
            return  # the client is gone; Serve says so to those that served it
        except Exception as error:
            if started:
                raise
            state["refusal"] = as_http_error(error, state["request_id"])
            await state["refusal"].response(scope["path"])(scope, receive, note_start)
        if (refusal := state.get("refusal")) is not None:
            self._account(refusal, scope["path"], state)

    def _account(self, refusal: HTTPError, path: str, state: dict[str, Any]) -> None:
        """Count a refusal, and log whose it was and why; never the key."""
        tenant, tier, model = state.get("tenant"), state.get("tier", "none"), state.get("model", "none")
        logs.event(
            "request_refused",
            level=logging.WARNING,
            request_id=state["request_id"],
            server_id=state["server_id"],
            tenant=None if tenant is None else tenant.name,
            key_name=None if tenant is None else tenant.key_name,
            model=model,
            tier=tier,
            path=path[:200],
            status=refusal.status,
            code=refusal.code,
            param=refusal.param,
            why=refusal.message[:500],
        )
        if refusal.outcome is None:
            return
        if self._instruments is None:  # in the replica's process, not where the application is built
            self._instruments = Instruments(REQUESTS, REJECTIONS)
        self._instruments.count(REQUESTS, model=model, tier=tier, outcome=refusal.outcome.value)
        self._instruments.count(REJECTIONS, model=model, tier=tier, reason=refusal.code or "unknown")

    async def _body(self, receive: Receive) -> _Body:
        limits = self._limits
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                return await _Body.read(receive, limits.max_body_bytes)
        except TimeoutError:
            raise http_errors.too_slow(limits.body_timeout_s) from None

    def _check(self, scope: Scope, headers: list[tuple[str, str]], state: dict[str, object]) -> None:
        limits = self._limits
        for what, found, name in (
            ("headers", len(headers), "max_headers"),
            ("bytes", sum(len(name) + len(value) for name, value in headers), "max_header_bytes"),
        ):
            if found > (limit := getattr(limits, name)):
                raise http_errors.too_many_headers(
                    f"the headers are {found} {what}; limits.{name} allows {limit}"
                )
        for name, _ in headers:
            if name in _PROXY_HEADERS or name.startswith(INTERNAL_HEADER_PREFIX):
                raise _refused(name, "is set by the server itself", "leave it out")
        by_name = dict(headers)
        if scope["method"] == "POST" and (origin := other_origin(by_name, limits)) is not None:
            raise http_errors.origin_not_allowed(origin)
        try:
            state["tenant"] = self._keys.ring.tenant(_key(headers), time.time())
        except AuthenticationError as error:
            if scope["path"] not in OPEN_PATHS:
                raise http_errors.unauthorized(error) from None
            state["tenant"] = None
        except KeysNotReadError:
            if scope["path"] != _HEALTH:  # who lets nobody in is not ready
                raise http_errors.keys_not_read() from None
            state["tenant"] = None
        self._check_body(scope, by_name.get("content-encoding", ""))

    def _check_body(self, scope: Scope, encoding: str) -> None:
        """Refuse a body that cannot be read, by what the headers say of it."""
        if not _COMPRESSED.isdisjoint(coding.strip().lower() for coding in encoding.split(",")):
            raise http_errors.encoded(encoding)
        if is_longer(scope["headers"], self._limits.max_body_bytes):
            raise http_errors.too_large(self._limits.max_body_bytes)


class _Body:
    """A request body that was read ahead, and a `receive` that gives it out once, as one piece."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    @classmethod
    async def read(cls, receive: Receive, max_bytes: int) -> _Body:
        """Read the whole body.

        Raises:
            HTTPError: 413 as soon as it is larger than `max_bytes`.
            ClientDisconnect: The client has left before its end.
        """
        pieces: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > max_bytes:
                raise http_errors.too_large(max_bytes)
            more = message.get("more_body", False)
        return cls(b"".join(filter(None, pieces)), receive)  # one alone is not copied

    async def receive(self) -> Message:
        """Part of ASGI."""
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def as_http_error(error: Exception, request_id: str) -> HTTPError:
    """What an exception is answered with; one that nobody expected is logged and answered with 500."""
    match error:
        case http_errors.HTTPError():
            return error
        case FieldError():
            return http_errors.bad_field(error)
        case HTTPException():
            return http_errors.no_route(error.status_code, str(error.detail), error.headers)
    logs.event("route_failed", level=logging.ERROR, request_id=request_id, error=repr(error)[:2000])
    return http_errors.internal_error(request_id)


async def answer_refusal(request: Request, error: Exception) -> Response:
    """Answer an expected exception of a route, and leave word for the gatekeeper."""
    request.state.refusal = as_http_error(error, request.state.request_id)
    return request.state.refusal.response(request.url.path)  # type: ignore[no-any-return]


def _header(name: bytes, value: bytes) -> tuple[str, str]:
    """A header with its name as it should be spelt: some proxies write underscores."""
    return name.decode("latin-1").lower().replace("_", "-"), value.decode("latin-1")


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The id that a request has been given; with an underscore in it the name is another one.

    Whoever adds one to a request without an id, as Serve's proxy does, looks for this spelling too.
    """
    named = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]
    given = [value for name, value in named if name == REQUEST_ID_HEADER]
    if not given:
        return None
    if len(set(given)) > 1:
        raise _refused(REQUEST_ID_HEADER, "is given more than once", "give it once")
    return usable_id(given[0], REQUEST_ID_HEADER)


def usable_id(value: str, field: str) -> str:
    """What a client calls its request.

    Raises:
        HTTPError: 400 when it is not usable as an id.
    """
    if not _REQUEST_ID.fullmatch(value):
        raise _refused(field, "is not usable as an id", _VALID_REQUEST_ID)
    return value


def _key(headers: list[tuple[str, str]]) -> str | None:
    """The API key: as OpenAI's clients send it, or else as Anthropic's do."""
    for name, value in headers:
        if name == "authorization":
            scheme, _, key = value.partition(" ")
            return key.strip() if scheme.lower() == "bearer" and key.strip() else None
    return next((value.strip() for name, value in headers if name == "x-api-key" and value.strip()), None)


def _refused(field: str, problem: str, valid: str) -> HTTPError:
    return http_errors.bad_field(FieldError(field, problem, valid))
