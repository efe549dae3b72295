"""Bodies are read in turn, and streams have the loop between those that take long."""

import asyncio
import itertools
import time

import pytest

from deployments.http.body.reading_turns import AT_ONCE_S, ReadingTurns
from deployments.http.errors import HTTPError
from slo.request import Party
from slo.tiers import PREMIUM, STANDARD

READING_S = 0.01
SIZE = 1000


class Reading:
    """Bodies that take so long to be read, and hold the loop meanwhile."""

    def __init__(self, most_bytes=100 * SIZE, takes_s=READING_S, at_once_s=AT_ONCE_S):
        self.turns, self.takes_s = ReadingTurns(most_bytes, at_once_s), takes_s
        self.read, self.spans_s = [], []

    def _read(self, name):
        began_s = time.monotonic()
        time.sleep(self.takes_s)
        self.spans_s.append((began_s, time.monotonic()))
        self.read.append(name)
        return name

    async def one(self, name, tenant="a", size=SIZE, tier=""):
        return await self.turns.read(Party(tenant, tier), size, lambda: self._read(name))

    def begin(self, *names, **of):
        return [asyncio.create_task(self.one(name, **of)) for name in names]


async def test_between_two_the_loop_is_everybody_elses_for_as_long_as_it_was_held():
    reading, passes, passes_at = Reading(), 0, []

    async def stream():
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    async def one(name):
        await reading.one(name)
        passes_at.append(passes)

    streaming = asyncio.create_task(stream())
    await asyncio.gather(*map(one, range(5)))
    streaming.cancel()
    assert reading.read == [0, 1, 2, 3, 4]
    for (began_s, ended_s), (next_s, _) in itertools.pairwise(reading.spans_s):
        assert next_s - ended_s >= ended_s - began_s
    assert all(after - before > 10 for before, after in itertools.pairwise(passes_at))


async def test_what_else_is_made_of_a_body_counts_as_reading():
    """Also when it follows on the reading that ends a turn."""
    reading, ended_s = Reading(), []

    async def one(name):
        await reading.one(name)
        reading.turns.counted(lambda: time.sleep(READING_S))
        ended_s.append(time.monotonic())

    await asyncio.gather(*map(one, range(4)))
    for last_s, (next_s, _) in zip(ended_s, reading.spans_s[1:], strict=False):
        assert next_s - last_s >= 2 * READING_S


async def test_a_lone_one_is_read_at_once():
    reading = Reading()
    waiting = reading.one("a")
    with pytest.raises(StopIteration) as ended:
        waiting.send(None)
    assert ended.value.value == "a"


async def test_those_that_take_little_time_together_are_read_as_they_come():
    reading = Reading(takes_s=0.0, at_once_s=5.0)
    reading.begin(*range(50))
    await asyncio.sleep(0)
    assert reading.read == list(range(50))


async def test_many_that_take_little_time_each_leave_others_the_loop_too():
    reading = Reading(takes_s=AT_ONCE_S / 5)
    many = reading.begin(*range(50))
    await asyncio.sleep(0)
    assert len(reading.read) <= 5
    await asyncio.gather(*many)


async def test_who_sends_many_keeps_another_waiting_for_one():
    reading = Reading()
    many = reading.begin(*range(20))
    await asyncio.sleep(0)
    assert await reading.one("of b", tenant="b") == "of b"
    assert reading.read == [0, "of b"]
    await asyncio.gather(*many)


async def test_who_leaves_before_their_turn_leaves_nothing_behind():
    reading = Reading(SIZE)
    first, second, third = reading.begin(*"abc")
    await asyncio.sleep(0)
    second.cancel()
    third.cancel()
    await asyncio.wait([first, second, third])
    assert (second.cancelled(), third.cancelled()) == (True, True)
    assert await asyncio.gather(*reading.begin(*"de")) == ["d", "e"]
    assert reading.read == ["a", "d", "e"]


@pytest.mark.parametrize("passes", range(5))
async def test_who_leaves_as_their_turn_comes_leaves_it_to_the_next(passes):
    reading = Reading()
    first, second, third = reading.begin(*"abc")
    await first
    time.sleep(2 * READING_S)  # noqa: ASYNC251 - the turn of the second is due
    for _ in range(passes):
        await asyncio.sleep(0)
    second.cancel()
    assert await third == "c"
    assert reading.read in (["a", "c"], ["a", "b", "c"])


async def test_of_one_tenant_the_tiers_that_headers_name_have_turns():
    reading = Reading()
    many = reading.begin(*range(4), tier=STANDARD)
    (urgent,) = reading.begin("urgent", tier=PREMIUM)
    await asyncio.gather(*many, urgent)
    assert reading.read.index("urgent") <= 2


async def test_a_body_that_is_refused_ends_its_turn():
    reading = Reading()

    def refuse():
        raise HTTPError(400, "no", kind="test", code="no")

    with pytest.raises(HTTPError):
        await reading.turns.read(Party("a", STANDARD), SIZE, refuse)
    assert await reading.one("next") == "next"


async def test_who_fills_what_may_wait_is_refused_and_nobody_else():
    """Otherwise bodies would gather that come sooner than they are read."""
    reading = Reading(4 * SIZE)
    waiting = reading.begin(*range(8))
    await asyncio.sleep(0)
    assert await reading.one("of b", tenant="b") == "of b"
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert ended[:6] == [0, 1, 2, 3, 4, 5], "one that was read at once, and as many as may wait"
    assert {(error.status, error.code) for error in ended[6:]} == {(503, "bytes_in_flight")}
    assert await reading.one("again") == "again"
