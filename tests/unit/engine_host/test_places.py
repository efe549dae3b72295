"""Whoever leaves, and whenever, no place is lost and none is had twice."""

import asyncio
import random

import pytest

from engine_host.places import Places
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


class Crowd:
    """Requests before two places, and which of them are in."""

    def __init__(self, many=2):
        self.places = Places(many, DEFAULT_TIERS)
        self.inside, self.most = [], 0

    def come(self, name, tier=STANDARD):
        return asyncio.create_task(self._stay(name, tier), name=name)

    async def _stay(self, name, tier):
        async with self.places.one(tier):
            self.inside.append(name)
            self.most = max(self.most, len(self.inside))
            try:
                await asyncio.Event().wait()
            finally:
                self.inside.remove(name)


async def test_a_premium_one_goes_in_before_those_that_came_earlier():
    crowd = Crowd()
    tasks = [crowd.come(f"b{n}", BACKGROUND) for n in range(10)]
    await settle()
    tasks.append(crowd.come("p", PREMIUM))
    await settle()
    assert crowd.inside == ["b0", "b1"]
    tasks[0].cancel()
    await settle()
    assert crowd.inside == ["b1", "p"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert crowd.places._free == 2


async def test_one_that_leaves_as_it_gets_a_place_passes_it_on():
    crowd = Crowd(1)
    first, second, third = (crowd.come(name) for name in "abc")
    await settle()
    first.cancel()
    await asyncio.sleep(0)  # it has left, and the second has its place but has not run
    second.cancel()
    await settle()
    assert crowd.inside == ["c"]
    third.cancel()
    await asyncio.gather(first, second, third, return_exceptions=True)
    assert crowd.places._free == 1


@pytest.mark.parametrize("seed", range(20))
async def test_no_place_is_lost_whoever_leaves(seed):
    draw, crowd = random.Random(seed), Crowd(3)
    tasks = []
    for number in range(200):
        tasks.append(crowd.come(str(number), draw.choice([PREMIUM, STANDARD, BACKGROUND])))
        for task in draw.sample(tasks, min(len(tasks), draw.randrange(3))):
            task.cancel()
        for _ in range(draw.randrange(4)):
            await asyncio.sleep(0)
    await settle()
    waiting = sum(not task.done() for task in tasks) - len(crowd.inside)
    assert len(crowd.inside) == 3 or not waiting
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (crowd.places._free, crowd.inside, crowd.most) == (3, [], 3)
