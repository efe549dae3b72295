"""Tenants have turns, however much one of them has to do and whoever leaves."""

import asyncio
import random

import pytest

from decode_node.grammars.turns import TurnsOfTenants


async def done_in_turn(given, leaving=()):
    """The order in which pieces of work are done that come during one of `a`; those of `leaving` leave."""
    turns, done = TurnsOfTenants(), []

    async def work(number, tenant):
        async with turns.turn(tenant):
            done.append(tenant)
            await asyncio.sleep(0)

    async with turns.turn("a"):
        tasks = [asyncio.create_task(work(number, tenant)) for number, tenant in enumerate(given)]
        await asyncio.sleep(0)
        for number in leaving:
            tasks[number].cancel()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not turns._waiting
    assert turns._whose is None
    return "".join(done)


@pytest.mark.parametrize(
    ("given", "leaving", "order"),
    [
        ("aaa", (), "aaa"),
        ("aaaab", (), "baaaa"),
        ("aaabbbc", (), "bacbaba"),
        ("cccbb", (), "cbcbc"),
        ("aaab", (3,), "aaa"),
        ("aabb", (0, 2), "ba"),
    ],
)
async def test_tenants_have_turns(given, leaving, order):
    assert await done_in_turn(given, leaving) == order


async def test_one_that_leaves_as_it_is_called_passes_the_turn_on():
    turns, done = TurnsOfTenants(), []

    async def work(name):
        async with turns.turn("a"):
            done.append(name)

    async with turns.turn("a"):
        gone, other = [asyncio.create_task(work(name)) for name in ("gone", "other")]
        await asyncio.sleep(0)
    gone.cancel()  # it has been called and has not heard of it
    await asyncio.wait_for(other, 1.0)
    assert done == ["other"]
    async with asyncio.timeout(1.0), turns.turn("b"):
        done.append("another")


async def test_nothing_is_done_at_once_and_nothing_is_left_out():
    rng, turns, busy, done = random.Random(3), TurnsOfTenants(), 0, []

    async def work(number):
        nonlocal busy
        await asyncio.sleep(rng.random() * 0.02)
        async with turns.turn(rng.choice("abc")):
            busy += 1
            assert busy == 1
            try:
                await asyncio.sleep(rng.random() * 0.002)
                done.append(number)
            finally:
                busy -= 1

    tasks = [asyncio.create_task(work(number)) for number in range(60)]
    await asyncio.sleep(0.02)
    left = set(rng.sample(range(60), 20))
    for number in left:
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert set(range(60)) - left <= set(done)
    assert not turns._waiting
    assert turns._whose is None
