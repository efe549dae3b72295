"""What an ingress tells the monitor of each request."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from opentelemetry.trace import StatusCode
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from spans import SAMPLED, recorded

from deployments.http import accounting
from deployments.http.accounting import Identity, RequestRecord
from deployments.http.token_meter import TokenMeter
from router.messages import Answered
from slo.admission.tenant_limits import Usage
from slo.objectives import Objective
from slo.outcomes import Outcome, RequestEnded
from slo.request import JobId
from slo.tiers import PREMIUM, ObjectiveName
from telemetry.tracing import TRACER, continued, trace_id_of


class Instruments:
    def __init__(self):
        self.counted = []

    def count(self, metric, value=1.0, **labels):
        self.counted.append((metric.name, *labels.values()))

    def observe(self, metric, value, **labels):
        pass


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now_s = 100.0

        def monotonic(self):
            return self.now_s

    clock = Clock()
    monkeypatch.setattr(accounting, "time", clock)
    return clock


@pytest.fixture
def record(clock):
    told, instruments = [], Instruments()
    record = RequestRecord(
        instruments,
        Identity(JobId("j"), "r", "acme", "tiny", streams=True),
        Objective(PREMIUM, ttft_s=0.2, tpot_s=0.05),
        clock.now_s,
        ended=lambda *_: None,
        tell=told.append,
    )
    record.placed(0.2, 0.1, 0.2)
    record.told, record.instruments = told, instruments
    return record


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CHUNK = 'data: {"choices":[{"delta":{"content":"a"}}]}'
TOTALS = 'data: {"choices":[],"usage":{"prompt_tokens":1,"total_tokens":5,"completion_tokens":4}}'
TOLD = RequestEnded("tiny", PREMIUM, "acme", Outcome.FINISHED, 0.0, True, None, 0.2, 0.1, None, 0.05)


def test_a_request_that_is_answered_is_told_once_with_all_that_was_measured(record, clock):
    for _ in range(3):
        clock.now_s += 0.1
        record.event(CHUNK)
    record.delivered_tokens = lambda: 3
    clock.now_s += 0.3
    record.end(Outcome.FINISHED)
    record.end(Outcome.CANCELLED)
    (told,) = record.told
    assert told == replace(
        TOLD, e2e_s=pytest.approx(0.6), ttft_s=pytest.approx(0.1), tpot_s=pytest.approx(0.1)
    )
    assert told.attained is False, "too slow"


def test_an_event_may_bring_several_tokens(record, clock):
    """vLLM puts together what was generated while the stream was behind."""
    record.meter = TokenMeter(
        CompletionRequest(model="m", prompt="a", max_tokens=4, stream=True), Usage(1, 4)
    )
    for completion_tokens in (1, 3, 4):
        clock.now_s += 0.1
        usage = f'"usage":{{"prompt_tokens":1,"total_tokens":9,"completion_tokens":{completion_tokens}}}'
        record.event(f'data: {{"choices":[{{"index":0,"text":"a"}}],{usage}}}')
    record.end(Outcome.FINISHED)
    assert record.told[0].tpot_s == pytest.approx(0.2 / 3)


@pytest.mark.parametrize(
    ("events", "tpot_s"),
    {
        "together": ([(0.2, 0, 1), (0.0, 1, 1), (0.2, 0, 5), (0.0, 1, 5)], 0.2 / 4),
        "one after the other": ([(0.2, 0, 1), (0.2, 0, 5), (9.0, 1, 1), (0.4, 1, 5)], 0.6 / 8),
        "only one has any": ([(0.2, 1, 1), (0.2, 1, 5)], 0.2 / 4),
        "one token each": ([(0.2, 0, 1), (9.0, 1, 1)], None),
        "of different lengths": ([(0.2, 0, 1), (9.0, 1, 1), (0.2, 1, 3)], 0.1),
    }.values(),
)
def test_the_time_between_two_tokens_is_that_within_each_of_several_answers(clock, events, tpot_s):
    record, _, told = with_end_to_end(clock, answers=2)
    body = CompletionRequest(model="m", prompt=["a", "b"], max_tokens=5, stream=True)
    record.meter = TokenMeter(body, Usage(2, 10))
    for after_s, index, tokens in events:
        clock.now_s += after_s
        usage = f'"usage":{{"prompt_tokens":1,"total_tokens":11,"completion_tokens":{tokens}}}'
        record.event(f'data: {{"choices":[{{"index":{index},"text":"a"}}],{usage}}}')
    record.end(Outcome.FINISHED)
    assert told[0].tpot_s == (None if tpot_s is None else pytest.approx(tpot_s))


@pytest.mark.parametrize(("hides", "is_timed"), [({"include_reasoning": False}, False), ({}, True)])
def test_several_answers_that_hide_tokens_have_no_time_between_them(clock, hides, is_timed):
    """The second shows its first token seconds behind the first that it has generated."""
    record, _, told = with_end_to_end(clock, answers=2)
    messages = [{"role": "user", "content": "hi"}]
    body = ChatCompletionRequest(model="m", messages=messages, stream=True, n=2, **hides)
    record.meter = TokenMeter(body, None)
    for index in (0, 1, 1):
        clock.now_s += 1
        record.event(f'data: {{"choices":[{{"index":{index},"delta":{{"content":"a"}}}}]}}')
    record.event(TOTALS)
    record.end(Outcome.FINISHED)
    assert (told[0].tpot_s is not None) is is_timed


def test_what_is_unread_before_an_answer_begins_is_no_time_of_its_tokens(clock):
    record, _, told = with_end_to_end(clock, answers=2)
    record.meter = TokenMeter(CompletionRequest(model="m", prompt="a", n=2, stream=True), None)
    clock.now_s += 0.2
    for index in (0, 0, 1, 1):
        record.event(f'data: {{"choices":[{{"index":{index},"text":"a"}}]}}')
        clock.now_s += 0.2
        record.unread(0.1)
    record.event(TOTALS)
    record.end(Outcome.FINISHED)
    assert (told[0].tpot_s, told[0].tpot_unread_s) == (pytest.approx(0.1), pytest.approx(0.1))
    assert told[0].unread_s == pytest.approx(0.4)


def test_who_speaks_is_told_with_the_first_tokens_though_they_are_hidden(record, clock):
    clock.now_s += 0.1
    record.event('data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}')
    for _ in range(2):
        clock.now_s += 0.3
        record.event(CHUNK)
    record.delivered_tokens = lambda: 3
    record.end(Outcome.FINISHED)
    assert record.told[0].tpot_s == pytest.approx(0.3)


def test_tokens_of_which_no_event_tells_anything_have_no_time(record, clock):
    record.meter = TokenMeter(CompletionRequest(model="m", prompt="a", max_tokens=4, stream=True), None)
    clock.now_s += 0.1
    record.event('data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}')
    record.event('data: {"choices":[],"usage":{"prompt_tokens":1,"total_tokens":6,"completion_tokens":5}}')
    record.end(Outcome.FINISHED)
    assert record.told[0].tpot_s is None


def test_of_a_stream_that_nothing_limits_the_tokens_are_counted_too(record, clock):
    """Its tokens, and so the time between two of them, by the count at its end."""
    record.meter = TokenMeter(CompletionRequest(model="m", prompt="a", max_tokens=4, stream=True), None)
    for _ in range(2):
        clock.now_s += 0.1
        record.event(CHUNK)
    usage = '"usage":{"prompt_tokens":1,"total_tokens":6,"completion_tokens":5}'
    assert record.event(f'data: {{"choices":[],{usage}}}') == ""
    record.end(Outcome.FINISHED)
    assert record.told[0].tpot_s == pytest.approx(0.1 / 4)


def test_a_request_that_is_refused_is_told_and_counted_by_whoever_answers_it(record):
    record.refused(Outcome.SHED)
    record.end(Outcome.CANCELLED)
    assert record.told == [replace(TOLD, outcome=Outcome.SHED)]
    assert record.instruments.counted == []


def test_a_refusal_for_want_of_memory_on_decode_is_told_as_that(record):
    record.refused(Outcome.SHED, lacked_decode=True)
    assert record.told == [replace(TOLD, outcome=Outcome.SHED, up_to_decode=True)]


@pytest.mark.parametrize(
    ("ttft_s", "decode_wait_s", "in_time"),
    [(0.15, 0.5, True), (0.6, 0.5, None), (0.8, 0.5, False), (0.6, 0.0, False)],
    ids=["in time", "late by the wait", "late without it, too", "no wait"],
)
@pytest.mark.parametrize("outcome", [Outcome.FINISHED, Outcome.CANCELLED])
def test_a_first_token_that_waited_for_memory_on_decode_is_not_late_by_prefill(
    record, clock, ttft_s, decode_wait_s, in_time, outcome
):
    record.placed(0.2, 0.1 + decode_wait_s, 0.2, decode_wait_s)
    clock.now_s += ttft_s
    if outcome is Outcome.FINISHED:
        record.event(CHUNK)
    record.end(outcome)
    nothing_yet = outcome is Outcome.CANCELLED and in_time
    assert record.told[0].prefilled_in_time is (None if nothing_yet else in_time)


def with_end_to_end(clock, answers=1):
    """A request whose answer must end within a second, and what the router and the monitor hear of it."""
    ended, told = [], []
    record = RequestRecord(
        Instruments(),
        Identity(JobId("j"), "r", "acme", "tiny", streams=True, answers=answers),
        Objective(PREMIUM, None, None, e2e_s=1.0),
        clock.now_s,
        ended=ended.append,
        tell=told.append,
    )
    record.placed(0.4, 0.1, None)
    return record, ended, told


@pytest.mark.parametrize(("seconds", "is_met"), [(0.9, True), (1.1, False)])
def test_of_an_end_to_end_objective_the_end_is_judged_and_not_the_first_token(clock, seconds, is_met):
    record, _, told = with_end_to_end(clock)
    clock.now_s += seconds
    record.event(CHUNK)
    record.end(Outcome.FINISHED)
    assert told[0].judged == {ObjectiveName.E2E: is_met}


@pytest.mark.parametrize(
    ("usage", "outcome", "tokens"),
    [
        (SimpleNamespace(prompt_tokens=1, completion_tokens=60), Outcome.FINISHED, 30),
        (None, Outcome.FINISHED, 2),
        (SimpleNamespace(prompt_tokens=1, completion_tokens=60), Outcome.FAILED, None),
    ],
    ids=["as a whole", "streamed", "failed"],
)
def test_the_router_hears_how_long_an_answer_became(clock, usage, outcome, tokens):
    record, ended, _ = with_end_to_end(clock, answers=2)
    record.meter = TokenMeter(CompletionRequest(model="m", prompt="a", n=2, stream=usage is None), None)
    clock.now_s += 0.1
    for _ in range(4):
        record.event(CHUNK)
    if usage is None:
        record.event(TOTALS)
    else:
        record.answered(usage)
    record.end(outcome)
    assert ended[0].answered == (None if tokens is None else Answered(PREMIUM, "acme", tokens))


@pytest.mark.parametrize(
    "hides", [{"tools": [TOOL]}, {"include_reasoning": False}], ids=["tools", "reasoning"]
)
@pytest.mark.parametrize(
    ("outcome", "used"),
    [
        (Outcome.FAILED, Usage(7, 3)),
        (Outcome.EVICTED, Usage(7, 3)),
        (Outcome.REJECTED, Usage(7, 3)),
        (Outcome.CANCELLED, None),
    ],
)
def test_a_stream_that_an_error_ends_has_taken_what_its_events_say(clock, outcome, used, hides):
    """What they do not say its decode replica tells the router, but only of one whose client has left."""
    record, ended, _ = with_end_to_end(clock)
    messages = [{"role": "user", "content": "hi"}]
    body = ChatCompletionRequest(model="m", messages=messages, stream=True, **hides)
    record.meter = TokenMeter(body, Usage(1000, 4096))
    clock.now_s += 0.1
    usage = '"usage":{"prompt_tokens":7,"total_tokens":10,"completion_tokens":3}'
    record.event(f'data: {{"choices":[{{"index":0,"delta":{{"content":"a"}}}}],{usage}}}')
    record.end(outcome)
    assert ended[0].used == used


def test_a_client_that_leaves_before_the_first_token_is_told_as_that(record, clock):
    clock.now_s += 0.5
    record.end(Outcome.CANCELLED)
    (told,) = record.told
    assert (told.outcome, told.ttft_s, told.attained) == (Outcome.CANCELLED, None, False)


def test_the_span_names_no_budget_that_nobody_has_worked_out(record):
    exporter = recorded()
    record.span = TRACER.start_span("ingress", continued(SAMPLED))
    record.placed(None, None, math.inf)
    record.end(Outcome.FAILED)
    (span,) = exporter.get_finished_spans()
    assert "slackserve.ttft_budget_s" not in span.attributes
    assert span.attributes["slackserve.attained"] is False


@pytest.mark.parametrize(
    ("finish", "outcome", "is_error"),
    [
        (lambda record: record.end(Outcome.FINISHED), "finished", False),
        (lambda record: record.end(Outcome.FAILED), "failed", True),
        (lambda record: record.refused(Outcome.SHED), "shed", False),
    ],
)
def test_the_span_of_a_request_ends_with_it_and_says_how(record, clock, finish, outcome, is_error):
    exporter = recorded()
    record.span = TRACER.start_span("ingress", continued(SAMPLED))
    clock.now_s += 0.1
    if outcome != "shed":
        record.event(CHUNK)
    finish(record)
    record.end(Outcome.CANCELLED)
    (span,) = exporter.get_finished_spans()
    assert span.attributes["slackserve.outcome"] == outcome
    assert span.attributes["slackserve.tier"] == "premium"
    assert span.attributes["slackserve.ttft_budget_s"] == 0.2
    assert ("gen_ai.usage.output_tokens" in span.attributes) == (outcome != "shed")
    assert (span.status.status_code is StatusCode.ERROR) is is_error
    assert trace_id_of(record.span) in SAMPLED
