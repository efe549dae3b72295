"""Waiting for a prefill ends with its answer, or when nobody is left who could give one."""

import asyncio

import pytest

from decode_node.prefill_wait import NoPrefillReplicaError, PrefillWait

PERIOD_S = 0.02


class Fleet:
    """Says whether it is up, and how often it was asked."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = 0

    async def is_up(self):
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


async def after(seconds, value):
    await asyncio.sleep(seconds)
    return value


async def test_a_quick_answer_asks_nobody():
    fleet = Fleet(False)
    assert await PrefillWait(fleet.is_up, PERIOD_S).result(after(0, "kv")) == "kv"
    assert fleet.asked == 0


async def test_a_slow_answer_is_waited_for_while_somebody_is_there():
    fleet = Fleet(True)
    assert await PrefillWait(fleet.is_up, PERIOD_S).result(after(4 * PERIOD_S, "kv")) == "kv"
    assert fleet.asked >= 2


async def test_nobody_is_waited_for_when_nobody_is_there():
    fleet = Fleet(True, False)
    answer = asyncio.ensure_future(asyncio.Event().wait())
    with pytest.raises(NoPrefillReplicaError, match="no prefill replica is running"):
        await PrefillWait(fleet.is_up, PERIOD_S).result(answer)
    await asyncio.sleep(0)
    assert answer.cancelled()


async def test_one_question_is_asked_for_all_who_wait():
    fleet = Fleet(True)
    wait = PrefillWait(fleet.is_up, PERIOD_S)
    await asyncio.gather(*(wait.result(after(1.5 * PERIOD_S, None)) for _ in range(100)))
    assert fleet.asked <= 2


async def test_the_error_of_an_answer_is_passed_on():
    async def fail():
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        await PrefillWait(Fleet(True).is_up, PERIOD_S).result(fail())


async def test_one_who_leaves_does_not_take_the_question_away_from_the_others():
    async def slowly():
        return await after(PERIOD_S, False)

    wait = PrefillWait(slowly, PERIOD_S)
    leaving, staying = (asyncio.create_task(wait.result(asyncio.Event().wait())) for _ in range(2))
    await asyncio.sleep(1.5 * PERIOD_S)
    leaving.cancel()
    with pytest.raises(NoPrefillReplicaError):
        await staying
