"""A request's answer from the decode tier: from one replica, and from the next when that one fails.

The ingress has the client's connection and sees every piece, so it outlives what generates them. Owns when an
answer goes on elsewhere, and what the client gets when it cannot. Noticing that a replica has failed is
`stream_watch`'s; where the next one goes on is `delivered`'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ray.exceptions import TaskCancelledError

from decode_node.answers import REQUEST_FAILED, Piece, error_in
from decode_node.tier_calls import REPLICA_ERRORS, cancel_call, is_accepted
from deployments.http import errors as http_errors
from deployments.http.continuing.delivered import Delivered
from deployments.http.continuing.stream_watch import DecodeFailedError, StreamWatch
from deployments.http.errors import HTTPError
from deployments.http.placing.asked import Asked, at_place
from slo.errors import Rejected
from slo.model_digest import OTHER_MODEL
from slo.replacement import ContinuationOutcome, FailureCause
from slo.request import ATTEMPTS_PER_PLACE, ENGINE_DIED, ReplicaId, RequestContext
from telemetry import logs
from telemetry.catalogue import CONTINUATIONS
from telemetry.instruments import Instruments

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentResponseGenerator

    from deployments.http.placing.placement_client import PlacementClient
    from router.messages import Placed, PlacementRequested


_CAUSES: Final = {
    ENGINE_DIED: FailureCause.ENGINE_DIED,
    OTHER_MODEL: FailureCause.OTHER_MODEL,
    REQUEST_FAILED: FailureCause.REQUEST_FAILED,
}
"""Errors of a decode replica that another one may not have, by their type."""
_GOES_ON: Final = frozenset({ContinuationOutcome.CONTINUED, ContinuationOutcome.RESTARTED})


@dataclass(frozen=True, slots=True)
class DecodeTier:
    """Gets answers.

    Attributes:
        placement: Says where a request goes on.
        watch: Notices that a replica has failed.
        max_replacements: How often one request is placed again.
        instruments: Where it is counted.
    """

    placement: PlacementClient
    watch: StreamWatch
    max_replacements: int
    instruments: Instruments

    async def answer(
        self,
        asked: Asked,
        context: RequestContext,
        send: Callable[[Any, RequestContext], DeploymentResponseGenerator[Any]],
        delivered: Delivered,
    ) -> AsyncGenerator[Any, None]:
        """The answer: events of a stream, or one object, which may be an error of its replicas.

        Args:
            asked: The request.
            context: Where it was placed.
            send: Calls the decode tier with a request and its context.
            delivered: Takes what comes of it, nothing yet.

        Raises:
            HTTPError: when no replica can go on.
        """
        replacements = 0
        while True:
            responses = send(delivered.rest_of(asked.body), context)
            is_over, served_by = False, None
            try:
                watched = self.watch.pieces(
                    responses,
                    context.decode_replica,
                    is_accepted=partial(is_accepted, responses),
                    may_leave=partial(self._may_leave, delivered, replacements),
                )
                async with aclosing(watched) as pieces:
                    async for piece in pieces:
                        text = delivered.take(piece) if isinstance(piece, Piece) else _sound(piece)
                        is_over = delivered.is_over or not isinstance(piece, Piece)  # all, or an error
                        served_by = served_by or (piece.replica if isinstance(piece, Piece) else None)
                        if text is not None:
                            yield text
                is_over = True
            except TaskCancelledError:  # the client is gone
                raise
            except DecodeFailedError as error:
                failure = error
            except REPLICA_ERRORS as error:
                failure = _caused_by(error, FailureCause.REPLICA_DIED, served_by)
            except Exception as error:  # noqa: BLE001 - over gRPC a replica's own error is raised as it is
                failure = _caused_by(error, FailureCause.REQUEST_FAILED, served_by)
            finally:
                if not is_over:
                    cancel_call(responses)
            if is_over:
                return
            context = await self._elsewhere(asked, context, delivered, replacements, failure)
            replacements += 1

    async def _elsewhere(
        self,
        asked: Asked,
        context: RequestContext,
        delivered: Delivered,
        replacements: int,
        failure: DecodeFailedError,
    ) -> RequestContext:
        """Where the request goes on.

        Raises:
            HTTPError: when it does not.
        """
        lost = failure.replica or context.decode_replica  # Serve may have chosen another
        failed = context.failed_replicas if lost is None else (*context.failed_replicas, lost)
        # A first token that has been sent was in time or late; the one after it has the tier's time again.
        elapsed_s = 0.0 if delivered.has_begun else time.monotonic() - asked.arrived_s
        again = replace(
            asked.placement,
            elapsed_s=elapsed_s,
            failed_replicas=failed,
            lost_replica=lost if failure.cause.is_replicas else None,
            is_admitted=True,
            however_late=True,
            answered_tokens=delivered.tokens,
            digest=delivered.digest,
        )
        decision, outcome = await self._place(again, delivered, replacements)
        self.instruments.count(CONTINUATIONS, cause=failure.cause.value, outcome=outcome)
        logs.event(
            "decode_failed",
            level=logging.WARNING,
            request_id=context.request_id,
            job_id=context.job_id,
            replica=lost,
            cause=str(failure),
            error=None if failure.__cause__ is None else repr(failure.__cause__)[:2000],
            outcome=outcome,
            decode_replica=None if decision is None else decision.decode_replica,
        )
        if outcome not in _GOES_ON:
            is_begun = delivered.has_come or context.attempt > 0
            raise _refused(outcome, failure, context, is_begun=is_begun)
        again_at = replace(
            context,
            ttft_budget_s=again.objective.known_ttft_budget_s,
            explicit_deadline=False,
            explicit_e2e_s=None,
            failed_replicas=failed,
            prompt_bytes=0,  # with the answer so far, the length of a text is another
            attempt=ATTEMPTS_PER_PLACE * (replacements + 1),
            digest=delivered.digest,
        )
        return at_place(again_at, decision).after(elapsed_s)

    def _may_leave(self, delivered: Delivered, replacements: int) -> bool:
        return self._refusal(delivered, replacements) is None

    def _refusal(self, delivered: Delivered, replacements: int) -> str | None:
        """What keeps an answer where it is; None for one that may go on elsewhere."""
        if delivered.has_begun and delivered.bound is not None:
            return delivered.bound
        return ContinuationOutcome.LIMIT if replacements >= self.max_replacements else None

    async def _place(
        self, again: PlacementRequested, delivered: Delivered, replacements: int
    ) -> tuple[Placed | None, str]:
        """Where it goes on, None for a replica of Serve's choice, and how; or what keeps it from that."""
        refusal = self._refusal(delivered, replacements)
        if refusal is not None:
            if again.lost_replica is not None:
                self.placement.lost(again.lost_replica)
            return None, refusal
        decision = await self.placement.place(again)
        if isinstance(decision, Rejected):
            return None, ContinuationOutcome.NO_REPLICA
        has_begun = delivered.has_begun
        return decision, ContinuationOutcome.CONTINUED if has_begun else ContinuationOutcome.RESTARTED


def _sound(answer: Any) -> Any:
    """An answer that is one object.

    Raises:
        DecodeFailedError: when it says that its replica has failed.
    """
    error = error_in(answer)
    if error is not None and (cause := _CAUSES.get(error.type)) is not None:
        raise DecodeFailedError(cause, error.message, None if error.param is None else ReplicaId(error.param))
    return answer


def _caused_by(error: Exception, cause: FailureCause, replica: ReplicaId | None) -> DecodeFailedError:
    failure = DecodeFailedError(cause, replica=replica)
    failure.__cause__ = error
    return failure


def _refused(
    refusal: str, failure: DecodeFailedError, context: RequestContext, *, is_begun: bool
) -> HTTPError:
    """What the client gets: the engine's own error if it lives on."""
    if failure.cause is FailureCause.NO_REPLICA and not is_begun:
        return http_errors.not_begun()
    if failure.cause is not FailureCause.REQUEST_FAILED:
        return http_errors.decode_failed(refusal)
    if failure.detail:
        return http_errors.request_failed(failure.detail)
    return http_errors.internal_error(context.request_id)
