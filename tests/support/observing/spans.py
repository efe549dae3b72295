"""Spans that are made in this process, kept in memory."""

from functools import cache

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

SAMPLED = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
UNSAMPLED = SAMPLED[:-1] + "0"


@cache
def _exporter() -> InMemorySpanExporter:
    """A process has one provider, for good; as in a replica it records what the caller samples."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


def recorded() -> InMemorySpanExporter:
    """What is recorded from now on."""
    exporter = _exporter()
    exporter.clear()
    return exporter
