"""Only so many prompts are computed at once, and each of them until it has been computed."""

import asyncio

import pytest

from decode_node.local_prefills import LocalPrefills


async def test_others_wait_until_a_prompt_is_computed():
    local, began = LocalPrefills(2), []
    done = [asyncio.Event() for _ in range(4)]
    end = asyncio.Event()

    async def one(number):
        async with local.turn() as computed:
            began.append(number)
            await done[number].wait()
            computed()
            await end.wait()

    tasks = [asyncio.create_task(one(number)) for number in range(4)]
    await asyncio.sleep(0)
    assert (began, local.computing, local.outstanding) == ([0, 1], 2, 4)
    done[1].set()
    await asyncio.sleep(0.01)
    assert (began, local.computing, local.outstanding) == ([0, 1, 2], 2, 3)
    tasks[0].cancel()
    tasks[2].cancel()
    await asyncio.sleep(0.01)
    assert (began, local.computing, local.outstanding) == ([0, 1, 2, 3], 1, 1)
    done[3].set()
    end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (local.computing, local.outstanding) == (0, 0)


async def test_who_gives_up_waiting_takes_no_place():
    local = LocalPrefills(1)

    async def wait():
        async with local.turn():
            raise AssertionError("it is nobody's turn")

    async with local.turn():
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert local.outstanding == 1
    assert (local.computing, local.outstanding) == (0, 0)
    async with local.turn():
        pass


async def test_a_short_prompt_takes_a_place_and_lengthens_no_limit():
    local = LocalPrefills(1)
    async with local.turn(is_short=True) as computed:
        assert (local.computing, local.outstanding) == (0, 1)
        computed()
        assert (local.computing, local.outstanding) == (0, 0)
    async with local.turn():
        assert (local.computing, local.outstanding) == (1, 1)


@pytest.mark.parametrize(("are_several", "counted"), [(False, [1, 0, 0]), (True, [1, 1, 1])])
async def test_of_several_prompts_the_first_piece_says_nothing_of_the_others(are_several, counted):
    local, seen = LocalPrefills(1), []

    async def answer():
        for number in range(3):
            seen.append(local.computing)
            yield number

    assert [piece async for piece in local.pieces(answer(), are_several=are_several)] == [0, 1, 2]
    assert seen == counted
    assert local.computing == 0
