"""An answer that has come is taken, however busy the event loop was meanwhile; what has not is cancelled."""

import asyncio
import threading
import time

import pytest

from telemetry.reporting.answering import answer_within


async def call(answer):
    """As a call to another process: what it gives is known in another thread."""
    return await answer


async def test_an_answer_that_came_while_the_loop_was_busy_is_heard():
    """With `asyncio.timeout` it is not."""
    loop = asyncio.get_running_loop()
    answer = loop.create_future()
    asked = asyncio.create_task(answer_within(call(answer), 0.05))
    await asyncio.sleep(0)
    threading.Timer(0.02, loop.call_soon_threadsafe, (answer.set_result, "here")).start()
    time.sleep(0.2)  # noqa: ASYNC251 - other requests
    assert await asked == "here"


async def test_what_does_not_come_is_cancelled():
    answer = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError):
        await answer_within(call(answer), 0.01)
    await asyncio.sleep(0)
    assert answer.cancelled()


async def test_who_is_cancelled_cancels_what_it_waits_for_even_as_the_answer_comes():
    for has_come in (False, True):
        answer = asyncio.get_running_loop().create_future()
        asked = asyncio.create_task(answer_within(call(answer), 60))
        await asyncio.sleep(0.01)
        if has_come:
            answer.set_result("here")
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.sleep(0)
        assert answer.cancelled() != has_come


async def test_a_failure_is_raised():
    async def fail():
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        await answer_within(fail(), 1)
