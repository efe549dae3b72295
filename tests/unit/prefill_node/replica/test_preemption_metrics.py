"""What the scheduler reports becomes metrics, log fields and span events."""

import logging

import msgspec
import pytest
from published import suspended
from spans import SAMPLED, recorded

from prefill_node.board.events import Dropped, Resumed, Served, Started, Stopped, encode
from prefill_node.board.messages import SchedulerView
from prefill_node.replica.governing.ledger import Accepted, PrefillLedger
from prefill_node.replica.job_history import JobState
from prefill_node.replica.job_spans import QUEUE, RUN, SUSPENDED, JobSpans
from prefill_node.replica.preemption_metrics import METRICS, PreemptionRecord
from slo.predict.prefill_time import PrefillPredictor
from slo.preemption.types import KeepReason
from slo.request import JobId
from slo.tiers import PREMIUM
from telemetry.catalogue import MetricKind

LINE = PrefillPredictor(per_token_s=0.0005, fixed_s=0.0, per_pair_s=5e-7)


class Instruments:
    """Notes what is recorded; refuses what the real ones refuse, and labels that the catalogue lacks."""

    def __init__(self):
        self.recorded = []

    def count(self, metric, value=1.0, **labels):
        self._note(MetricKind.COUNTER, metric, value, labels)

    def observe(self, metric, value, **labels):
        self._note(MetricKind.HISTOGRAM, metric, value, labels)

    def set(self, metric, value, **labels):
        self._note(MetricKind.GAUGE, metric, value, labels)

    def _note(self, kind, metric, value, labels):
        assert metric in METRICS
        assert metric.kind is kind
        assert set(labels) == set(metric.labels)
        name = metric.name.removeprefix("slackserve_").removesuffix("_seconds")
        if kind is not MetricKind.COUNTER or value:
            self.recorded.append((name, pytest.approx(value), *labels.values()))


class Spans(JobSpans):
    def __init__(self):
        super().__init__("", 0.0)
        self.events = []

    def event(self, name, attributes):
        self.events.append((name, attributes))


class Board:
    """What the ranks have counted."""

    ranks = 2

    def __init__(self, reached=0, dropped=0):
        self.reached, self.dropped_events = reached, dropped

    def boundaries_reached(self, rank):
        return self.reached * (rank + 1)


@pytest.fixture
def ledger():
    ledger = PrefillLedger(LINE)
    ledger.arrived(Accepted(JobId("urgent"), PREMIUM, 100, 9.0, 4.0))
    return ledger


@pytest.fixture
def instruments():
    return Instruments()


@pytest.fixture
def record(instruments, ledger):
    return PreemptionRecord(instruments, ledger)


def followed(record, *jobs):
    """The spans of jobs, from now on."""
    spans = {job: Spans() for job in jobs}
    for job in jobs:
        record.follow(JobId(job), spans[job])
    return spans


def stopped(jobs=("long",), beneficiary="urgent", is_kept=True, boundary=3, done=0.25, reason="rescue"):
    return Stopped(
        step_id=7,
        jobs=jobs,
        beneficiary=beneficiary,
        reason=reason,
        boundary=boundary,
        boundaries=12,
        computed=boundary / 12,
        done=done,
        tokens=1000,
        pairs=1e6,
        is_kept=is_kept,
        checkpoint_bytes=0,
        ordered_s=4.5,
        stopped_s=5.0,
    )


RESUMED = Resumed(("long",), 3, suspended_s=2.0, issued_s=7.0, first_operator_s=7.25)
SERVED = Served("urgent", stopped_s=5.0, first_operator_s=5.125)
DROPPED = Dropped(("long",), "memory", done=0.25, tokens=1000, pairs=1e6, dropped_s=6.0)

