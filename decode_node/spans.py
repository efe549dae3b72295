"""The spans of one request on its decode replica: the whole, and its phases, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import Link, SpanContext, SpanKind

from telemetry.tracing import TRACER, continued, traceparent_of

TOKENISE: Final = "tokenise"
PREFILL: Final = "prefill_call"
HANDOFF: Final = "handoff"
"""From the answer of the prefill replica to what decode says first: the KV transfer and a decode step."""
DECODE: Final = "decode"


class RequestSpans:
    """Empty spans, unless the request is traced.

    Args:
        traceparent: Of the span that asked for the request.
    """

    def __init__(self, traceparent: str) -> None:
        self._whole = TRACER.start_span("decode_request", continued(traceparent), SpanKind.SERVER)
        self._context = trace.set_span_in_context(self._whole)
        self._phase: trace.Span = trace.INVALID_SPAN
        self._lost: SpanContext | None = None
        self._has_first = False

    @property
    def traceparent(self) -> str:
        """Continues the whole."""
        return traceparent_of(self._whole)

    def note(self, attributes: Mapping[str, str | int]) -> None:
        """Add to what is known of the request."""
        self._whole.set_attributes(attributes)

    def phase(self, name: str) -> str:
        """End a phase and begin the next; a prefill after another one is linked to that, which was lost.

        Returns:
            What continues the new phase.
        """
        self._phase.end()
        links = [Link(self._lost)] if name == PREFILL and self._lost is not None else []
        kind = SpanKind.CLIENT if name == PREFILL else SpanKind.INTERNAL
        self._phase = TRACER.start_span(name, self._context, kind, links=links)
        if name == PREFILL:
            self._lost = self._phase.get_span_context()
        return traceparent_of(self._phase)

    def first_token(self) -> None:
        """A first piece of the answer is on its way to the client; that of the first attempt counts."""
        if not self._has_first:
            self._has_first = True
            self._whole.add_event("first_token")

    def end(self) -> None:
        """The request has ended here."""
        self._phase.end()
        self._whole.end()
