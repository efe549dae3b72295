"""Only so many prompts are computed at once, each until it has been computed, and nobody takes all."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from decode_node.requests.local_prefills import LocalPrefills, TooManyPromptsError
from slo.request import Party
from slo.tiers import BACKGROUND, PREMIUM

HOG, SMALL = Party("hog", BACKGROUND), Party("small", BACKGROUND)


class Prompts:
    """Each asks for a turn, has it until it is computed, and its answer goes on until the end."""

    def __init__(self, local):
        self.local, self.began, self.tasks = local, [], {}
        self.done, self.end = {}, asyncio.Event()

    def ask(self, name, party=HOG, tokens=1, **how):
        self.done[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name, party, tokens, how))

    async def _run(self, name, party, tokens, how):
        async with self.local.claimed(party, **how) as claim, self.local.turn(claim, tokens) as computed:
            self.began.append(name)
            await self.done[name].wait()
            computed()
            await self.end.wait()

    async def compute(self, name):
        self.done[name].set()
        await settled()

    async def all_end(self):
        self.end.set()
        for done in self.done.values():
            done.set()
        return await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def settled():
    for _ in range(10):
        await asyncio.sleep(0)


def counts(local):
    return local.computing, local.outstanding.total()


async def test_others_wait_until_a_prompt_is_computed():
    local = LocalPrefills(2)
    prompts = Prompts(local)
    for name in range(4):
        prompts.ask(name)
    await settled()
    assert (prompts.began, *counts(local)) == ([0, 1], 2, 4)
    await prompts.compute(1)
    assert (prompts.began, *counts(local)) == ([0, 1, 2], 2, 3)
    prompts.tasks[0].cancel()
    prompts.tasks[2].cancel()
    await settled()
    assert (prompts.began, *counts(local)) == ([0, 1, 2, 3], 1, 1)
    await prompts.all_end()
    assert counts(local) == (0, 0)


async def test_who_gives_up_waiting_takes_no_turn():
    local = LocalPrefills(1)
    prompts = Prompts(local)
    for name in "abc":
        prompts.ask(name)
    await settled()
    prompts.tasks["b"].cancel()
    await settled()
    assert counts(local) == (1, 2)
    await prompts.compute("a")
    assert prompts.began == ["a", "c"]
    await prompts.all_end()
    assert counts(local) == (0, 0)


async def test_a_turn_that_comes_as_its_client_leaves_is_the_next_ones():
    local = LocalPrefills(1)
    prompts = Prompts(local)
    for name in "abc":
        prompts.ask(name)
    await settled()
    prompts.done["a"].set()
    await asyncio.sleep(0)  # b has been told, and has not heard
    prompts.tasks["b"].cancel()
    await settled()
    assert prompts.began == ["a", "c"]
    await prompts.all_end()
    assert counts(local) == (0, 0)


async def test_a_tenant_with_many_does_not_keep_another_waiting():
    local = LocalPrefills(1)
    prompts = Prompts(local)
    for name in range(20):
        prompts.ask(name, HOG, tokens=4000)
    prompts.ask("small", SMALL, tokens=10)
    await settled()
    await prompts.compute(0)
    assert prompts.began == [0, "small"]
    await prompts.all_end()


async def test_who_has_filled_the_queue_is_refused_and_no_other():
    now_s = 0.0
    local = LocalPrefills(2, most=8, clock=lambda: now_s)
    async with AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(local.claimed(HOG, wait_s=60.0))
        with pytest.raises(TooManyPromptsError) as refused:
            await stack.enter_async_context(local.claimed(HOG, wait_s=60.0))
        assert refused.value.retry_s == pytest.approx(0.5), "one of them has to be computed, two at a time"
        for _ in range(4):
            await stack.enter_async_context(local.claimed(SMALL, wait_s=60.0))
        with pytest.raises(TooManyPromptsError):
            await stack.enter_async_context(local.claimed(SMALL, wait_s=60.0))
        await stack.enter_async_context(local.claimed(HOG))  # one that is not refused any more
        assert local.outstanding == {HOG: 9, SMALL: 4}
    assert local.outstanding == {}


async def test_a_heavier_tenant_has_a_larger_part():
    local = LocalPrefills(2, most=13)
    async with AsyncExitStack() as stack:
        for party, prompts, weight in ((HOG, 6, 3.0), (SMALL, 7, 1.0)):
            await stack.enter_async_context(local.claimed(party, prompts, 60.0, weight))
        with pytest.raises(TooManyPromptsError):
            await stack.enter_async_context(local.claimed(SMALL, 1, 60.0, 1.0))
        for _ in range(4):
            await stack.enter_async_context(local.claimed(HOG, 1, 60.0, 3.0))
        with pytest.raises(TooManyPromptsError):
            await stack.enter_async_context(local.claimed(HOG, 1, 60.0, 3.0))


async def test_beyond_twice_as_many_nobody_is_taken_whoever_they_are():
    local = LocalPrefills(2, most=8)
    taken = 0
    async with AsyncExitStack() as stack:
        for number in range(50):
            try:
                await stack.enter_async_context(local.claimed(Party(f"{number}", PREMIUM), wait_s=60.0))
            except TooManyPromptsError:
                continue
            taken += 1
    assert taken == 16


async def test_the_tiers_of_a_tenant_are_no_more_than_a_tenant():
    local = LocalPrefills(2, most=12)
    other_tier = Party("hog", PREMIUM)
    async with AsyncExitStack() as stack:
        for party, prompts in ((HOG, 4), (other_tier, 4), (SMALL, 4)):
            await stack.enter_async_context(local.claimed(party, prompts, wait_s=60.0))
        for party in (HOG, other_tier):
            with pytest.raises(TooManyPromptsError):
                await stack.enter_async_context(local.claimed(party, wait_s=60.0))
        await stack.enter_async_context(local.claimed(SMALL, wait_s=60.0))


async def test_a_request_of_many_prompts_is_taken_whole_and_counts_until_each_is_computed():
    local = LocalPrefills(1, most=4)
    async with local.claimed(HOG, 16, wait_s=60.0) as claim:
        assert local.outstanding == {HOG: 16}
        for left in (15, 14):
            async with local.turn(claim, 1) as computed:
                computed()
                computed()
                assert local.outstanding == {HOG: left}
    assert counts(local) == (0, 0)


async def test_who_has_waited_too_long_is_refused_unless_one_of_its_prompts_has_had_its_turn():
    local = LocalPrefills(1)
    async with (
        local.claimed(HOG) as first,
        local.turn(first, 1),
        local.claimed(SMALL, wait_s=0.02) as claim,
    ):
        with pytest.raises(TooManyPromptsError) as refused:
            await local.wait(claim, 1)
        assert refused.value.retry_s > 0
        claim.has_begun = True
        waiting = asyncio.create_task(local.wait(claim, 1))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert counts(local) == (0, 0)
    async with local.claimed(SMALL, wait_s=0.0) as claim, local.turn(claim, 1):
        pass


async def test_how_long_a_prompt_takes_is_learned():
    now_s = 0.0
    local = LocalPrefills(2, clock=lambda: now_s)
    for _ in range(100):
        async with local.claimed(HOG) as claim, local.turn(claim, 1) as computed:
            now_s += 6.0
            computed()
    assert local.prompt_s == pytest.approx(3.0, rel=0.01), "two at a time"


async def test_what_is_computed_at_once_counts_until_it_has_been():
    local = LocalPrefills(1)
    async with local.counted() as computed:
        assert counts(local) == (1, 0)
        computed()
        computed()
        assert counts(local) == (0, 0)
    assert counts(local) == (0, 0)
