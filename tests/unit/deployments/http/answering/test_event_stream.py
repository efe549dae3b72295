"""How a stream's end is counted."""

import json

import pytest

from decode_node.answers import ENDED_BY_GRAMMAR, error_response
from deployments.http.answering.event_stream import events
from slo.outcomes import Outcome

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
