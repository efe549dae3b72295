"""How a stream's end is counted."""

import json
from types import SimpleNamespace

import pytest

from decode_node.answers import ENDED_BY_GRAMMAR, error_response
from deployments.http import accounting
from deployments.http.accounting import Identity, RequestRecord
from deployments.http.answering import event_stream
from deployments.http.answering.event_stream import events, read_by_client
from slo.objectives import Objective
from slo.outcomes import Outcome
from slo.request import JobId
from slo.tiers import STANDARD, ObjectiveName

TOKEN = 'data: {"choices": [{"text": "a"}]}\n\n'
ERROR = 'data: {"error": {"message": "it broke", "code": 500}}\n\n'
DONE = "data: [DONE]\n\n"
DROPPED = error_response(429, "dropped", "it is promised nothing")
FAILED = error_response(400, "BadRequestError", "it broke")
ITS_OWN = error_response(400, ENDED_BY_GRAMMAR, "it cannot go on", "structured_outputs")


class Record:
    def __init__(self):
        self.outcomes = []

    def event(self, text):
        return text

    def end(self, outcome):
        self.outcomes.append(outcome)

    def traced(self, error):
        error.trace_id = "t"
        return error


async def outcome_of(pieces, read):
    """The first end that is noted of a stream that its client leaves after `read` events."""

    async def rest():
        for piece in pieces[1:]:
            yield piece

    record = Record()
    stream = events(pieces[0], rest(), record, str)
    for _ in range(read):
        await anext(stream)
    await stream.aclose()
    return record.outcomes[0]


@pytest.mark.parametrize(
    ("pieces", "read", "outcome"),
    [
        pytest.param([TOKEN, TOKEN, DONE], 3, Outcome.FINISHED, id="it leaves with [DONE]"),
        pytest.param([TOKEN, [TOKEN, DONE]], 3, Outcome.FINISHED, id="the last events in one piece"),
        pytest.param([TOKEN, TOKEN, DONE], 2, Outcome.CANCELLED, id="it leaves before"),
        pytest.param([TOKEN, ERROR, DONE], 2, Outcome.FAILED, id="an error before [DONE]"),
        pytest.param([TOKEN, FAILED, DONE], 2, Outcome.FAILED, id="whatever the error"),
        pytest.param([TOKEN, DROPPED, DONE], 2, Outcome.EVICTED, id="but one that others have ended"),
        pytest.param([TOKEN, ITS_OWN, DONE], 2, Outcome.REJECTED, id="or its own grammar"),
    ],
)
async def test_a_stream_is_whole_once_done_was_handed_over(pieces, read, outcome):
    assert await outcome_of(pieces, read) is outcome


async def test_a_stream_that_others_have_ended_ends_with_the_error_and_nothing_else():
    async def rest():
        yield DROPPED

    record = Record()
    *_, last = [event async for event in events(TOKEN, rest(), record, str)]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["code"], error["trace_id"]) == ("overloaded_error", "dropped", "t")
    assert record.outcomes[0] is Outcome.EVICTED


async def test_an_error_of_vllms_ends_a_stream_in_our_words():
    async def rest():
        yield 'data: {"error": {"message": "x", "type": "BadRequestError", "param": null, "code": 400}}\n\n'
        yield DONE

    *_, last = [text async for text in events(TOKEN, rest(), Record(), str)]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["message"], error["code"]) == ("x", "invalid_value")


async def judged(monkeypatch, *, server_s, client_s, read=6, tpot_s=0.05, e2e_s=0.5):
    """What is judged of a stream of five tokens, each of which takes its server and its client so long.

    The client leaves after `read` events.
    """
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr(accounting, "time", clock)
    monkeypatch.setattr(event_stream, "time", clock)
    told = []
    record = RequestRecord(
        SimpleNamespace(count=lambda *_, **__: None, observe=lambda *_, **__: None),
        Identity(JobId("j"), "r", "acme", "tiny", streams=True),
        Objective(STANDARD, None, tpot_s, e2e_s=e2e_s),
        0.0,
        ended=lambda _: None,
        tell=told.append,
    )

    async def rest():
        nonlocal now_s, tokens
        for piece in [*['data: {"choices":[{"index":0,"text":"a"}]}\n\n'] * 4, DONE]:
            now_s += server_s
            tokens += piece is not DONE
            yield piece

    tokens, record.delivered_tokens = 1, lambda: tokens
    told_events = events('data: {"choices":[{"index":0,"text":"a"}]}\n\n', rest(), record, str)
    stream = read_by_client(told_events, record)
    for _ in range(read):
        await anext(stream)
        now_s += client_s
    await stream.aclose()
    return told[0].judged


TPOT, E2E = ObjectiveName.TPOT, ObjectiveName.E2E


@pytest.mark.parametrize(
    ("took", "met"),
    {
        "both are quick": ({"server_s": 0.02, "client_s": 0.0}, {TPOT: True, E2E: True}),
        "the client reads slowly": ({"server_s": 0.02, "client_s": 9.0}, {}),
        "the client reads a little slowly": (
            {"server_s": 0.02, "client_s": 0.02},
            {TPOT: True, E2E: True},
        ),
        "the server is late, and its client reads slowly": (
            {"server_s": 0.2, "client_s": 0.1},
            {TPOT: False, E2E: False},
        ),
        "nobody knows whether the server is late": ({"server_s": 0.04, "client_s": 0.02}, {E2E: True}),
        "the client leaves an event that it does not read": (
            {"server_s": 0.02, "client_s": 9.0, "read": 2},
            {},
        ),
        "the client leaves a server that is late": (
            {"server_s": 0.2, "client_s": 0.01, "read": 5},
            {TPOT: False, E2E: False},
        ),
    }.values(),
)
async def test_the_time_in_which_its_client_does_not_read_is_not_the_servers(monkeypatch, took, met):
    assert await judged(monkeypatch, **took) == met
