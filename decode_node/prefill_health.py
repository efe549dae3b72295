"""Noticing that a prefill replica has failed while requests wait for it.

A replica whose process ends breaks the calls to it. One that hangs, or whose host is gone, breaks nothing,
and what Serve has not assigned when the last replica dies it keeps until there is another, which may take a
minute. Owns when a wait ends without an answer; whom to ask, and how, is the caller's.
"""

from __future__ import annotations

import asyncio
import contextvars
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from slo.replacement import FailureCause

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from slo.request import ReplicaId

PERIOD_S: Final = 0.5
SILENT_AFTER_S: Final = 2.0
PULLED_S: Final = 1.0
"""How soon a first token follows that needs nothing from the prefill side any more."""

_CANCEL_S: Final = 1.0


class PrefillFailedError(Exception):
    """A prefill, or its KV cache, will not come.

    Attributes:
        cause: Why.
        replica: Who had it; None when nobody knows.
    """

    def __init__(self, cause: FailureCause, replica: ReplicaId | None = None, detail: str = "") -> None:
        super().__init__(f"{cause.value} ({detail})" if detail else cause.value)
        self.cause = cause
        self.replica = replica


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

    async def result(self, answer: Awaitable[Any], replica: ReplicaId | None, grace_s: float = 0.0) -> Any:
        """What `answer` gives.

        Args:
            answer: Waited for no longer than the replica is there.
            replica: Who is needed for it; None for anybody.
            grace_s: For so long it is waited for even then.

        Raises:
            PrefillFailedError: when it is not waited for any longer.
        """
        task = asyncio.ensure_future(answer)
        watched = self._join(replica)
        try:
            await asyncio.wait([task, watched.task], return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and grace_s > 0:
                await asyncio.wait([task], timeout=grace_s)
            if not task.done():
                raise PrefillFailedError(watched.task.result(), replica)
            return task.result()
        finally:
            self._leave(replica, watched)
            if task.cancel():  # what it runs has ended when this returns
                await asyncio.wait([task], timeout=_CANCEL_S)

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
        while True:
            await asyncio.sleep(self._period_s)
            try:
                cause = await asyncio.wait_for(self._ask(replica), self._silent_after_s)
            except TimeoutError:
                return FailureCause.SILENT
            if cause is not None:
                return cause