METRICS_OF = {
    "kept": (
        stopped(),
        [
            ("preemptions", 1, "kept", "rescue"),
            ("preemption_order_to_stop", 0.5),
            ("preemption_arrival_to_stop", 1.0),
        ],
    ),
    "to be recomputed": (
        stopped(is_kept=False),
        [
            ("preemptions", 1, "recompute", "rescue"),
            ("preemption_order_to_stop", 0.5),
            ("preemption_arrival_to_stop", 1.0),
            ("prefill_work_wasted", 0.25, "recompute"),
        ],
    ),
    "within a half layer": (
        stopped(boundary=4),
        [
            ("preemptions", 1, "kept", "rescue"),
            ("preemption_order_to_stop", 0.5),
            ("preemption_arrival_to_stop", 1.0),
            ("prefill_work_wasted", 1 / 12, "operator"),
        ],
    ),
    "within the first half layer, which starts over": (
        stopped(boundary=1, done=0.0, is_kept=False),
        [
            ("preemptions", 1, "kept", "rescue"),
            ("preemption_order_to_stop", 0.5),
            ("preemption_arrival_to_stop", 1.0),
            ("prefill_work_wasted", 1 / 12, "operator"),
        ],
    ),
    "for nobody": (
        stopped(jobs=(), beneficiary="", reason="abandoned"),
        [
            ("preemptions", 1, "abandoned", "abandoned"),
            ("preemption_order_to_stop", 0.5),
            ("prefill_work_wasted", 0.25, "abandoned"),
        ],
    ),
    "for somebody who has left": (
        stopped(beneficiary="gone"),
        [("preemptions", 1, "kept", "rescue"), ("preemption_order_to_stop", 0.5)],
    ),
    "resumed": (RESUMED, [("prefill_suspended", 2.0), ("preemption_resume_overhead", 0.25)]),
    "served": (SERVED, [("preemption_stop_to_service", 0.125)]),
    "dropped": (DROPPED, [("prefill_work_wasted", 0.25, "memory")]),
    "dropped within a later chunk": (
        msgspec.structs.replace(DROPPED, earlier_tokens=500, earlier_pairs=5e5),
        [("prefill_work_wasted", 0.75, "memory")],
    ),
}


def test_what_the_prefix_cache_held_is_passed_on(instruments, ledger):
    told = []
    PreemptionRecord(instruments, ledger, started=told.append).take([encode(Started("a", 512, 1.0))])
    assert told == [Started("a", 512, 1.0)]
    assert instruments.recorded == []


def test_a_prefill_that_lost_its_memory_waits_and_runs_again_and_its_own_chunks_are_no_hit(
    instruments, ledger
):
    exporter, told = recorded(), []
    record = PreemptionRecord(instruments, ledger, started=told.append)
    ledger.arrived(Accepted(JobId("long"), PREMIUM, 1000, 9.0, 1.0))
    spans = JobSpans(SAMPLED, 1.0)
    record.follow(JobId("long"), spans)
    first, again = Started("long", 0, 2.0), Started("long", 512, 8.0, is_first=False)
    record.take([encode(notice) for notice in (first, stopped(), DROPPED, again)])
    (long,) = record.history.recent(60.0, now_s=9.0).jobs
    assert [(stretch.state, stretch.start_s) for stretch in long.stretches] == [
        (JobState.WAITING, -8.0),
        (JobState.RUNNING, -7.0),
        (JobState.SUSPENDED, -4.0),
        (JobState.WAITING, -3.0),
        (JobState.RUNNING, -1.0),
    ]
    spans.end()
    *parts, _ = exporter.get_finished_spans()
    assert [part.name for part in parts] == [QUEUE, RUN, SUSPENDED, QUEUE, RUN]
    assert told == [first]


@pytest.mark.parametrize(("notice", "expected"), METRICS_OF.values(), ids=METRICS_OF.keys())
def test_each_notice_is_counted_in_its_metrics(notice, expected, record, instruments):
    record.follow(JobId("urgent"), Spans())
    record.take([encode(notice)])
    assert sorted(instruments.recorded, key=str) == sorted(
        [(name, pytest.approx(value), *labels) for name, value, *labels in expected], key=str
    )


