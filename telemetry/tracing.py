"""Spans of requests: exported over OTLP when a process is told where to, and else nothing at all.

Owns how a process starts to export, Ray Serve's own among them, and how a trace goes from one process to the
next: as a `traceparent` of the W3C. Which spans there are is their makers'.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT: Final = "traceparent"
PROXY: Final = "proxy"
BEGINS_VARIABLE: Final = "SLACKSERVE_TRACES_BEGIN_IN"
"""The role in which traces begin beside Serve's proxies, where requests come past these."""
TRACER: Final = trace.get_tracer("slackserve")
"""Makes spans; before `start`, and without it, they are empty."""
USUAL_RATIO: Final = 0.01
_SERVE: Final = "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH"
_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_RATIO: Final = "OTEL_TRACES_SAMPLER_ARG"
"""OpenTelemetry's own names; ours have no other way to Ray Serve's proxies."""
_PROPAGATOR: Final = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class TracingOptions:
    """Where spans go, and how many.

    Attributes:
        endpoint: URL of an OTLP receiver that speaks gRPC.
        ratio: Fraction of the requests that bring no trace of their own and are traced.
    """

    endpoint: str
    ratio: float

    def environment(self) -> dict[str, str]:
        """What has all of Ray Serve's processes, its proxies among them, trace with us from their start."""
        return {_SERVE: _ours(), _ENDPOINT: self.endpoint, _RATIO: str(self.ratio)}

    @staticmethod
    def from_environment() -> TracingOptions | None:
        """What the environment says that has Ray Serve trace with us; None where it does not.

        Raises:
            ValueError: when it does not say where spans go, or how many.
        """
        if os.environ.get(_SERVE) != _ours():
            return None
        endpoint, ratio = os.environ.get(_ENDPOINT), os.environ.get(_RATIO, str(USUAL_RATIO))
        try:
            if endpoint and 0 <= float(ratio) <= 1:
                return TracingOptions(endpoint, float(ratio))
        except ValueError:
            pass
        raise ValueError(
            f"with {_SERVE}={_ours()}, {_ENDPOINT} is the URL of an OTLP receiver, not {endpoint!r}, "
            f"and {_RATIO} a number from 0 to 1, not {ratio!r}"
        )


def _ours() -> str:
    return f"{__name__}:{for_serve.__name__}"


def start(options: TracingOptions | None, role: str, *, begins_traces: bool = False) -> None:
    """Export this process's spans from now on, in the background; without options, none.

    Does nothing where Ray Serve traces, and has started it (`for_serve`).

    Whether a request is traced is decided once, by its client or where the trace begins. Other processes
    follow, so that no trace has holes, and nothing that is not part of a request makes one.

    Args:
        options: None exports nothing.
        role: What the process is.
        begins_traces: Whether requests enter the deployment here.
    """
    if options is None or is_started():
        return
    # Heavy, and not needed without tracing.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased  # noqa: PLC0415

    root = TraceIdRatioBased(options.ratio) if begins_traces else ALWAYS_OFF
    resource = Resource.create({"service.name": "slackserve", "slackserve.role": role})
    provider = TracerProvider(sampler=ParentBased(root), resource=resource)
    is_plain = not options.endpoint.startswith("https://")
    exporter = OTLPSpanExporter(endpoint=options.endpoint, insecure=is_plain)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def is_started() -> bool:
    """Whether this process exports spans."""
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - as in `start`

    return isinstance(trace.get_tracer_provider(), TracerProvider)


def for_serve() -> list[Any]:
    """Start tracing in one of Ray Serve's processes, which calls this before anything else is up there.

    Serve asks for span processors, and has a provider that samples in each process anew: with a ratio its
    traces come in fragments. So ours is installed first, which Serve leaves; traces begin in its proxies, and
    in the role that the environment names.

    Returns:
        No processors beside ours.
    """
    from ray import serve  # noqa: PLC0415 - heavy, and there in Serve's processes
    from ray.serve.exceptions import RayServeException  # noqa: PLC0415 - likewise

    try:
        role = serve.get_replica_context().deployment.partition(":")[0].lower()
    except RayServeException:
        role = PROXY
    begins = role in (PROXY, os.environ.get(BEGINS_VARIABLE))
    start(TracingOptions.from_environment(), role, begins_traces=begins)
    return []


def here(traceparent: str) -> Context:
    """The context of a request in its first process of ours: Serve's span there, if Serve traces it."""
    return get_current() if trace.get_current_span().is_recording() else continued(traceparent)


def continued(traceparent: str) -> Context:
    """The context of a span in another process; an empty one for no `traceparent` or a malformed one."""
    return _PROPAGATOR.extract({TRACEPARENT: traceparent}, context=Context())


def traceparent_of(span: trace.Span) -> str:
    """What continues a span elsewhere; empty when it is not recorded."""
    if not span.is_recording():
        return ""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def carrying(headers: Mapping[str, str], traceparent: str) -> dict[str, str]:
    """Headers that also continue a trace, if there is one."""
    return {**headers, TRACEPARENT: traceparent} if traceparent else dict(headers)


def trace_id_of(span: trace.Span) -> str | None:
    """The trace that a span, which may have ended, is recorded in, as backends show it; None for none."""
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context.trace_flags.sampled else None


def wall_ns(at_s: float) -> int:
    """A time on this host's monotonic clock as nanoseconds since the epoch, as spans have them."""
    return time.time_ns() - int((time.monotonic() - at_s) * 1e9)
