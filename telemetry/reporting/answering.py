"""Waiting for an answer of another process, but not for long.

`asyncio.timeout` takes an answer for missing that came while the event loop was busy with others: once
it gets to it, the time is up as well, and cancelling comes first. In a crowd no answer would be heard any
more, whenever it came. Owns that one wait, and how to tell whether who waits was cancelled, or its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def answer_within(answer: Awaitable[T], limit_s: float) -> T:
    """The answer, if it is there when the time is up and somebody looks.

    Raises:
        TimeoutError: when it is not; it is cancelled then, as it is when this is.
    """
    asked = asyncio.ensure_future(answer)
    try:
        await asyncio.wait((asked,), timeout=limit_s)
        if not asked.done():
            raise TimeoutError
        return asked.result()
    finally:
        if not asked.done():
            asked.add_done_callback(_looked_at)
            asked.cancel()


def is_cancelled() -> bool:
    """Whether the current task has been cancelled, whoever may have caught that.

    Serve raises the end of a call that was cancelled elsewhere as if whoever waits for it had been.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _looked_at(asked: asyncio.Future[T]) -> None:
    """Nobody waits for it any more, so whatever it ended with is no news."""
    if not asked.cancelled():
        asked.exception()
