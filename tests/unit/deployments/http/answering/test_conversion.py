"""Texts become tokens, and tokens texts, for a few requests of a tenant at a time."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from played_calls import call_of, call_until
from ray.exceptions import RayActorError

from decode_node.answers import error_response
from deployments.http.answering.conversion import AT_ONCE, Conversions
from deployments.http.errors import HTTPError

TOKENS = SimpleNamespace(model_dump=lambda: {"tokens": [1, 2]})


class Responses:
    """A call to the decode tier: what it answers, an exception that it raises, or None for no answer ever."""

    def __init__(self, answer=None):
        self.answer = answer
        self.is_cancelled = False

    async def __anext__(self):
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def cancel(self):
        self.is_cancelled = True


def state_of(tenant="acme"):
    return SimpleNamespace(tenant=SimpleNamespace(name=tenant), request_id="r")


async def converted(conversions, responses, tenant="acme"):
    answer = await conversions.answer(lambda: call_of(responses), "prompt", state_of(tenant))
    assert not responses.is_cancelled
    return json.loads(answer.body)


async def refusal(conversions, responses, tenant="acme"):
    with pytest.raises(HTTPError) as refused:
        await conversions.answer(lambda: call_of(responses), "prompt", state_of(tenant))
    return refused.value.status, refused.value.code, refused.value.headers.get("retry-after")


async def test_a_replica_answers():
    assert await converted(Conversions(), Responses(TOKENS)) == {"tokens": [1, 2]}


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        (error_response(400, "BadRequestError", "no"), 400, "invalid_value"),
        (OverflowError("out of range"), 400, "invalid_value"),
        (RuntimeError("a bug"), 500, "internal_error"),
    ],
)
async def test_what_it_answers_otherwise(answer, status, code):
    assert await refusal(Conversions(), Responses(answer)) == (status, code, None)


async def test_a_replica_that_dies_is_asked_no_more_but_another():
    calls = iter([Responses(RayActorError()), Responses(TOKENS)])
    answer = await Conversions().answer(lambda: call_of(next(calls)), "prompt", state_of())
    assert json.loads(answer.body) == {"tokens": [1, 2]}
    assert next(calls, None) is None


async def test_when_another_dies_too_it_may_be_asked_again_later():
    assert await refusal(Conversions(), Responses(RayActorError())) == (503, "no_replica", "10")


async def test_without_a_replica_it_is_not_waited_for_long():
    """Serve would keep the call until there is one."""
    conversions, silent = Conversions(answered_s=0.02), Responses()
    assert await refusal(conversions, silent) == (503, "no_replica", "10")
    assert silent.is_cancelled
    for _ in range(AT_ONCE + 1):
        assert await converted(conversions, Responses(TOKENS)), "it has ended"


async def test_a_tenant_has_few_at_a_time_and_another_its_own():
    conversions, silent = Conversions(), [Responses() for _ in range(AT_ONCE)]
    ongoing = [asyncio.ensure_future(converted(conversions, one)) for one in silent]
    await asyncio.sleep(0)
    assert await refusal(conversions, Responses(TOKENS)) == (429, "conversions", "1")
    assert await converted(conversions, Responses(TOKENS), "other")
    ongoing[0].cancel()
    await asyncio.wait(ongoing[:1])
    assert silent[0].is_cancelled, "the client is gone"
    assert await converted(conversions, Responses(TOKENS))
    ongoing[1].cancel()
    await asyncio.wait(ongoing[1:])


async def test_one_that_a_replica_takes_up_just_as_its_client_leaves_is_cancelled():
    accepted, silent = asyncio.get_running_loop().create_future(), Responses()
    conversions = Conversions()
    answering = asyncio.ensure_future(conversions.answer(lambda: call_until(accepted), "prompt", state_of()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answering.cancel()
    accepted.set_result(silent)
    await asyncio.wait([answering])
    assert silent.is_cancelled
