"""Waiting for a prefill ends with its answer, or when its replica is lost."""

import asyncio
import threading
import time

import pytest

from decode_node.prefill_health import PrefillFailedError, PrefillWatch
from slo.replacement import FailureCause
from slo.replacement_budget import MIN_BUDGET
from slo.request import ReplicaId

PERIOD_S = 0.02
A, B = ReplicaId("a"), ReplicaId("b")


class Fleet:
    """What is wrong with each replica, and how often it was asked."""

    def __init__(self, **wrong):
        self.wrong = wrong
        self.hanging = set()
        self.asked = []

    async def ask(self, replica):
        self.asked.append(replica)
        if replica in self.hanging:
            await asyncio.Event().wait()
        return self.wrong.get(replica or "none")


def watch(fleet, silent_after_s=5.0):
    return PrefillWatch(fleet.ask, PERIOD_S, silent_after_s)


async def after(seconds, value):
    await asyncio.sleep(seconds)
    return value


def never():
    return asyncio.ensure_future(asyncio.Event().wait())


async def test_a_quick_answer_asks_nobody():
    fleet = Fleet(a=FailureCause.REPLICA_DIED)
    assert await watch(fleet).result(after(0, "kv"), A) == "kv"
    await asyncio.sleep(2 * PERIOD_S)
    assert fleet.asked == []


async def test_a_slow_answer_is_waited_for_while_its_replica_is_there():
    fleet = Fleet(b=FailureCause.REPLICA_DIED)
    assert await watch(fleet).result(after(4 * PERIOD_S, "kv"), A) == "kv"
    assert len(fleet.asked) >= 2


@pytest.mark.parametrize("cause", [FailureCause.REPLICA_DIED, FailureCause.ENGINE_DIED])
async def test_a_lost_replica_is_waited_for_no_longer(cause):
    answer = never()
    with pytest.raises(PrefillFailedError) as lost:
        await watch(Fleet(a=cause)).result(answer, A)
    assert (lost.value.cause, lost.value.replica) == (cause, A)
    await asyncio.sleep(0)
    assert answer.cancelled()


async def test_a_replica_that_answers_nobody_is_lost():
    fleet = Fleet()
    fleet.hanging.add(A)
    with pytest.raises(PrefillFailedError) as lost:
        await watch(fleet, silent_after_s=PERIOD_S).result(never(), A)
    assert lost.value.cause is FailureCause.SILENT


async def test_a_replica_whose_answer_came_while_this_process_was_busy_is_not_lost():
    loop, asked, answers = asyncio.get_running_loop(), asyncio.Event(), []

    async def ask(replica):
        answers.append(loop.create_future())
        asked.set()
        return await answers[-1]

    kv = asyncio.ensure_future(after(20 * PERIOD_S, "kv"))
    waiting = asyncio.create_task(PrefillWatch(ask, PERIOD_S, 5 * PERIOD_S).result(kv, A))
    await asked.wait()
    await asyncio.sleep(0)
    threading.Timer(PERIOD_S, loop.call_soon_threadsafe, (answers[0].set_result, None)).start()
    time.sleep(10 * PERIOD_S)  # noqa: ASYNC251 - other requests
    while not waiting.done():
        await asyncio.sleep(PERIOD_S / 2)
        for answer in answers:
            if not answer.done():
                answer.set_result(None)
    assert await waiting == "kv"


async def test_without_any_replica_nobody_is_waited_for():
    with pytest.raises(PrefillFailedError) as lost:
        await watch(Fleet(none=FailureCause.NO_REPLICA)).result(never(), None)
    assert (lost.value.cause, lost.value.replica) == (FailureCause.NO_REPLICA, None)


async def test_one_question_is_asked_for_all_who_wait_for_a_replica():
    fleet = Fleet()
    watched = watch(fleet)
    waits = [watched.result(after(2.5 * PERIOD_S, None), replica) for replica in (A, B) for _ in range(50)]
    await asyncio.gather(*waits)
    assert fleet.asked.count(A) <= 3
    assert fleet.asked.count(B) <= 3


