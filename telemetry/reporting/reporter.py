"""Keeps the router informed: a report on every change and a heartbeat in between.

Owns when a report is sent and what happens when the router does not answer. The report's content is its
caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from telemetry import logs
from telemetry.reporting.answering import is_cancelled

HEARTBEAT_S = 0.5
"""A replica that has nothing new to say reports this often; one that is silent for longer may have failed."""
COALESCE_S = 0.005
"""Changes within this time become one report."""
_RESTS: Final = 10.0
_MAX_REST_S: Final = 0.25
"""Or within so many times the CPU time that the last report took to make, up to this: one of thousands of
prefills takes milliseconds here, and at the router."""
_TIMEOUT_S = 5.0
_LAST_S = 1.0


class Reporter:
    """Sends `report()`, made at the moment of sending, when `changed` was called, and at every heartbeat.

    `delivered` is called when a report has arrived; what was in one that has not must be in the next.
    """

    def __init__(
        self,
        report: Callable[[], Any],
        send: Callable[[Any], Awaitable[Any]],
        delivered: Callable[[], None] = lambda: None,
    ) -> None:
        self._report = report
        self._send = send
        self._delivered = delivered
        self._changed = asyncio.Event()
        self._lost = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    def changed(self) -> None:
        """Report soon; calls in quick succession become one report."""
        self._changed.set()

    def stop(self) -> None:
        """Report no more."""
        self._task.cancel()

    async def end(self, last: Any) -> None:
        """Send one more report, if somebody listens, and none after it."""
        self._task.cancel()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_LAST_S):
                await self._send(last)

    async def _run(self) -> None:
        rest_s = 0.0
        while True:
            self._changed.clear()
            began_s = time.thread_time()
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    sending = self._send(self._report())
                    rest_s = min(_MAX_REST_S, _RESTS * (time.thread_time() - began_s))
                    await sending
            except (Exception, asyncio.CancelledError) as error:
                if is_cancelled():
                    raise  # anything else ends here, at the edge of a task; serving goes on without
                if not self._lost:
                    logs.event("router_lost", level=logging.WARNING, error=repr(error)[:300])
                self._lost = True
            else:
                self._delivered()
                if self._lost:
                    logs.event("router_found")
                self._lost = False
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._changed.wait()
                await asyncio.sleep(max(COALESCE_S, rest_s))
            except TimeoutError:
                continue
