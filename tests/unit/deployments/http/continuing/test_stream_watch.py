"""A wait for a piece ends when its replica has failed, and not because it is slow."""

import asyncio
import time

import pytest

from decode_node.answers import Piece
from deployments.http.continuing.stream_watch import DecodeFailedError, StreamWatch
from slo.replacement import FailureCause
from slo.replacement_budget import MIN_BUDGET
from slo.request import ReplicaId

A, B = ReplicaId("a"), ReplicaId("b")
NEVER = 60.0


async def well(_):
    return None


async def silent(_):
    await asyncio.sleep(NEVER)


async def dead(_):
    return FailureCause.ENGINE_DIED


async def answer(*waits_s):
    for number, wait_s in enumerate(waits_s):
        await asyncio.sleep(wait_s)
        yield number


async def read(watch, *waits_s, **of_the_request):
    got = []
    try:
        async for piece in watch.pieces(answer(*waits_s), A, **of_the_request):
            got.append(piece)  # noqa: PERF401 - what came before the failure counts
    except DecodeFailedError as error:
        return got, error.cause
    return got, None


@pytest.mark.parametrize("ask", [well, silent])
async def test_pieces_pass(ask):
    watch = StreamWatch(ask, 0.01, NEVER)
    assert await read(watch, 0, 0.02, 0) == ([0, 1, 2], None)
    assert not watch._tasks
    assert not watch._waiting
    assert not watch._heard_s


@pytest.mark.parametrize(("ask", "cause"), [(silent, FailureCause.SILENT), (dead, FailureCause.ENGINE_DIED)])
async def test_the_wait_ends_with_the_replica(ask, cause):
    watch = StreamWatch(ask, 0.01, 0.05)
    started_s = time.monotonic()
    assert await read(watch, 0, NEVER) == ([0], cause)
    assert time.monotonic() - started_s < 2
    assert not watch._tasks


async def test_a_replica_that_goes_on_is_not_silent_whatever_it_answers():
    watch = StreamWatch(silent, 0.01, 0.5)
    quick = read(watch, *[0.05] * 40)
    slow = read(watch, 0, 1.5)
    assert await asyncio.gather(quick, slow) == [(list(range(40)), None), ([0, 1], None)]


async def test_a_replica_that_ends_answers_is_not_silent_though_none_of_these_waits_any_more():
    watch = StreamWatch(silent, 0.01, 0.5)
    slow = asyncio.create_task(read(watch, 0, 1.5))
    while not slow.done():
        assert await read(watch, 0.05) == ([0], None)
    assert await slow == ([0, 1], None)


async def test_what_a_slow_reader_has_left_here_is_no_sign_of_the_replica():
    async def left_here():
        while True:
            await asyncio.sleep(0)
            yield Piece("event", [1])

    async def slowly():
        async for _ in watch.pieces(left_here(), A):
            await asyncio.sleep(0.1)

    watch = StreamWatch(silent, 0.01, 0.4)
    slow = asyncio.create_task(slowly())
    assert await asyncio.wait_for(read(watch, NEVER), 2.0) == ([], FailureCause.SILENT)
    slow.cancel()
    await asyncio.wait([slow])


async def test_who_comes_to_a_silent_replica_has_heard_nothing_of_it():
    watch, come = StreamWatch(silent, 0.01, 0.3), []

    async def crowd():
        while True:
            come.append(asyncio.create_task(read(watch, NEVER)))
            await asyncio.sleep(0.05)

    coming = asyncio.create_task(crowd())
    assert await asyncio.wait_for(read(watch, 0, NEVER), 3.0) == ([0], FailureCause.SILENT)
    for task in (coming, *come):
        task.cancel()
    await asyncio.gather(coming, *come, return_exceptions=True)


@pytest.mark.parametrize("held_s", [[0.6], [0.15] * 8], ids=["for long", "again and again"])
async def test_a_loop_that_is_held_here_is_no_silence_there(held_s):
    """What a replica has said meanwhile is heard some turns of the loop later."""

    async def answers_in_some_turns(_):
        for _ in range(6):
            await asyncio.sleep(0.01)

    reading = asyncio.create_task(read(StreamWatch(answers_in_some_turns, 0.02, 0.4), 0, 1.5))
    await asyncio.sleep(0.03)  # it is being asked
    for one_s in held_s:
        time.sleep(one_s)  # noqa: ASYNC251 - that is the case
        await asyncio.sleep(0)
    assert await reading == ([0, 1], None)


async def test_an_ask_that_fails_says_nothing():
    async def broken(_):
        raise RuntimeError("no answer")

    assert await read(StreamWatch(broken, 0.01, 0.05), 0, 0.1) == ([0, 1], None)