@pytest.mark.parametrize(
    ("notice", "job", "event"),
    [
        (stopped(), "long", "prefill_stopped"),
        (RESUMED, "long", "prefill_resumed"),
        (SERVED, "urgent", "prefill_served"),
        (DROPPED, "long", "prefill_dropped"),
    ],
)
def test_the_spans_of_those_concerned_get_an_event_and_no_others(notice, job, event, record):
    spans = followed(record, "long", "urgent", "other")
    record.take([encode(notice)])
    assert [name for name, _ in spans[job].events] == [event]
    assert not any(span.events for name, span in spans.items() if name != job)


def test_a_stop_says_where_why_and_for_whom(record):
    span = followed(record, "long")["long"]
    record.take([encode(stopped())])
    (_, fields), *_ = span.events
    assert fields["boundary"] == 3
    assert fields["boundaries"] == 12
    assert fields["reason"] == "rescue"
    assert fields["beneficiary"] == "urgent"
    assert fields["stop_ms"] == pytest.approx(500.0)


def test_each_member_of_a_step_is_told(record):
    spans = followed(record, "long", "short")
    record.take([encode(stopped(jobs=("long", "short"))), encode(RESUMED)])
    assert [name for name, _ in spans["long"].events] == ["prefill_stopped", "prefill_resumed"]
    assert [name for name, _ in spans["short"].events] == ["prefill_stopped"]


def test_nothing_is_said_of_jobs_that_have_ended(record):
    span = followed(record, "long")["long"]
    record.leave(JobId("long"))
    record.leave(JobId("never-here"))
    record.take([encode(stopped())])
    assert span.events == []
    assert record._spans == {}


def test_what_happens_is_logged_with_the_jobs(record, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("ray.serve"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="ray.serve"):
        record.take([encode(stopped(jobs=("long", "short")))])
    assert "prefill_stopped jobs=long,short" in caplog.text


def test_votes_are_counted_once_for_all_ranks(record, instruments):
    for reached in (10, 10, 25):
        record.votes(Board(reached=reached))
    assert instruments.recorded == [("votes", 10), ("votes", 15)]


def test_events_that_found_no_room_are_counted_once(record, instruments):
    for dropped in (3, 3, 5):
        record.dropped(Board(dropped=dropped))
    assert instruments.recorded == [("dropped_events", 3), ("dropped_events", 2)]


@pytest.mark.parametrize(
    ("view", "steps", "kept_bytes"),
    [
        (None, 0, 0),
        (SchedulerView(), 0, 0),
        (
            SchedulerView(
                suspended=(suspended("a").step, suspended("b", "c", kept_bytes=250).step),
            ),
            2,
            750,
        ),
    ],
)
def test_what_is_suspended_now(view, steps, kept_bytes, record, instruments):
    record.suspended(view)
    assert instruments.recorded == [
        ("prefill_suspended_steps", steps),
        ("prefill_suspended_bytes", kept_bytes),
    ]


def test_decisions_and_their_reasons(record, instruments):
    record.decided(0.0001)
    record.kept(KeepReason.WOULD_HARM)
    record.available(is_available=True)
    record.available(is_available=False)
    assert instruments.recorded == [
        ("governor_decision", 0.0001),
        ("preemption_refusals", 1, "would_harm"),
        ("preemption_available", 1),
        ("preemption_available", 0),
    ]


def test_a_beneficiary_that_has_ended_before_the_stop_was_taken_in_still_counts(record, instruments, ledger):
    """As when it is short and nothing else happens meanwhile: its own end is what wakes the replica."""
    followed(record, "urgent")
    ledger.ended(JobId("urgent"))
    record.take([encode(stopped())])
    assert ("preemption_arrival_to_stop", 1.0) in instruments.recorded
