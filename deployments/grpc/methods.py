"""The gRPC methods of an ingress replica: `slackserve.v1.Inference` and `grpc.health.v1.Health`.

Each hands its request to the replica's HTTP application, so that both APIs have one gate, one account of each
request and the same refusals. Owns that nothing but an answer or an error of our own leaves: of anything else
Serve would send a client the traceback.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from deployments.grpc import inference_pb2 as pb
from deployments.grpc.exchange import SERVES_ID, Events, Head, SlowReaderError, exchange, refuse, tell
from deployments.grpc.health import WatchedHealth
from deployments.grpc.messages import Answer, parsed, refuse_large, request_body, request_headers
from deployments.http import errors as http_errors
from deployments.http.ingress import SlackServeIngress
from slo.request import REQUEST_ID_HEADER
from telemetry import logs

if TYPE_CHECKING:
    from ray.serve.grpc_util import RayServegRPCContext
    from starlette.types import ASGIApp

    from deployments.config.limits import LimitsConfig

_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_SMALL_BYTES: Final = 64 * 1024
"""A message with fewer is made a body of within milliseconds; a larger one has to leave others their turn."""


class InferenceIngress(SlackServeIngress):
    """The ingress of the HTTP API, and on top of it what Serve's gRPC proxy calls by name."""

    app: ASGIApp
    """The HTTP API's application, from Serve."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._watched = WatchedHealth(self._health)

    async def Chat(  # noqa: N802 - gRPC's spelling, as below
        self, request: pb.ChatRequest, grpc_context: RayServegRPCContext
    ) -> pb.ChatResponse:
        """Answer a chat completion."""
        return await _whole(self.app, _CHAT, request, pb.ChatResponse(), grpc_context, self._limits)

    async def ChatStream(  # noqa: N802
        self, request: pb.ChatRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.ChatStreamResponse, None]:
        """Answer a chat completion as it comes."""
        kind = pb.ChatStreamResponse
        async with aclosing(_stream(self.app, _CHAT, request, kind, grpc_context, self._limits)) as answers:
            async for answer in answers:
                yield answer

    async def Complete(  # noqa: N802
        self, request: pb.CompleteRequest, grpc_context: RayServegRPCContext
    ) -> pb.CompleteResponse:
        """Answer a text completion."""
        return await _whole(
            self.app, _COMPLETIONS, request, pb.CompleteResponse(), grpc_context, self._limits
        )

    async def CompleteStream(  # noqa: N802
        self, request: pb.CompleteRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.CompleteStreamResponse, None]:
        """Answer a text completion as it comes."""
        kind = pb.CompleteStreamResponse
        streamed = _stream(self.app, _COMPLETIONS, request, kind, grpc_context, self._limits)
        async with aclosing(streamed) as answers:
            async for answer in answers:
                yield answer

    async def ListModels(  # noqa: N802
        self,
        request: pb.ListModelsRequest,
        grpc_context: RayServegRPCContext,
    ) -> pb.ListModelsResponse:
        """Name the models that are served."""
        return await _whole(
            self.app, "/v1/models", request, pb.ListModelsResponse(), grpc_context, self._limits
        )

    async def Check(  # noqa: N802
        self, request: HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> HealthCheckResponse:
        """Whether requests are answered, as `/ready?degraded` says."""
        if request.service not in ("", _SERVICE):
            grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
            # Its name is not repeated: anybody may ask, and it may have 64 MiB.
            grpc_context.set_details(f"there is no such service; known is {_SERVICE}")
            return HealthCheckResponse()
        return await self._health()

    async def Watch(  # noqa: N802
        self,
        request: HealthCheckRequest,
        grpc_context: RayServegRPCContext,  # noqa: ARG002 - Serve passes it
    ) -> AsyncGenerator[HealthCheckResponse, None]:
        """The same whenever it changes, for a while."""
        if request.service not in ("", _SERVICE):
            yield HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
            return
        async with aclosing(self._watched.changes()) as changes:
            async for health in changes:
                yield health

    async def _health(self) -> HealthCheckResponse:
        async with aclosing(exchange(self.app, "GET", "/ready", [], query=b"degraded")) as pieces:
            head = await anext(pieces)
        serves = isinstance(head, Head) and head.is_ok
        serving, not_serving = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse(status=serving if serves else not_serving)


async def _whole(
    app: ASGIApp,
    path: str,
    request: Any,
    answer: Answer,
    context: RayServegRPCContext,
    limits: LimitsConfig,
) -> Answer:
    """The one answer of a unary method; an empty one with an error's code in `context`."""
    try:
        async with aclosing(_pieces(app, path, request, context, limits, stream=False)) as pieces:
            head = await anext(pieces)
            values = json.loads(b"".join([piece async for piece in pieces if isinstance(piece, bytes)]))
        assert isinstance(head, Head)
        if head.is_ok:
            return parsed(values, answer)
        refuse(context, values["error"], head.status)
    except Exception as error:  # noqa: BLE001 - whatever it is, a client gets no traceback
        _fail(context, error)
    return answer


