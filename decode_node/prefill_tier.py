"""The decode replica's calls to the prefill tier.

Owns how a prefill is asked for, how it is cancelled, and which errors say that a replica has failed. What
follows from that is `decode_node.orchestrator`'s.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from grpc.aio import AioRpcError  # type: ignore[import-untyped]
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError

from decode_node.prefill_health import PrefillFailedError
from slo.replacement import FailureCause
from slo.request import CONTEXT_HEADER, ENGINE_DIED, REPLICA_PARAM, ReplicaId, RequestContext
from telemetry import logs

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from telemetry.reporting.background import Background

_REPLICA_ERRORS = (RayActorError, ReplicaUnavailableError, DeploymentUnavailableError, AioRpcError)
"""What a call ends with when the replica that has it does."""


class PrefillTier:
    """Calls the replicas of the prefill deployment that `handle` is of."""

    def __init__(self, handle: DeploymentHandle, background: Background) -> None:
        self._handle = handle
        self._background = background

    async def prefill(self, request: Any, info: Any, context: RequestContext) -> tuple[Any, ReplicaId | None]:
        """Have a prompt prefilled where the context says.

        Returns:
            The response, with the address of the KV blocks, or the error; and who gave it, as far as known.

        Raises:
            PrefillFailedError: when the replica or its engine ends first.
        """
        headers = {**info.headers, CONTEXT_HEADER: context.for_prefill().encode()}
        responses = self._handle.completions.remote(request, type(info)(headers=headers))
        placed = context.prefill_replica
        try:
            prefilled = await anext(aiter(responses))
        except asyncio.CancelledError:
            responses.cancel()
            raise
        except _REPLICA_ERRORS as error:
            raise PrefillFailedError(FailureCause.REPLICA_DIED, placed, repr(error)[:200]) from None
        refusal = getattr(prefilled, "error", None)
        if refusal is not None and refusal.type == ENGINE_DIED:
            raise PrefillFailedError(FailureCause.ENGINE_DIED, refusal.param or placed)
        params = getattr(prefilled, "kv_transfer_params", None) or {}
        return prefilled, params.pop(REPLICA_PARAM, placed)

    async def ask(self, replica: ReplicaId | None) -> FailureCause | None:
        """What is known to be wrong with a prefill replica; see `PrefillWatch`.

        A replica that Serve no longer sends to may be draining: then another answers, and nothing is known.
        """
        if replica is None:
            return None if await self.broadcast("is_up") else FailureCause.NO_REPLICA
        try:
            who = await self._handle.options(stream=False).is_up.remote(pin=replica)
        except _REPLICA_ERRORS:
            return FailureCause.REPLICA_DIED
        return FailureCause.ENGINE_DIED if who is None else None

    async def broadcast(self, method: str, *args: Any) -> list[Any]:
        """What `method` returns on the running prefill replicas, without those where it fails."""
        try:
            results = await self._handle.broadcast(method, *args).results_async(return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        return [result for result in results if result is not None and not isinstance(result, Exception)]

    def release(self, context: RequestContext) -> None:
        """Have the prefill side drop the job; if that fails, the lease frees its blocks."""
        logs.event("prefill_released", request_id=context.request_id, job_id=context.job_id)
        self._background.run("release", self._send_release(context), job_id=context.job_id)

    async def _send_release(self, context: RequestContext) -> None:
        """Tell the prefill replica that has the job, or all of them when Serve chose it."""
        if context.prefill_replica is None:
            await self.broadcast("release", context.job_id)
        else:
            release = self._handle.options(stream=False).release
            await release.remote(context.job_id, pin=context.prefill_replica)
