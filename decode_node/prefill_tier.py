"""The decode replica's calls to the prefill tier.

Owns how a prefill is asked for and how it is cancelled. What follows from its failure is
`decode_node.orchestrator`'s.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from ray.exceptions import TaskCancelledError
from ray.serve.llm.openai_api_models import ErrorResponse

from decode_node.answers import SERVER_ERRORS
from decode_node.prefill_health import PrefillFailedError
from decode_node.tier_calls import REPLICA_ERRORS, TierCalls, cancel_call
from sampling.carried import Prefilled, PrefillRequest
from slo.model_digest import OTHER_MODEL
from slo.replacement import FailureCause
from slo.request import CONTEXT_HEADER, ENGINE_DIED, RequestContext
from telemetry import logs
from telemetry.reporting.background import Background
from telemetry.tracing import carrying

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle


_CAUSES: Final = {ENGINE_DIED: FailureCause.ENGINE_DIED, OTHER_MODEL: FailureCause.OTHER_MODEL}
"""Errors of a prefill replica that another one may not have, by their type."""


class PrefillTier(TierCalls):
    """Calls the replicas of the prefill deployment that `handle` is of."""

    def __init__(self, handle: DeploymentHandle, background: Background) -> None:
        super().__init__(handle)
        self._background = background

    async def prefill(
        self, request: PrefillRequest, info: Any, context: RequestContext
    ) -> Prefilled | ErrorResponse:
        """Have a prompt prefilled where the context says.

        Returns:
            Where the KV blocks are, or what is wrong with the request.

        Raises:
            PrefillFailedError: when the replica or its engine ends first, fails with an error of its own, or
                serves another model.
        """
        headers = carrying(info.headers, context.traceparent)
        headers[CONTEXT_HEADER] = context.for_prefill().encode()
        responses = self._handle.prefill.remote(request, type(info)(headers=headers))
        placed = context.prefill_replica
        try:
            prefilled = await anext(aiter(responses))
        except asyncio.CancelledError:
            cancel_call(responses)
            raise
        except REPLICA_ERRORS as error:
            raise PrefillFailedError(FailureCause.REPLICA_DIED, placed, repr(error)[:200]) from None
        except TaskCancelledError:  # the client is gone
            raise
        except Exception as error:  # over gRPC a replica's own error is raised as it is
            raise PrefillFailedError(FailureCause.REQUEST_FAILED, placed, repr(error)[:200]) from error
        if isinstance(prefilled, ErrorResponse):
            refusal = prefilled.error
            if (cause := _CAUSES.get(refusal.type)) is not None:
                raise PrefillFailedError(cause, refusal.param or placed)
            if refusal.code >= SERVER_ERRORS:
                raise PrefillFailedError(FailureCause.REQUEST_FAILED, placed, refusal.message)
        return prefilled

    def release(self, context: RequestContext) -> None:
        """Have the prefill side drop the job; if that fails, the lease frees its blocks."""
        logs.event("prefill_released", request_id=context.request_id, job_id=context.job_id)
        self._background.run("release", self._send_release(context), job_id=context.job_id)

    async def _send_release(self, context: RequestContext) -> None:
        """Tell the prefill replica that has the job, or all of them when Serve chose it."""
        if context.prefill_replica is None:
            await self.broadcast("release", context.attempt_id)
        else:
            release = self._handle.options(stream=False).release
            await release.remote(context.attempt_id, pin=context.prefill_replica)
