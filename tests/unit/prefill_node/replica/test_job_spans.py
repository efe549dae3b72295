"""One prefill's spans add up to it."""

import time
from dataclasses import dataclass

import pytest
from spans import SAMPLED, recorded

from prefill_node.board.events import Resumed, Started, Stopped
from prefill_node.replica.job_spans import QUEUE, RUN, SUSPENDED, JobSpans

T0 = time.monotonic() - 100.0


def stopped(at_s, beneficiary="urgent"):
    stopped_at = 3, 12, 0.25, 0.25
    return Stopped(7, ("long",), beneficiary, "rescue", *stopped_at, 1000, 1e6, True, 4096, at_s - 0.01, at_s)


def resumed(at_s):
    return Resumed(("long",), 3, suspended_s=2.0, issued_s=at_s, first_operator_s=at_s + 0.001)


@dataclass
class Ended:
    whole: object
    parts: list


def ended(exporter):
    *parts, whole = exporter.get_finished_spans()
    return Ended(whole, parts)


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


def test_queue_runs_and_suspensions_add_up_whatever_happened():
    exporter = recorded()
    spans = JobSpans(SAMPLED, T0)
    spans.started(Started("long", 0, T0 + 1))
    spans.stopped(stopped(T0 + 3), None)
    spans.resumed(resumed(T0 + 7))
    spans.stopped(stopped(T0 + 8), None)
    spans.resumed(resumed(T0 + 20))
    spans.end()
    found = ended(exporter)
    assert [part.name for part in found.parts] == [QUEUE, RUN, SUSPENDED, RUN, SUSPENDED, RUN]
    assert [seconds(part) for part in found.parts[:-1]] == pytest.approx([1, 2, 4, 1, 12], abs=1e-3)
    assert sum(map(seconds, found.parts)) == pytest.approx(seconds(found.whole), abs=1e-3)
    assert all(part.parent.span_id == found.whole.context.span_id for part in found.parts)


def test_a_suspension_says_why_and_is_linked_to_the_prefill_that_it_is_for():
    exporter = recorded()
    urgent = JobSpans(SAMPLED, T0)
    spans = JobSpans(SAMPLED, T0)
    spans.started(Started("long", 0, T0 + 1))
    spans.stopped(stopped(T0 + 3), urgent)
    spans.end()
    (suspension,) = (part for part in exporter.get_finished_spans() if part.name == SUSPENDED)
    assert [link.context for link in suspension.links] == [urgent.whole.get_span_context()]
    assert dict(suspension.attributes) == {
        "slackserve.reason": "rescue",
        "slackserve.boundary": 3,
        "slackserve.is_kept": True,
        "slackserve.checkpoint_bytes": 4096,
        "slackserve.beneficiary": "urgent",
    }


def test_a_job_that_ends_in_the_queue_was_only_there():
    exporter = recorded()
    JobSpans(SAMPLED, T0).end()
    found = ended(exporter)
    assert [part.name for part in found.parts] == [QUEUE]
    assert seconds(found.parts[0]) == pytest.approx(seconds(found.whole), abs=1e-3)


def test_a_request_that_is_not_traced_leaves_nothing():
    exporter = recorded()
    spans = JobSpans("", T0)
    spans.started(Started("long", 0, T0 + 1))
    spans.stopped(stopped(T0 + 3), JobSpans("", T0))
    spans.event("prefill_stopped", {})
    spans.end()
    assert exporter.get_finished_spans() == ()
