"""One exchange with the HTTP API's application in the process, and what its answer means in gRPC's words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import grpc

from deployments.config.limits import may_read_for_s
from deployments.http.gatekeeper import SERVER_ID_HEADER
from telemetry import logs

if TYPE_CHECKING:
    from ray.serve.grpc_util import RayServegRPCContext
    from starlette.types import ASGIApp, Message

_OK: Final = 200
_STATUS: Final = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    431: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_STATUS_OF_TYPE: Final = {
    "invalid_request_error": grpc.StatusCode.INVALID_ARGUMENT,
    "overloaded_error": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "rate_limit_error": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "service_unavailable": grpc.StatusCode.UNAVAILABLE,
}
"""Of an error that comes after the answer has begun and so has no HTTP status."""
SERVES_ID: Final = "request_id"
"""A trailer that Serve sets itself: the id that it gave the request."""
_AHEAD_BYTES: Final = 64 * 1024
"""So much of an answer may wait for its client, as in the kernel over HTTP, and one piece more."""
_EVENT_END: Final = b"\n\n"
_COMMENT: Final = b":"
"""Before what keeps a connection over HTTP open (`limits.sse_keep_alive_s`)."""
_DONE: Final = b"[DONE]"
_DETAILS_BYTES: Final = 1500
"""Of a message: gRPC's peers refuse trailers of 8 KiB, in which each byte may take three."""


@dataclass(frozen=True, slots=True)
class Head:
    """How an HTTP answer begins."""

    status: int
    headers: Mapping[str, str]

    @property
    def is_ok(self) -> bool:
        """Whether the answer is one."""
        return self.status == _OK


class SlowReaderError(Exception):
    """A client has not read its answer for too long, and its request has been cancelled."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the answer was not read for {limit_s:g} s, by limits.write_timeout_s")


class _Unread:
    """What an application has sent and nobody has taken; with much of it the application waits."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._bytes = 0
        self._taken = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is there, neither a message nor the end."""
        return self._messages.empty()

    async def put(self, message: Message) -> None:
        """Add a message, and wait until there is room for another."""
        self._messages.put_nowait(message)
        self._bytes += len(message.get("body", b""))
        while self._bytes > _AHEAD_BYTES:
            self._taken.clear()
            await self._taken.wait()

    def end(self) -> None:
        """There will be no more messages."""
        self._messages.put_nowait(None)

    async def get(self) -> Message | None:
        """The next message, once it is there; None at the end."""
        return self._had(await self._messages.get())

    def get_more(self) -> Message | None:
        """The next message, if it is there; None if it is not, and at the end."""
        return None if self._messages.empty() else self._had(self._messages.get_nowait())

    def _had(self, message: Message | None) -> Message | None:
        if message is not None:
            self._bytes -= len(message.get("body", b""))
            self._taken.set()
        return message


class _Request:
    """What an application receives: a body, made when it asks for it, and then a client that stays."""

    def __init__(self, body: Callable[[], Awaitable[bytes]] | None) -> None:
        self._body = body
        self._is_asked = False

    async def receive(self) -> Message:
        """Part of ASGI."""
        if self._is_asked:
            await asyncio.Event().wait()
        self._is_asked = True
        body = b"" if self._body is None else await self._body()
        return {"type": "http.request", "body": body, "more_body": False}


async def exchange(
    app: ASGIApp,
    method: str,
    path: str,
    headers: list[tuple[bytes, bytes]],
    body: Callable[[], Awaitable[bytes]] | None = None,
    query: bytes = b"",
    *,
    write_timeout_s: float | None = None,
) -> AsyncGenerator[Head | bytes, None]:
    """Yield the head of the answer, then of its body what has come since, as it comes.

    The body is made when the application asks for it, which a gate does of those alone whom it lets in; what
    that raises is raised to the application.

    Whoever closes it early, or is cancelled, has the request cancelled as a client does that goes away, and
    so does one that takes nothing for `write_timeout_s` while much is there; longer behind a large piece.

    Raises:
        SlowReaderError: Nothing was taken for so long.
    """
    unread = _Unread()
    handed_on_bytes = 0
    left_after_s = 0.0
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query,
        "headers": headers,
    }

    async def send(message: Message) -> None:
        nonlocal left_after_s
        if left_after_s:
            return
        limit_s = None if write_timeout_s is None else may_read_for_s(write_timeout_s, handed_on_bytes)
        try:
            async with asyncio.timeout(limit_s):
                await unread.put(message)
        except TimeoutError:
            assert limit_s is not None
            logs.event("slow_reader_left", limit_s=limit_s, grpc=True)
            left_after_s = limit_s
            running.cancel()  # where it waits next: in what generates the answer, which then ends itself

    running = asyncio.ensure_future(app(scope, _Request(body).receive, send))
    running.add_done_callback(lambda _: unread.end())
    try:
        while (message := await unread.get()) is not None:
            if message["type"] == "http.response.start":
                named = [(name.decode(), value.decode()) for name, value in message["headers"]]
                yield Head(message["status"], dict(named))
                continue
            parts = [message.get("body", b"")]
            while (more := unread.get_more()) is not None:
                parts.append(more.get("body", b""))
            if piece := b"".join(parts):
                handed_on_bytes = len(piece)
                yield piece
            if running.done() and unread.is_empty:
                break
        if left_after_s:
            raise SlowReaderError(left_after_s)
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Events:
    """Reads server-sent events out of pieces that may end anywhere; `is_complete` after the last one."""

    def __init__(self) -> None:
        self.is_complete = False
        self._rest = b""

    def read(self, piece: bytes) -> list[dict[str, Any]]:
        """The events that `piece` completes."""
        *events, self._rest = (self._rest + piece).split(_EVENT_END)
        contents = [event.removeprefix(b"data: ") for event in events if not event.startswith(_COMMENT)]
        self.is_complete = self.is_complete or _DONE in contents
        return [json.loads(content) for content in contents if content != _DONE]


def tell(context: RayServegRPCContext, head: Head, request_id: str | None) -> None:
    """Put into the trailers what the HTTP API says in headers."""
    trailers = [
        (name, value)
        for name, value in head.headers.items()
        if name.startswith("x-slo-") or name in ("retry-after", SERVER_ID_HEADER)
    ]
    if request_id is not None:
        trailers.append(("x-request-id", request_id))
    context.set_trailing_metadata(trailers)


def _is_header(value: str) -> bool:
    """Whether gRPC takes it as metadata."""
    return value.isascii() and value.isprintable()


def refuse(context: RayServegRPCContext, error: Mapping[str, Any], status: int | None = None) -> None:
    """Answer with an error of the HTTP API; without `status` it came when the answer had begun."""
    if status is None:
        code = _STATUS_OF_TYPE.get(error["type"], grpc.StatusCode.INTERNAL)
    else:
        code = _STATUS.get(status, grpc.StatusCode.INTERNAL)
    context.set_code(code)
    context.set_details(error["message"].encode()[:_DETAILS_BYTES].decode(errors="ignore"))
    known = [
        ("error-code", error["code"]),
        ("error-type", error["type"]),
        ("error-param", error["param"]),
        ("error-trace-id", error.get("trace_id")),
    ]
    told = [(name, value) for name, value in context.trailing_metadata() if name != SERVES_ID]
    named = [(name, value) for name, value in known if value is not None and _is_header(value)]
    context.set_trailing_metadata([*told, *named])
