"""One request's spans on a decode replica."""

from itertools import pairwise

import pytest
from spans import SAMPLED, UNSAMPLED, recorded

from decode_node.spans import DECODE, HANDOFF, PREFILL, TOKENISE, RequestSpans
from telemetry.tracing import carrying, continued, traceparent_of


def run(traceparent, *phases):
    exporter = recorded()
    spans = RequestSpans(traceparent)
    continues = [spans.phase(name) for name in phases]
    spans.first_token()
    spans.end()
    return {span.context.span_id: span for span in exporter.get_finished_spans()}, continues


def test_phases_follow_each_other_within_the_request_and_its_callers_trace():
    found, _ = run(SAMPLED, TOKENISE, PREFILL, HANDOFF, DECODE)
    *phases, whole = found.values()
    assert [span.name for span in phases] == [TOKENISE, PREFILL, HANDOFF, DECODE]
    assert all(span.parent.span_id == whole.context.span_id for span in phases)
    assert f"{whole.context.trace_id:032x}-{whole.parent.span_id:016x}" in SAMPLED
    for before, after in pairwise(phases):
        assert before.end_time <= after.start_time
    assert [event.name for event in whole.events] == ["first_token"]


def test_a_prefill_that_is_asked_for_again_is_linked_to_the_lost_one():
    found, _ = run(SAMPLED, TOKENISE, PREFILL, PREFILL, HANDOFF, PREFILL, HANDOFF, DECODE)
    first, second, third = (span for span in found.values() if span.name == PREFILL)
    assert first.links == ()
    assert [link.context.span_id for link in second.links] == [first.context.span_id]
    assert [link.context.span_id for link in third.links] == [second.context.span_id]


def test_what_is_asked_for_in_a_phase_continues_it():
    found, (_, traceparent) = run(SAMPLED, TOKENISE, PREFILL)
    (asking,) = (span for span in found.values() if span.name == PREFILL)
    assert f"{asking.context.span_id:016x}" in traceparent
    assert carrying({"a": "b"}, traceparent) == {"a": "b", "traceparent": traceparent}


@pytest.mark.parametrize("traceparent", ["", UNSAMPLED, "nonsense"])
def test_a_request_that_is_not_traced_leaves_nothing_and_passes_nothing_on(traceparent):
    found, continues = run(traceparent, TOKENISE, PREFILL, PREFILL, HANDOFF, DECODE)
    assert found == {}
    assert set(continues) == {""}
    assert carrying({"a": "b"}, continues[0]) == {"a": "b"}


def test_a_context_is_continued_as_it_was():
    exporter = recorded()
    spans = RequestSpans(SAMPLED)
    assert traceparent_of_parent(spans.traceparent) == spans.traceparent
    spans.end()
    assert len(exporter.get_finished_spans()) == 1


def traceparent_of_parent(traceparent):
    from opentelemetry import trace

    context = trace.get_current_span(continued(traceparent)).get_span_context()
    assert traceparent_of(trace.NonRecordingSpan(context)) == "", "not recorded here"
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
