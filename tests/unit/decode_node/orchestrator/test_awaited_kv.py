"""Which KV caches are awaited, as the router is told."""

import asyncio
from dataclasses import replace

import pytest
from played_replicas import (
    ANSWER,
    CASES,
    FAILED,
    FIRST,
    LEAVES,
    SECOND,
    A,
    B,
    Play,
    Request,
    context,
    orchestrated,
)
from waiting import until

from decode_node.carrying import PRESSURE_SCHEDULER
from decode_node.requests.local_prefills import LocalPrefills
from decode_node.requests.only_here import admitted
from slo.replacement import Replaced
from slo.reports import AwaitedKv
from slo.tiers import STANDARD


@CASES
async def test_the_router_is_told_what_kv_is_awaited_until_it_is_there(request_, answer):
    seen = []

    class Watched(Play):
        async def prefill(self, *given):
            seen.append(served.awaited())
            return await super().prefill(*given)

        async def generate(self, *given, **options):
            async for one in super().generate(*given, **options):
                seen.append(served.awaited())
                yield one
                await asyncio.sleep(0)
                seen.append(served.awaited())

    steps = Watched({A: [FAILED], B: ANSWER}, [Replaced(B, 0.1)])
    served, call = orchestrated(steps, request=request_)
    pieces = [one async for one in served.run(call, context())]
    assert pieces
    waits = AwaitedKv("job", STANDARD, 100)
    carried = AwaitedKv("job", STANDARD, 101)
    assert seen[0] == (waits,)
    assert set(seen) <= {(waits,), (carried,), ()}
    assert seen[-1] == ()
    first = seen.index(())
    assert all(one == () for one in seen[first:])
    assert served.awaited() == ()


async def test_one_that_has_come_is_named_until_its_run_names_it():
    steps = Play({A: None})
    served, call = orchestrated(steps)
    with served.expects(context()):
        assert served.awaited() == (AwaitedKv("job", STANDARD, 0),)
        task = asyncio.create_task(anext(served.run(call, context())))
        await until(lambda: steps.contexts)
        assert served.awaited() == (AwaitedKv("job", STANDARD, 100),)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert served.awaited() == ()
    with served.expects(context()):
        with served.expects(context()):
            pass
        assert served.awaited() == (), "the same job that has come once more is the one that counts"
    assert served.awaited() == ()


async def test_one_that_has_left_awaits_its_kv_again():
    steps = Play({A: [[SECOND], (LEAVES, [])], B: None}, [Replaced(B, 0.2)], scheduler=PRESSURE_SCHEDULER)
    served, call = orchestrated(steps, leaves=True)

    async def answer():
        return [one async for one in served.run(call, context())]

    task = asyncio.create_task(answer())
    await until(lambda: len(steps.contexts) == 2)
    assert served.awaited() == (AwaitedKv("job", STANDARD, 102),)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert served.awaited() == ()


@pytest.mark.parametrize("stream", [True, False])
async def test_one_whose_prompt_is_computed_here_at_once_is_awaited_until_that_is_so(stream):
    steps = Play({})
    steps.at_home = [1.0, [FIRST], None]
    served, call = orchestrated(steps, request=Request(stream=stream))
    async with admitted(LocalPrefills(1), context(), 1, 60.0) as here:
        pieces = served.run_here(replace(call, token_ids=[]), context(), here, "several_sequences")
        task = asyncio.create_task(anext(pieces))
        await until(lambda: steps.given)
        assert served.awaited() == (AwaitedKv("job", STANDARD, 0),)
        await until(lambda: call.amount.tokens)
        assert served.awaited() == ()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await pieces.aclose()
