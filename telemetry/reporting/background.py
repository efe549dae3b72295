"""Work that goes on after the request that causes it.

Owns the tasks' references, without which the event loop may drop them, and their context: Serve cancels every
call that is made in the context of a request that was cancelled.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Coroutine
from typing import Any

from telemetry import logs

TIMEOUT_S = 10.0


class Background:
    """Runs small pieces of work to their end; one that fails or takes too long is logged and ended."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, name: str, work: Coroutine[Any, Any, Any], **fields: Any) -> asyncio.Task[None]:
        """Start `work` outside the current request, for `TIMEOUT_S` at most; the rest is for the log."""
        running = asyncio.get_running_loop().create_task(
            self._guard(name, work, fields), context=contextvars.Context()
        )
        self._tasks.add(running)
        running.add_done_callback(self._tasks.discard)
        return running

    @staticmethod
    async def _guard(name: str, work: Coroutine[Any, Any, Any], fields: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await work
        except Exception as error:  # noqa: BLE001 - the edge of a task; nobody waits for it
            logs.event(f"{name}_failed", level=logging.WARNING, error=repr(error)[:300], **fields)
