"""The spans of one prefill: the whole, and queue, runs and suspensions, which add up to it.

EngineCore exports nothing: it reports what happened when on the board (`prefill_node.board.events`), and the
spans are made here afterwards, with those times.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.trace import Link, SpanKind

from prefill_node.board.events import Dropped, Resumed, Started, Stopped
from telemetry.tracing import TRACER, continued, wall_ns

QUEUE = "queue"
RUN = "prefill_run"
SUSPENDED = "suspended"


class JobSpans:
    """Empty spans, unless the request is traced.

    Args:
        traceparent: Of the call that asked for the prefill.
        arrived_s: When that arrived, on this host's monotonic clock.
    """

    def __init__(self, traceparent: str, arrived_s: float) -> None:
        self.whole = TRACER.start_span(
            "prefill_request", continued(traceparent), SpanKind.SERVER, start_time=wall_ns(arrived_s)
        )
        self._interval = self._begun(QUEUE, arrived_s)

    def event(self, name: str, attributes: Mapping[str, float | str]) -> None:
        """Something happened to the job."""
        self.whole.add_event(name, attributes)

    def started(self, notice: Started) -> None:
        """Its first step was issued, also when it starts over."""
        self._change(RUN, notice.issued_s)

    def stopped(self, notice: Stopped, beneficiary: JobSpans | None) -> None:
        """Its step was stopped; the span is linked to that of the job that it was stopped for."""
        links = [] if beneficiary is None else [Link(beneficiary.whole.get_span_context())]
        attributes: dict[str, str | int] = {
            "slackserve.reason": notice.reason,
            "slackserve.boundary": notice.boundary,
            "slackserve.is_kept": notice.is_kept,
            "slackserve.checkpoint_bytes": notice.checkpoint_bytes,
            "slackserve.beneficiary": notice.beneficiary,
        }
        self._change(SUSPENDED, notice.stopped_s, attributes, links)

    def resumed(self, notice: Resumed) -> None:
        """Its step was issued again."""
        self._change(RUN, notice.issued_s)

    def dropped(self, notice: Dropped) -> None:
        """It has lost its memory, and waits to start over."""
        self._change(QUEUE, notice.dropped_s)

    def end(self) -> None:
        """The job has ended."""
        now_ns = wall_ns(time.monotonic())
        self._interval.end(now_ns)
        self.whole.end(now_ns)

    def _change(
        self,
        name: str,
        at_s: float,
        attributes: Mapping[str, str | int] | None = None,
        links: Sequence[Link] = (),
    ) -> None:
        self._interval.end(wall_ns(at_s))
        self._interval = self._begun(name, at_s, attributes, links)

    def _begun(
        self,
        name: str,
        at_s: float,
        attributes: Mapping[str, str | int] | None = None,
        links: Sequence[Link] = (),
    ) -> trace.Span:
        context = trace.set_span_in_context(self.whole)
        return TRACER.start_span(name, context, attributes=attributes, links=links, start_time=wall_ns(at_s))