async def test_all_who_wait_for_a_lost_replica_hear_of_it_and_nobody_else():
    watched = watch(Fleet(a=FailureCause.REPLICA_DIED))
    waits = [watched.result(never(), A) for _ in range(3)] + [watched.result(after(4 * PERIOD_S, "kv"), B)]
    *lost, kv = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(one) for one in lost] == [PrefillFailedError] * 3
    assert kv == "kv"


async def test_what_needs_nothing_more_from_the_replica_may_still_come():
    watched = watch(Fleet(a=FailureCause.REPLICA_DIED))
    assert await watched.result(after(5 * PERIOD_S, "token"), A, grace_s=1.0) == "token"
    with pytest.raises(PrefillFailedError):
        await watched.result(never(), A, grace_s=PERIOD_S)


async def test_the_error_of_an_answer_is_passed_on():
    async def fail():
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        await watch(Fleet()).result(fail(), A)


async def test_one_who_leaves_does_not_take_the_question_away_from_the_others():
    async def slowly(_):
        return await after(PERIOD_S, FailureCause.REPLICA_DIED)

    watched = PrefillWatch(slowly, PERIOD_S)
    leaving, staying = (asyncio.create_task(watched.result(never(), A)) for _ in range(2))
    await asyncio.sleep(1.5 * PERIOD_S)
    leaving.cancel()
    with pytest.raises(PrefillFailedError):
        await staying


async def test_nobody_is_asked_when_nobody_waits():
    fleet = Fleet()
    await watch(fleet).result(after(1.5 * PERIOD_S, None), A)
    asked = len(fleet.asked)
    await asyncio.sleep(3 * PERIOD_S)
    assert len(fleet.asked) == asked


@pytest.mark.parametrize("turns", range(5))
async def test_nobody_is_asked_when_the_last_one_left_as_the_answer_came(turns):
    asked, came = [], asyncio.Event()

    async def ask(replica):
        asked.append(replica)
        came.set()
        for _ in range(turns):
            await asyncio.sleep(0)

    await PrefillWatch(ask, PERIOD_S, silent_after_s=5.0).result(came.wait(), A)
    assert len(asked) == 1
    await asyncio.sleep(3 * PERIOD_S)
    assert len(asked) == 1


@pytest.mark.parametrize("error", [RuntimeError("a bug, or Serve's"), asyncio.CancelledError()])
async def test_an_ask_that_fails_fails_nobody_who_waits(error):
    tries = []

    async def fail_at_first(_):
        tries.append(1)
        if len(tries) < 3:
            raise error

    watched = PrefillWatch(fail_at_first, PERIOD_S, silent_after_s=5.0)
    waits = [watched.result(after(6 * PERIOD_S, "kv"), A) for _ in range(5)]
    assert await asyncio.gather(*waits) == ["kv"] * 5
    assert len(tries) >= 3


async def test_who_can_never_be_asked_is_silent():
    async def fail(_):
        raise RuntimeError("a bug")

    with pytest.raises(PrefillFailedError) as lost:
        await PrefillWatch(fail, PERIOD_S, silent_after_s=3 * PERIOD_S).result(never(), A)
    assert lost.value.cause is FailureCause.SILENT


async def test_not_all_leave_a_replica_that_is_only_silent():
    fleet = Fleet()
    fleet.hanging.add(A)
    watched = watch(fleet, silent_after_s=PERIOD_S)
    waits = [asyncio.create_task(watched.result(never(), A)) for _ in range(3 * MIN_BUDGET)]
    await asyncio.sleep(1.0)
    assert sum(wait.done() for wait in waits) == MIN_BUDGET
    fleet.hanging.clear()
    fleet.wrong["a"] = FailureCause.REPLICA_DIED
    lost = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 5)
    causes = [one.cause for one in lost]
    assert causes.count(FailureCause.SILENT) == MIN_BUDGET
    assert causes.count(FailureCause.REPLICA_DIED) == 2 * MIN_BUDGET