async def test_a_question_that_is_cancelled_from_below_says_nothing_and_is_asked_again():
    """As Serve does with a call that its replica cancels."""
    asked = []

    async def cancelled_at_first(replica):
        asked.append(replica)
        if len(asked) == 1:
            raise asyncio.CancelledError
        return FailureCause.ENGINE_DIED

    assert await asyncio.wait_for(read(StreamWatch(cancelled_at_first, 0.01, NEVER), 0, NEVER), 2.0) == (
        [0],
        FailureCause.ENGINE_DIED,
    )


async def test_not_all_leave_a_replica_that_was_silent_for_once():
    asked = []

    async def silent_at_first(replica):
        asked.append(replica)
        await (silent(replica) if len(asked) == 1 else well(replica))

    watch = StreamWatch(silent_at_first, 0.01, 0.05)
    everybody = await asyncio.gather(*[read(watch, 0, 1.0) for _ in range(3 * MIN_BUDGET)])
    assert sum(cause is FailureCause.SILENT for _, cause in everybody) == MIN_BUDGET


@pytest.mark.parametrize("pause_s", [0.5, NEVER], ids=["goes on", "stays silent"])
@pytest.mark.parametrize("why", ["bound to it", "the only replica"])
async def test_what_can_go_nowhere_waits_whether_a_silent_replica_goes_on(why, pause_s):
    async def one():
        return 1

    is_free = why == "the only replica"
    watch = StreamWatch(silent, 0.01, 0.4, **({"known": one} if is_free else {}))
    began_s = time.monotonic()
    everybody = await asyncio.gather(
        *[read(watch, 0, pause_s, may_leave=lambda: is_free) for _ in range(2 * MIN_BUDGET)]
    )
    if pause_s < NEVER:
        assert everybody == [([0, 1], None)] * len(everybody)
        return
    assert everybody == [([0], FailureCause.SILENT)] * len(everybody)
    assert time.monotonic() - began_s > 0.8, "it was silent twice"


async def test_what_can_go_nowhere_takes_no_place_of_those_that_leave_a_silent_replica():
    async def silent_at_first(_, asked=[]):  # noqa: B006 - counts its calls
        asked.append(None)
        await (silent(A) if len(asked) == 1 else well(A))

    watch = StreamWatch(silent_at_first, 0.01, 0.05)
    kept = [read(watch, 0, 0.5, may_leave=lambda: False) for _ in range(2 * MIN_BUDGET)]
    free = [read(watch, 0, 0.5) for _ in range(MIN_BUDGET)]
    everybody = await asyncio.gather(*kept, *free)
    assert [cause for _, cause in everybody] == [None] * len(kept) + [FailureCause.SILENT] * len(free)


async def test_how_many_replicas_there_are_is_not_waited_for_for_long():
    async def never():
        await asyncio.sleep(NEVER)

    async def cancelled():
        raise asyncio.CancelledError

    for known in (never, cancelled):
        reading = read(StreamWatch(silent, 0.05, 0.5, known=known), 0, NEVER)
        assert await asyncio.wait_for(reading, 0.9) == ([0], FailureCause.SILENT)


async def test_all_leave_a_replica_that_stays_silent():
    watch = StreamWatch(silent, 0.01, 0.05)
    everybody = await asyncio.gather(*[read(watch, 0, NEVER) for _ in range(3 * MIN_BUDGET)])
    assert {cause for _, cause in everybody} == {FailureCause.SILENT}


async def test_whoever_leaves_is_cancelled_not_failed():
    watch = StreamWatch(silent, 0.01, NEVER)
    task = asyncio.create_task(read(watch, NEVER))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not watch._tasks


@pytest.mark.parametrize("placed_on", [None, B], ids=["without the router", "one that is gone"])
async def test_a_replica_of_serves_choice_is_asked_once_it_has_named_itself(placed_on):
    async def dead_is_a(replica):
        return FailureCause.ENGINE_DIED if replica == A else None

    async def named():
        yield Piece("role")
        yield Piece("first", [1], replica=A)
        await asyncio.sleep(NEVER)

    watch, got = StreamWatch(dead_is_a, 0.01, NEVER), []

    async def read_all():
        async for piece in watch.pieces(named(), placed_on):
            got.append(piece.text)  # noqa: PERF401 - what came before the failure counts

    with pytest.raises(DecodeFailedError) as failed:
        await asyncio.wait_for(read_all(), 2.0)
    assert got == ["role", "first"]
    assert (failed.value.cause, failed.value.replica) == (FailureCause.ENGINE_DIED, A)
    assert not watch._tasks
    assert not watch._waiting
    assert not watch._heard_s
