"""Serve calls once more where it cannot know that it had: an attempt is here until its last call has left."""

import asyncio

import pytest
from job_table import TOKEN, called, prefill

from prefill_node.release import Release
from prefill_node.replica.jobs import CLIENT_CLOSED_REQUEST
from sampling.carried import CacheUse, Prefilled
from slo.request import BEGUN_XARG


async def test_a_call_that_comes_twice_is_computed_once(table, client):
    first = asyncio.create_task(prefill(table))
    await asyncio.sleep(0.01)
    again = asyncio.create_task(prefill(table))
    await asyncio.sleep(0.01)
    client.go.set()
    assert await first == await again == Prefilled(TOKEN, {"at": "prefill-job"}, "here", CacheUse(2, 1))
    assert len(client.asked) == 1
    assert not table._computing


async def test_a_call_that_breaks_takes_nothing_from_the_one_that_comes_again(table, client):
    first, again = (asyncio.create_task(prefill(table)) for _ in range(2))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0.01)
    assert list(table._ledger.accepted) == ["job"]
    client.go.set()
    assert isinstance(await again, Prefilled)
    assert (len(client.asked), client.aborted) == (1, [])
    assert not table._computing


@pytest.mark.parametrize("after_s", [0.0, 0.01], ids=["at once", "later"])
async def test_what_a_call_broke_off_is_computed_anew_once_the_engine_has_dropped_it(table, client, after_s):
    first = asyncio.create_task(prefill(table))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(after_s)
    again = asyncio.create_task(prefill(table))
    await asyncio.sleep(0.01)
    assert (len(client.asked), client.aborted) == (2, [Release("job", 1).encode()])
    begun = [params.extra_args[BEGUN_XARG] for _, _, params in client.asked]
    assert begun == [1, 2], "the release does not mean the second, whenever the engine reads it"
    client.go.set()
    assert isinstance(await again, Prefilled)
    assert len(client.aborted) == 1
    assert not table._computing


@pytest.mark.parametrize("is_first", [True, False])
async def test_blocks_of_which_one_call_was_told_are_not_freed_with_another(table, client, is_first):
    """Serve writes the answer to a connection that is gone."""
    client.go.set()
    breaks = called(table)
    if is_first:
        await anext(breaks)
        answered = await prefill(table)
    else:
        other = asyncio.create_task(prefill(table))
        await anext(breaks)
        answered = await other
    await breaks.aclose()
    await asyncio.sleep(0.01)
    assert isinstance(answered, Prefilled)
    assert (len(client.asked), client.aborted) == (1, [])
    assert not table._computing


async def start(*calls):
    """Each waits for a place, or has one."""
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0.01)
    return tasks


async def cut(call):
    call.cancel()
    await asyncio.sleep(0.01)


async def test_what_one_call_computes_is_kept_for_another_that_waits_for_a_place(table, client):
    (first, *others) = await start(prefill(table), *(prefill(table, job=f"{n}") for n in range(8)))
    (again,) = await start(prefill(table))
    assert list(table._ledger.without_place) == ["7"], "it is reported once"
    await cut(first)
    assert "job" in table._ledger.accepted
    client.go.set()
    assert isinstance(await again, Prefilled)
    await asyncio.gather(*others)
    assert [job for _, job, _ in client.asked].count("job") == 1
    assert client.aborted == []
    assert not table._computing


async def test_what_two_calls_ask_for_is_reported_until_neither_waits_for_a_place(table, client):
    others = await start(*(prefill(table, job=f"{n}") for n in range(8)))
    first, again = await start(prefill(table), prefill(table))
    await cut(first)
    assert list(table._ledger.without_place) == ["job"]
    assert table._ledger.take_ended() == ()
    await cut(again)
    assert list(table._ledger.without_place) == []
    assert table._ledger.take_ended() == ("job",)
    client.go.set()
    await asyncio.gather(*others)
    assert not table._calls


@pytest.mark.parametrize("has_place", [True, False])
async def test_a_later_attempt_ends_a_call_whose_twin_broke(table, client, has_place):
    """It would be computed for nobody once it had a place."""
    names = [f"{n}" for n in range(8)]
    names.insert(0 if has_place else 8, "job")
    calls = dict(zip(names, await start(*(prefill(table, job=name) for name in names)), strict=True))
    (again,) = await start(prefill(table))
    first = calls.pop("job")
    await cut(first)
    (later,) = await start(prefill(table, attempt=1))
    client.go.set()
    assert (await again).error.code == CLIENT_CLOSED_REQUEST
    assert isinstance(await later, Prefilled)
    await asyncio.gather(*calls.values())
    assert [job for _, job, _ in client.asked].count("job") == has_place


async def test_a_call_that_gets_its_place_as_a_later_attempt_comes_does_not_begin(table, client):
    others = await start(*(prefill(table, job=f"{n}") for n in range(8)))
    (earlier,) = await start(prefill(table))
    others[0].cancel()
    (later,) = await start(prefill(table, attempt=1))
    assert "job" not in [call.args[0].job_id for call in table._governor.arrived.call_args_list]
    client.go.set()
    assert (await earlier).error.code == CLIENT_CLOSED_REQUEST
    assert isinstance(await later, Prefilled)
    await asyncio.gather(*others, return_exceptions=True)


async def test_a_call_that_comes_again_while_the_engine_drops_the_first_is_reported(table, client):
    (first, *others) = await start(prefill(table), *(prefill(table, job=f"{n}") for n in range(9)))
    first.cancel()
    await asyncio.sleep(0)
    (again,) = await start(prefill(table))
    assert "job" in table._ledger.without_place
    client.go.set()
    assert isinstance(await again, Prefilled)
    await asyncio.gather(*others)
    assert [Release.of(name).job for name in client.aborted] == ["job"]
    assert not table._computing


async def test_what_the_engine_is_dropping_is_not_dropped_again_with_the_next_call_that_breaks(table, client):
    dropped = asyncio.Event()

    async def abort(names):
        client.aborted += names
        await dropped.wait()

    client.engine_core.abort_requests_async = abort
    for _ in range(2):
        (breaks,) = await start(prefill(table))
        await cut(breaks)
    (again,) = await start(prefill(table))
    assert len(client.asked) == 1
    dropped.set()
    client.go.set()
    assert isinstance(await again, Prefilled)
    assert client.aborted == [Release("job", 1).encode()]
    assert not table._computing
