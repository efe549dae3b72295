"""How an answer ends that its engine has dropped."""

from types import SimpleNamespace

import pytest
from vllm.sampling_params import RequestOutputKind

from decode_node.requests.dropping import DROPPED, unless_dropped
from decode_node.requests.leaving import LEFT

DELTA, WHOLE = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class RefusedError(Exception):
    """What the caller gives."""


def output(tokens, reason=None, stop=None):
    completion = SimpleNamespace(token_ids=tokens, finish_reason=reason, stop_reason=stop)
    return SimpleNamespace(outputs=[completion], finished=reason is not None)


async def read(kind, *outputs):
    """(what came, whether it ended with the refusal)."""

    async def engine():
        for one in outputs:
            yield one

    came, stream = [], unless_dropped(engine(), kind, RefusedError)
    while True:
        try:
            came.append(await anext(stream))
        except StopAsyncIteration:
            return came, False
        except RefusedError:
            return came, True


async def test_a_stream_is_refused_after_all_that_it_has():
    last = output([2, 3], "error", DROPPED)
    came, is_refused = await read(DELTA, output([1]), last)
    assert [one.outputs[0].token_ids for one in came] == [[1], [2, 3]]
    assert is_refused
    assert not last.finished, "for vLLM's layer it goes on, until it is refused"
    assert last.outputs[0].finish_reason is None
    came, is_refused = await read(DELTA, output([1]), output([], "error", DROPPED))
    assert (len(came), is_refused) == (1, True)


async def test_of_a_whole_answer_there_is_nothing():
    assert await read(WHOLE, output([1, 2], "error", DROPPED)) == ([], True)


@pytest.mark.parametrize(
    ("reason", "stop"), [("stop", DROPPED), ("error", LEFT), ("error", None), ("length", None)]
)
async def test_any_other_end_is_none_of_this(reason, stop):
    last = output([2], reason, stop)
    assert await read(DELTA, last) == ([last], False)
    assert last.outputs[0].finish_reason == reason
