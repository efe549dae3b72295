"""A receiver of spans, as a collector is one, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Received:
    """A span, times in seconds, those of its events by name; ids are hexadecimal."""

    name: str
    role: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    events: dict[str, float]

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end_s - self.start_s


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps all spans."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.spans: list[Received] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002 - the protocol's name
        """Take spans."""
        for resource in request.resource_spans:
            of = _plain(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [_received(span, of.get("slackserve.role", "")) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[Received]:
        """The spans of one trace."""
        return [span for span in self.spans if span.trace_id == trace_id]


@contextmanager
def receiving(port: int) -> Iterator[Receiver]:
    """Listen on a port."""
    receiver = Receiver(port)
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield receiver
    finally:
        server.stop(1).wait()


def _received(span: Any, role: str) -> Received:
    return Received(
        span.name,
        role,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        _plain(span.attributes),
        tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        {event.name: event.time_unix_nano / 1e9 for event in span.events},
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
