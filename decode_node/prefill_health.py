"""Noticing that a prefill replica has failed while requests wait for it.

A replica whose process ends breaks the calls to it. One that hangs, or whose host is gone, breaks nothing,
and what Serve has not assigned when the last replica dies it keeps until there is another, which may take a
minute. Owns when a wait ends without an answer; whom to ask, and how, is the caller's. How many leave a
replica that is only silent is `slo.replacement_budget`'s.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from slo.replacement import FailureCause
from slo.replacement_budget import ReplacementBudget
from slo.request import ReplicaId
from telemetry import logs
from telemetry.reporting.answering import answer_within, is_cancelled

PERIOD_S: Final = 0.5
SILENT_AFTER_S: Final = 2.0
PULLED_S: Final = 0.5
"""How soon a first token follows that needs nothing from the prefill side any more."""

_CANCEL_S: Final = 1.0
_SPREAD_S: Final = 0.2
"""Those who leave a silent replica do so within this time, not all at once."""


class PrefillFailedError(Exception):
    """A prefill, or its KV cache, will not come.

    Attributes:
        cause: Why.
        replica: Who had it; None when nobody knows.
        is_up: Whether it was asked after that, and serves.
    """

    def __init__(
        self,
        cause: FailureCause,
        replica: ReplicaId | None = None,
        detail: str = "",
        *,
        is_up: bool = False,
    ) -> None:
        super().__init__(f"{cause.value} ({detail})" if detail else cause.value)
        self.cause = cause
        self.replica = replica
        self.is_up = is_up

    @property
    def is_of_begun(self) -> bool:
        """Whether a replica may have begun the prefill, and not refused it or been none at all."""
        is_nobodys = self.cause is FailureCause.NO_REPLICA and self.replica is None
        return not is_nobodys and self.cause is not FailureCause.OTHER_MODEL


@dataclass(slots=True)
class _Watched:
    task: asyncio.Task[FailureCause]
    waiting: int = 0


class PrefillWatch:
    """Asks a prefill replica from time to time whether it is there, once for all who wait for it.

    Args:
        ask: What is wrong with a replica, None for nothing that is known; for no replica in particular,
            whether there is any. Not answering within `silent_after_s` is an answer.
        period_s: How often, and from when on, seconds.
        silent_after_s: How long an answer may take.
    """

    def __init__(
        self,
        ask: Callable[[ReplicaId | None], Coroutine[Any, Any, FailureCause | None]],
        period_s: float = PERIOD_S,
        silent_after_s: float = SILENT_AFTER_S,
    ) -> None:
        self._ask = ask
        self._period_s = period_s
        self._silent_after_s = silent_after_s
        self._watched: dict[ReplicaId | None, _Watched] = {}
        self._budget = ReplacementBudget()

    async def is_up(self, replica: ReplicaId | None) -> bool:
        """Whether a replica says now that it serves; one that does not answer in time does not."""
        loop = asyncio.get_running_loop()
        asked = loop.create_task(self._ask(replica), context=contextvars.Context())  # see `_join`
        try:
            return await answer_within(asked, self._silent_after_s) is None
        except Exception as error:  # noqa: BLE001 - whatever ails the call, the replica is not known to serve
            logs.event("ask_failed", level=logging.WARNING, replica=replica, error=repr(error)[:300])
            return False

    async def result(self, answer: Awaitable[Any], replica: ReplicaId | None, grace_s: float = 0.0) -> Any:
        """What `answer` gives.

        Args:
            answer: Waited for no longer than the replica is there; if that is only silent, as long as others
                are to leave it first.
            replica: Who is needed for it; None for anybody.
            grace_s: For so long it is waited for even then.

        Raises:
            PrefillFailedError: when it is not waited for any longer.
        """
        task = asyncio.ensure_future(answer)
        self._budget.waits(time.monotonic())
        try:
            while True:
                cause = await self._failure(task, replica, grace_s)
                if cause is None:
                    return task.result()
                if cause is not FailureCause.SILENT or self._budget.take(time.monotonic()):
                    raise PrefillFailedError(cause, replica)
        finally:
            if task.cancel():  # what it runs has ended when this returns
                await asyncio.wait([task], timeout=_CANCEL_S)

    async def _failure(
        self, task: asyncio.Future[Any], replica: ReplicaId | None, grace_s: float
    ) -> FailureCause | None:
        """What ends the wait for a task; None when it is done itself."""
        watched = self._join(replica)
        try:
            await asyncio.wait([task, watched.task], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return None
            cause = watched.task.result()
            if cause is FailureCause.SILENT:
                grace_s += random.uniform(0, _SPREAD_S)  # noqa: S311 - no secret
            if grace_s > 0:
                await asyncio.wait([task], timeout=grace_s)
            return None if task.done() else cause
        finally:
            self._leave(replica, watched)

    def _join(self, replica: ReplicaId | None) -> _Watched:
        watched = self._watched.get(replica)
        if watched is None or watched.task.done():
            # Not in the context of the request that happens to ask: Serve would cancel it with that one.
            task = asyncio.get_running_loop().create_task(self._watch(replica), context=contextvars.Context())
            watched = self._watched[replica] = _Watched(task)
        watched.waiting += 1
        return watched

    def _leave(self, replica: ReplicaId | None, watched: _Watched) -> None:
        watched.waiting -= 1
        if watched.waiting == 0:
            watched.task.cancel()
            if self._watched.get(replica) is watched:
                del self._watched[replica]

    async def _watch(self, replica: ReplicaId | None) -> FailureCause:
        answered_s = time.monotonic()
        while True:
            await asyncio.sleep(self._period_s * random.uniform(0.8, 1.2))  # noqa: S311 - no secret
            try:
                cause = await answer_within(self._ask(replica), self._silent_after_s)
            except TimeoutError:
                return FailureCause.SILENT
            except (Exception, asyncio.CancelledError) as error:
                if is_cancelled():
                    raise
                logs.event("ask_failed", level=logging.WARNING, replica=replica, error=repr(error)[:300])
                if time.monotonic() - answered_s >= self._silent_after_s:
                    return FailureCause.SILENT
                continue
            answered_s = time.monotonic()
            if cause is not None:
                return cause
