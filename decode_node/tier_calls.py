"""Calls to the replicas of a tier: whether they are there, one call to all of them, and the end of one.

Owns which errors say that a replica has failed.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from typing import TYPE_CHECKING, Any, Final

from grpc.aio import AioRpcError
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError

from slo.replacement import FailureCause
from slo.request import ReplicaId

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator


_UP_S: Final = 0.5
"""When a replica has not answered by then, it is looked whether there are any."""
_KNOWN_S: Final = 1.0
"""Whether there are any is asked again after so long: it takes a call of each replica."""
REPLICA_ERRORS: Final = (RayActorError, ReplicaUnavailableError, DeploymentUnavailableError, AioRpcError)
"""What a call ends with when the replica that has it does."""


class TierCalls:
    """Calls the replicas of the deployment that `handle` is of; they have the method `is_up`."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._known: asyncio.Task[int] | None = None
        self._known_at_s = -math.inf

    async def ask(self, replica: ReplicaId | None) -> FailureCause | None:
        """What is known to be wrong with a replica; for no replica in particular, whether there is any.

        A replica that Serve no longer sends to may be draining: then another answers, and nothing is known.
        Without another Serve would keep the question for the next one that there is, and the silence would be
        taken for the replica's: then it is `NO_REPLICA`, though the one that drains goes on with what it has.
        Replicas that do not answer are waited for: in a crowd they are late, and not gone.
        """
        if replica is None:
            return None if await self._any_is_up() else FailureCause.NO_REPLICA
        asked = asyncio.ensure_future(self._asked(replica))
        try:
            await asyncio.wait([asked], timeout=_UP_S)
            if not asked.done() and not await self.known():
                return FailureCause.NO_REPLICA
            return await asked
        finally:
            asked.cancel()

    async def _asked(self, replica: ReplicaId) -> FailureCause | None:
        try:
            who = await self._handle.options(stream=False).is_up.remote(pin=replica)
        except REPLICA_ERRORS:
            return FailureCause.REPLICA_DIED
        return FailureCause.ENGINE_DIED if who is None else None

    async def known(self) -> int:
        """How many replicas Serve knows of; one answer for all who ask within `_KNOWN_S`."""
        now_s = time.monotonic()
        if self._known is None or (self._known.done() and now_s - self._known_at_s >= _KNOWN_S):
            # Not in the context of whoever happens to be first: Serve would cancel it with that one.
            self._known = asyncio.get_running_loop().create_task(self._count(), context=contextvars.Context())
            self._known_at_s = now_s
        return await asyncio.shield(self._known)

    async def _count(self) -> int:
        return len(await self.sent("is_up"))

    async def _any_is_up(self) -> bool:
        calls = {asyncio.ensure_future(each.get_async()) for each in await self.sent("is_up")}
        try:
            while calls:
                done, calls = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                if _answers(done):
                    return True
        finally:
            for call in calls:
                call.cancel()
        return False

    async def broadcast(self, method: str, *args: Any, within_s: float | None = None) -> list[Any]:
        """What `method` returns on the running replicas, without those where it fails.

        Args:
            method: Of the deployment.
            args: Its arguments.
            within_s: Longest wait; without the replicas that have not answered by then.
        """
        calls = [asyncio.ensure_future(each.get_async()) for each in await self.sent(method, *args)]
        done, late = await asyncio.wait(calls, timeout=within_s) if calls else (set(), set())
        for call in late:
            call.cancel()
        return _answers(done)

    async def sent(self, method: str, *args: Any) -> list[Any]:
        """The calls of a method of all replicas that Serve knows of."""
        response = self._handle.broadcast(method, *args)
        try:
            # `results_async` has either all results or none: one replica that hangs would keep all others'.
            return list(await response._fetch_replica_results_async())  # noqa: SLF001 - see above
        except DeploymentUnavailableError:
            return []


def is_accepted(responses: DeploymentResponseGenerator[Any]) -> bool:
    """Whether a call waits for no replica any more: one has accepted it, or it has ended before that."""
    return bool(responses._replica_result_future.done())  # noqa: SLF001 - Serve says it in no other way


def cancel_call(responses: DeploymentResponseGenerator[Any]) -> None:
    """Cancel a call, whether or not a replica has accepted it; one that has failed before that is over.

    Serve's `cancel` knows of that only once the caller has heard of it, which one that is cancelled in the
    very step of the loop in which its call is accepted never does. Where Serve's router has a loop of its
    own, it raises what the call has failed with.
    """
    accepted = responses._replica_result_future  # noqa: SLF001 - see above
    if not accepted.cancel() and not accepted.cancelled() and accepted.exception() is None:
        accepted.result().cancel()


def _answers(calls: Iterable[asyncio.Future[Any]]) -> list[Any]:
    """What calls that are done have returned; nothing of those that have failed or were cancelled."""
    answers = [call.result() for call in calls if not call.cancelled() and call.exception() is None]
    return [answer for answer in answers if answer is not None]
