"""Those that watch health share one look at it."""

import asyncio
from contextlib import aclosing

import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse
from waiting import until

from deployments.grpc.health import WatchedHealth

GOOD, BAD = (
    HealthCheckResponse(status=status)
    for status in (HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING)
)
NEVER = 60.0
LOOK_S = 0.02


class Health:
    """What is looked at: each look waits until `seen` is there."""

    def __init__(self):
        self.seen, self.looks, self.ended = GOOD, 0, 0
        self.may = asyncio.Event()
        self.may.set()

    async def look(self):
        self.looks += 1
        try:
            await self.may.wait()
        finally:
            self.ended += 1
        if isinstance(self.seen, BaseException):
            raise self.seen
        return self.seen


async def first_of(watched):
    async with aclosing(watched.changes()) as changes:
        return await anext(changes)


def tasks():
    return asyncio.all_tasks() - {asyncio.current_task()}


async def test_a_thousand_watchers_are_told_by_one_look_at_a_time():
    health = Health()
    watched = WatchedHealth(health.look, LOOK_S, NEVER)
    told = []

    async def watch():
        async with aclosing(watched.changes()) as changes:
            async for seen in changes:
                told.append(seen)  # noqa: PERF401 - as they come

    watching = [asyncio.create_task(watch()) for _ in range(1000)]
    await until(lambda: len(told) == 1000)
    looks = health.looks
    await until(lambda: health.looks >= looks + 3)
    assert told == [GOOD] * 1000, "nothing has changed"
    health.seen = BAD
    looks = health.looks
    await until(lambda: len(told) == 2000)
    assert told[1000:] == [BAD] * 1000
    assert health.looks <= looks + 2
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)


async def test_who_comes_later_is_told_at_once_what_was_seen_last():
    health = Health()
    watched = WatchedHealth(health.look, NEVER, NEVER)
    async with aclosing(watched.changes()) as first:
        assert await anext(first) == GOOD
        assert [await first_of(watched) for _ in range(5)] == [GOOD] * 5
        assert health.looks == 1


async def test_nobody_is_told_what_was_seen_before_anybody_watched():
    health = Health()
    watched = WatchedHealth(health.look, NEVER, NEVER)
    assert await first_of(watched) == GOOD
    health.seen = BAD
    assert await first_of(watched) == BAD


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "cancelled"])
async def test_with_the_last_watcher_the_look_ends(is_closed):
    health = Health()
    watched = WatchedHealth(health.look, LOOK_S, NEVER)
    health.may.clear()
    watching = [asyncio.create_task(first_of(watched)) for _ in range(2)]
    await until(lambda: health.looks == 1)
    watching.pop(0).cancel()
    await asyncio.sleep(LOOK_S)
    assert health.ended == 0, "somebody still waits for it"
    if is_closed:
        health.may.set()
        assert await watching[0] == GOOD
    else:
        watching[0].cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    await until(lambda: not tasks())
    assert health.ended == health.looks


@pytest.mark.parametrize("fails", [RuntimeError("with a path in it"), asyncio.CancelledError()], ids=repr)
async def test_a_look_that_fails_is_no_end_of_watching(caplog, fails):
    health = Health()
    watched = WatchedHealth(health.look, LOOK_S, NEVER)
    async with aclosing(watched.changes()) as changes:
        assert await anext(changes) == GOOD
        health.seen = fails
        assert await anext(changes) == BAD
        health.seen = GOOD
        assert await anext(changes) == GOOD
    assert any("health_not_seen" in line for line in caplog.messages)


async def test_watching_ends_after_a_while():
    health = Health()
    watched = WatchedHealth(health.look, LOOK_S, 5 * LOOK_S)
    async with asyncio.timeout(5):
        assert [seen async for seen in watched.changes()] == [GOOD]
