"""How a stream's end is counted."""

import pytest

from deployments.http.event_stream import events
from slo.outcomes import Outcome

TOKEN = 'data: {"choices": [{"text": "a"}]}\n\n'
ERROR = 'data: {"error": {"message": "it broke", "code": 500}}\n\n'
DONE = "data: [DONE]\n\n"


class Record:
    def __init__(self):
        self.outcomes = []

    def event(self, text):
        return text

    def end(self, outcome):
        self.outcomes.append(outcome)


async def outcome_of(pieces, read):
    """The first end that is noted of a stream that its client leaves after `read` events."""

    async def rest():
        for piece in pieces[1:]:
            yield piece

    record = Record()
    stream = events(pieces[0], rest(), record)
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
        pytest.param([TOKEN, ERROR, DONE], 3, Outcome.FAILED, id="[DONE] after an error"),
    ],
)
async def test_a_stream_is_whole_once_done_was_handed_over(pieces, read, outcome):
    assert await outcome_of(pieces, read) is outcome
