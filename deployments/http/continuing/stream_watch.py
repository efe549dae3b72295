"""Noticing that a decode replica has failed while answers come from it.

A replica whose process ends breaks the calls to it; one that hangs breaks nothing. Owns when a wait for the
next piece ends without one. How many may leave a replica that has fallen silent is
`slo.replacement_budget`'s, of those that can go on elsewhere; one that stays silent as long again is left by
all.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from decode_node.answers import Piece
from slo.replacement import FailureCause
from slo.replacement_budget import ReplacementBudget
from slo.request import ReplicaId
from telemetry import logs

PERIOD_S: Final = 0.5
SILENT_AFTER_S: Final = 4.0
"""Longer than for a prefill replica: leaving costs a prefill, and an overloaded machine is no reason to."""

_WAITED_S: Final = 0.002
"""What takes longer to come has just come from the replica; what a slow reader has left here takes less."""


class DecodeFailedError(Exception):
    """No more pieces will come.

    Attributes:
        cause: Why.
        detail: What whoever failed said of it.
        replica: Who failed; None where nobody but the placement says it.
    """

    def __init__(self, cause: FailureCause, detail: str = "", replica: ReplicaId | None = None) -> None:
        super().__init__(f"{cause.value} ({detail})" if detail else cause.value)
        self.cause = cause
        self.detail = detail
        self.replica = replica


@dataclass(slots=True, eq=False)
class _Waiting:
    """Somebody who reads an answer.

    Attributes:
        is_accepted: Whether a replica has the request.
        may_leave: Whether it can go on on another replica.
        wait: What can end the wait for the next one; None between two waits.
        cause: Why the answer is given up; None while it is not.
    """

    is_accepted: Callable[[], bool]
    may_leave: Callable[[], bool]
    wait: asyncio.Timeout | None = None
    cause: FailureCause | None = None

    def give_up(self, cause: FailureCause) -> None:
        if self.cause is not None:
            return
        self.cause = cause
        if self.wait is not None:
            self.wait.reschedule(0.0)


async def _several() -> int:
    return 2


class StreamWatch:
    """Asks each replica that answers come from, from time to time, whether it is there.

    Args:
        ask: What is wrong with a replica, None for nothing that is known; for no replica in particular,
            whether there is any. Without any, who is pinned to one waits on where a replica has the request,
            and otherwise for `silent_after_s`: this process may not have heard of the replica yet.
        period_s: How often, and from when on, seconds.
        silent_after_s: How long an answer may take; a piece from the replica is as good.
        known: How many replicas Serve knows of. Nobody leaves the only one on suspicion.
    """

    def __init__(
        self,
        ask: Callable[[ReplicaId | None], Coroutine[Any, Any, FailureCause | None]],
        period_s: float = PERIOD_S,
        silent_after_s: float = SILENT_AFTER_S,
        known: Callable[[], Coroutine[Any, Any, int]] = _several,
    ) -> None:
        self._ask = ask
        self._known = known
        self._period_s = period_s
        self._silent_after_s = silent_after_s
        self._waiting: dict[ReplicaId | None, set[_Waiting]] = {}
        self._tasks: dict[ReplicaId | None, asyncio.Task[None]] = {}
        self._heard_s: dict[ReplicaId | None, float] = {}  # also from whoever has left since
        self._budget = ReplacementBudget()

    async def pieces(
        self,
        answer: AsyncIterator[Any],
        replica: ReplicaId | None,
        *,
        is_accepted: Callable[[], bool] = lambda: True,
        may_leave: Callable[[], bool] = lambda: True,
    ) -> AsyncGenerator[Any, None]:
        """The pieces of an answer.

        Args:
            answer: Gives them as they come.
            replica: Where they come from; None for one that nobody has named. Serve may have chosen another
                one. A piece that names it has that one asked from then on.
            is_accepted: Whether a replica has the request.
            may_leave: Whether it can go on on another replica. What cannot does not end on suspicion.

        Raises:
            DecodeFailedError: when it is not waited for any longer.
        """
        self._budget.waits(time.monotonic())
        one = _Waiting(is_accepted, may_leave)
        self._join(replica, one)
        try:
            while one.cause is None:
                asked_s = time.monotonic()
                try:
                    async with asyncio.timeout(None) as one.wait:
                        piece = await anext(answer)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    if one.cause is None:  # not ours
                        raise
                    break
                finally:
                    one.wait = None
                if isinstance(piece, Piece) and piece.replica not in {None, replica}:
                    self._leave(replica, one)
                    replica = piece.replica
                    self._join(replica, one)
                self._hear(replica, asked_s)
                yield piece
            raise DecodeFailedError(one.cause, replica=replica)
        finally:
            self._leave(replica, one)

    def _hear(self, replica: ReplicaId | None, asked_s: float) -> None:
        """Note a piece that has been waited for since `asked_s`, unless it lay here already."""
        now_s = time.monotonic()
        if now_s - asked_s > _WAITED_S:
            self._heard_s[replica] = now_s

    def _join(self, replica: ReplicaId | None, one: _Waiting) -> None:
        self._waiting.setdefault(replica, set()).add(one)
        if replica not in self._tasks:
            # Not in the context of the request that happens to be first: Serve would cancel it with that one.
            watch, context = self._watch(replica), contextvars.Context()
            self._heard_s[replica] = -math.inf
            self._tasks[replica] = asyncio.get_running_loop().create_task(watch, context=context)

    def _leave(self, replica: ReplicaId | None, one: _Waiting) -> None:
        self._waiting[replica].discard(one)
        if not self._waiting[replica]:
            del self._waiting[replica], self._heard_s[replica]
            self._tasks.pop(replica).cancel()

    async def _watch(self, replica: ReplicaId | None) -> None:
        before: FailureCause | None = None
        since_s = 0.0
        while True:
            await asyncio.sleep(self._period_s * random.uniform(0.8, 1.2))  # noqa: S311 - no secret
            asked_s = time.monotonic()
            answer = asyncio.ensure_future(self._ask(replica))
            try:
                cause = await self._answered(answer, replica)
            finally:
                answer.cancel()
            is_first = cause is not before
            if is_first:
                before, since_s = cause, asked_s
            if is_first and cause is FailureCause.SILENT:
                if await self._others():
                    self._suspect(replica)
            elif cause is not None:
                self._fail(replica, cause, since_s)

    async def _others(self) -> bool:
        """Whether there is more than one replica; taken for granted where Serve does not say so in time."""
        known = asyncio.ensure_future(self._known())
        try:
            await asyncio.wait([known], timeout=self._period_s)
            if not known.done() or known.cancelled() or known.exception() is not None:
                return True
            return known.result() > 1
        finally:
            known.cancel()

    def _suspect(self, replica: ReplicaId | None) -> None:
        """Give up as many of the answers that can go on elsewhere as the budget allows."""
        for one in list(self._waiting[replica]):
            if not one.may_leave():
                continue
            if not self._budget.take(time.monotonic()):
                return
            one.give_up(FailureCause.SILENT)

    def _fail(self, replica: ReplicaId | None, cause: FailureCause, since_s: float) -> None:
        """Give up the answers that end by what has been wrong with a replica since `since_s`."""
        may_drain = cause is FailureCause.NO_REPLICA and replica is not None
        is_recent = time.monotonic() - since_s < self._silent_after_s
        for one in list(self._waiting[replica]):
            if may_drain and (is_recent or one.is_accepted()):
                continue
            one.give_up(cause)

    async def _answered(
        self, answer: asyncio.Future[FailureCause | None], replica: ReplicaId | None
    ) -> FailureCause | None:
        """What a replica answers that is asked now, or that it has been silent for too long.

        While this process does not run, or its loop is held, nobody can be heard: that is no silence.
        """
        heard_s = time.monotonic()
        while (left_s := heard_s + self._silent_after_s - (began_s := time.monotonic())) > 0:
            wait_s = min(left_s, self._period_s)
            if not (await asyncio.wait([answer], timeout=wait_s))[0]:
                paused_s = time.monotonic() - began_s - wait_s
                heard_s = max(heard_s + paused_s, self._heard_s[replica])
            elif not answer.cancelled() and answer.exception() is None:
                return answer.result()
            else:
                # Serve raises a cancelled call's end as if whoever waits for it had been cancelled.
                error = "cancelled" if answer.cancelled() else repr(answer.exception())[:300]
                logs.event("ask_failed", level=logging.WARNING, replica=replica, error=error)
                return None
        return FailureCause.SILENT