async def _stream(
    app: ASGIApp,
    path: str,
    request: Any,
    kind: type[Answer],
    context: RayServegRPCContext,
    limits: LimitsConfig,
) -> AsyncGenerator[Answer, None]:
    """The answers of a streaming method; code and trailers travel with one only, so an error has one too."""
    try:
        async with aclosing(_pieces(app, path, request, context, limits, stream=True)) as pieces:
            head = await anext(pieces)
            assert isinstance(head, Head)
            if not head.is_ok:
                body = b"".join([piece async for piece in pieces if isinstance(piece, bytes)])
                refuse(context, json.loads(body)["error"], head.status)
                yield kind()
                return
            events = Events()
            async for piece in pieces:
                assert isinstance(piece, bytes)
                chunks = events.read(piece)
                errors = [chunk["error"] for chunk in chunks if "error" in chunk]
                if good := [chunk for chunk in chunks if "error" not in chunk]:
                    yield parsed({"chunks": good}, kind())
                if errors:
                    refuse(context, errors[0])
                    yield kind()
                    return
            if not events.is_complete:
                raise RuntimeError("the stream ended without an end")  # noqa: TRY301 - as any other failure
    except SlowReaderError as slow:
        context.set_code(grpc.StatusCode.CANCELLED)
        context.set_details(str(slow))
        yield kind()
    except Exception as error:  # noqa: BLE001 - whatever it is, a client gets no traceback
        _fail(context, error)
        yield kind()


async def _pieces(
    app: ASGIApp,
    path: str,
    request: Any,
    context: RayServegRPCContext,
    limits: LimitsConfig,
    *,
    stream: bool,
) -> AsyncGenerator[Head | bytes, None]:
    """The HTTP application's answer to a request, its head told to `context`."""
    headers = request_headers(context.invocation_metadata(), request)
    given = [value.decode() for name, value in headers if name.decode() == REQUEST_ID_HEADER]
    if not given and (request_id := dict(context.trailing_metadata()).get(SERVES_ID)):
        headers.append((REQUEST_ID_HEADER.encode(), request_id.encode()))  # the id that Serve gave it
    headers.append((b"content-type", b"application/json"))

    async def body() -> bytes:
        refuse_large(request, limits)
        if request.ByteSize() < _SMALL_BYTES:
            return request_body(request, stream=stream)
        return await asyncio.to_thread(request_body, request, stream=stream)

    write_timeout_s = limits.write_timeout_s if stream else None
    if isinstance(request, pb.ListModelsRequest):
        answer = exchange(app, "GET", path, headers)
    else:
        answer = exchange(app, "POST", path, headers, body, write_timeout_s=write_timeout_s)
    async with aclosing(answer) as pieces:
        async for piece in pieces:
            if isinstance(piece, Head):
                tell(context, piece, given[0] if given else None)
            yield piece


def _fail(context: RayServegRPCContext, error: Exception) -> None:
    request_id = dict(context.trailing_metadata()).get(SERVES_ID, "unknown")
    logs.event("grpc_failed", level=logging.ERROR, request_id=request_id, error=repr(error)[:2000])
    context.set_code(grpc.StatusCode.INTERNAL)
    context.set_details(http_errors.internal_error(request_id).message)
