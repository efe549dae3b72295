"""What happens to every HTTP request before it reaches a route: an id, a size limit, an API key.

Also counts the requests that were refused, here or further in, in one place.

Plain ASGI, so that streaming and client disconnects pass through untouched.
"""

from __future__ import annotations

import logging
import re
import uuid
from typing import TYPE_CHECKING, Final

from ray.exceptions import TaskCancelledError
from starlette.exceptions import HTTPException

from deployments.http import errors as http_errors
from slo.errors import AuthenticationError, FieldError
from slo.request import INTERNAL_HEADER_PREFIX
from telemetry import logs
from telemetry.catalogue import REJECTIONS, REQUESTS
from telemetry.instruments import Instruments

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from deployments.http.errors import HTTPError
    from slo.admission.tenants import KeyRing

REQUEST_ID_HEADER: Final = "x-request-id"
OPEN_PATHS: Final = frozenset({"/health", "/ready"})
"""Paths that need no API key."""
_REQUEST_ID: Final = re.compile(r"[\w.:\-]{1,128}", re.ASCII)
_VALID_REQUEST_ID: Final = "use up to 128 letters, digits or one of _ . : -"


class Gatekeeper:
    """Gives each request its id and tenant (in `request.state`), or refuses it.

    Serve's proxy has given the request an id already if the client gave none, and puts it on the response.

    Args:
        app: The application behind.
        keys: Known API keys.
        max_body_bytes: Largest body accepted.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, max_body_bytes: int) -> None:
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._instruments: Instruments | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection; part of ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = [_header(name, value) for name, value in scope["headers"]]
        state = scope.setdefault("state", {})
        state["request_id"] = uuid.uuid4().hex
        state["headers"] = headers
        started = False

        async def note_start(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            state["request_id"] = _request_id(headers) or state["request_id"]
            self._check(scope, headers, state)
            body = await _Body.read(receive, self._max_body_bytes)
            await self._app(scope, body.receive, note_start)
        except TaskCancelledError:
            return  # the client is gone; Serve says so to those that served it
        except Exception as error:
            if started:
                raise
            state["refusal"] = as_http_error(error, state["request_id"])
            await state["refusal"].response()(scope, receive, send)
        if (refusal := state.get("refusal")) is not None:
            self._count(refusal, state.get("tier", "none"))

    def _count(self, refusal: HTTPError, tier: str) -> None:
        if refusal.outcome is None:
            return
        if self._instruments is None:  # in the replica's process, not where the application is built
            self._instruments = Instruments(REQUESTS, REJECTIONS)
        self._instruments.count(REQUESTS, tier=tier, outcome=refusal.outcome.value)
        self._instruments.count(REJECTIONS, tier=tier, reason=refusal.code or "unknown")

    def _check(self, scope: Scope, headers: list[tuple[str, str]], state: dict[str, object]) -> None:
        for name, _ in headers:
            if name.startswith(INTERNAL_HEADER_PREFIX):
                raise _refused(name, "is set by the server itself", "leave it out")
        try:
            key = None if scope["path"] in OPEN_PATHS else _bearer(headers)
            state["tenant"] = None if scope["path"] in OPEN_PATHS else self._keys.tenant(key)
        except AuthenticationError as error:
            raise http_errors.unauthorized(error) from None
        length = dict(headers).get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length) > self._max_body_bytes:
            raise http_errors.too_large(self._max_body_bytes)


class _Body:
    """A request body that was read ahead, and a `receive` that gives it out once."""

    def __init__(self, messages: list[Message], receive: Receive) -> None:
        self._messages = messages
        self._receive = receive

    @classmethod
    async def read(cls, receive: Receive, max_bytes: int) -> _Body:
        """Read the whole body.

        Raises:
            HTTPError: 413 as soon as it is larger than `max_bytes`.
        """
        messages: list[Message] = []
        size = 0
        while True:
            message = await receive()
            messages.append(message)
            size += len(message.get("body", b""))
            if size > max_bytes:
                raise http_errors.too_large(max_bytes)
            if message["type"] != "http.request" or not message.get("more_body", False):
                return cls(messages, receive)

    async def receive(self) -> Message:
        """Part of ASGI."""
        return self._messages.pop(0) if self._messages else await self._receive()


def as_http_error(error: Exception, request_id: str) -> HTTPError:
    """What an exception is answered with; one that nobody expected is logged and answered with 500."""
    match error:
        case http_errors.HTTPError():
            return error
        case FieldError():
            return http_errors.bad_field(error)
        case HTTPException():
            return http_errors.no_route(error.status_code, str(error.detail))
    logs.event("route_failed", level=logging.ERROR, request_id=request_id, error=repr(error)[:2000])
    return http_errors.internal_error(request_id)


async def answer_refusal(request: Request, error: Exception) -> Response:
    """Answer an expected exception of a route, and leave word for the gatekeeper."""
    request.state.refusal = as_http_error(error, request.state.request_id)
    return request.state.refusal.response()  # type: ignore[no-any-return]


def _header(name: bytes, value: bytes) -> tuple[str, str]:
    """A header with its name as it should be spelt: some proxies write underscores."""
    return name.decode("latin-1").lower().replace("_", "-"), value.decode("latin-1")


def _request_id(headers: list[tuple[str, str]]) -> str | None:
    given = [value for name, value in headers if name == REQUEST_ID_HEADER]
    if not given:
        return None
    if len(set(given)) > 1:
        raise _refused(REQUEST_ID_HEADER, "is given more than once", "give it once")
    if not _REQUEST_ID.fullmatch(given[0]):
        raise _refused(REQUEST_ID_HEADER, "is not usable as an id", _VALID_REQUEST_ID)
    return given[0]


def _bearer(headers: list[tuple[str, str]]) -> str | None:
    for name, value in headers:
        if name == "authorization":
            scheme, _, key = value.partition(" ")
            return key.strip() if scheme.lower() == "bearer" and key.strip() else None
    return None


def _refused(field: str, problem: str, valid: str) -> HTTPError:
    return http_errors.bad_field(FieldError(field, problem, valid))
