"""Waiting for a prefill that another replica computes.

Owns when waiting is given up: what Serve has not assigned when the last prefill replica dies, it keeps until
there is another, which may take a minute.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine


class NoPrefillReplicaError(Exception):
    """No prefill replica is running."""

    def __init__(self) -> None:
        super().__init__("no prefill replica is running; try again when one has been started")


class PrefillWait:
    """Waits for prefills, and asks from time to time whether anybody is there to answer.

    Args:
        is_up: Whether a prefill replica runs. Asked once for all who wait, at most once per period.
        period_s: How often, and from when on, a wait is looked after, seconds.
    """

    def __init__(self, is_up: Callable[[], Coroutine[Any, Any, bool]], period_s: float = 5.0) -> None:
        self._is_up = is_up
        self._period_s = period_s
        self._question: asyncio.Task[bool] | None = None
        self._asked_s = 0.0

    async def result(self, answer: Awaitable[Any]) -> Any:
        """The answer.

        Raises:
            NoPrefillReplicaError: when nobody is left who could give it; it is not waited for any longer.
        """
        task = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait([task], timeout=self._period_s))[0]:
                if not await self._ask():
                    raise NoPrefillReplicaError
            return task.result()
        finally:
            task.cancel()

    async def _ask(self) -> bool:
        now_s = time.monotonic()
        if self._question is None or now_s - self._asked_s >= self._period_s:
            self._asked_s = now_s
            # Not in the context of the request that happens to ask: Serve would cancel it with that one.
            self._question = asyncio.get_running_loop().create_task(
                self._is_up(), context=contextvars.Context()
            )
        return await asyncio.shield(self._question)
