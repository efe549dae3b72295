"""Watches over one replica's engine: one that has work and makes no progress is hung, and is killed.

vLLM notices engines that end, not those that hang. A killed one is noticed: its requests end with an error
and go elsewhere, the replica says that it is gone, and Serve replaces it. One that is killed and does not
end, as when a device's driver does not let it go, is given up all the same. Owns the looking; when an engine
counts as hung is `slo.liveness`'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable
from typing import Any, Final

from engine_host.processes import give_up_engine, kill_engine
from slo.liveness import HUNG_AFTER_S, StallAccount, stall_limit_s
from slo.reports import EngineEnd
from telemetry import logs
from telemetry.reporting.answering import answer_within

LOOK_S: Final = 0.5
_ANSWER_S: Final = 1.0
_END_S: Final = 1.0
"""A killed process has ended by then, unless it is in the kernel and does not get out of it."""


class EngineWatchdog:
    """Looks at an engine every `LOOK_S` from `start` on, until the engine is dead.

    Args:
        client: vLLM's client of the engine, in the replica's process.
        progress: Changes whenever the engine gets on: a step has ended, or part of a pass.
        pass_s: Predicted seconds of the longest pass that may run now.
        hung_after_s: Seconds without progress before which no engine is hung.
    """

    def __init__(
        self,
        client: Any,
        progress: Callable[[], Hashable],
        pass_s: Callable[[], float],
        hung_after_s: float = HUNG_AFTER_S,
    ) -> None:
        self._has_killed = False
        self._client = client
        self._progress = progress
        self._pass_s = pass_s
        self._hung_after_s = hung_after_s
        self._account = StallAccount()
        self._task: asyncio.Task[None] | None = None

    @property
    def engine_end(self) -> EngineEnd:
        """How the engine ended, if it has."""
        return EngineEnd.HUNG if self._has_killed else EngineEnd.FAILED

    def start(self) -> None:
        """Watch from now on; needs a running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while not self._client.errored:
            try:
                await self._look()
            except Exception as error:  # noqa: BLE001 - the edge of a task; a watchdog that fails bites nobody
                logs.event("engine_watch_failed", level=logging.ERROR, error=repr(error)[:300])
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        has_work = self._client.output_processor.has_unfinished_requests()
        stalled_s = self._account.look(self._progress(), has_work=has_work, now_s=time.monotonic())
        limit_s = stall_limit_s(self._pass_s(), self._hung_after_s)
        if stalled_s <= limit_s:
            return
        if await self._answers():  # it has nothing to do, whatever its client believes
            self._account = StallAccount()
            logs.event("engine_knows_of_no_work", level=logging.WARNING, stalled_s=stalled_s)
            return
        logs.event("engine_hung", level=logging.ERROR, stalled_s=stalled_s, limit_s=limit_s)
        self._has_killed = True
        kill_engine(self._client)
        await asyncio.sleep(_END_S)
        if not self._client.errored:
            logs.event("engine_does_not_end", level=logging.ERROR)
            give_up_engine(self._client)

    async def _answers(self) -> bool:
        """Whether EngineCore answers between two steps, the only time when it listens."""
        try:
            await answer_within(self._client.is_sleeping(), _ANSWER_S)
        except TimeoutError:
            return False
        return True
