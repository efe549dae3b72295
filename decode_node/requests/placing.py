"""Where a prompt is prefilled again: its replica has failed, or decode has lost its KV for lack of memory.

Owns what the router is asked, and what follows from its answer or its silence. When a prefill may be placed
again is `slo.replacement`'s; carrying it out is `decode_node.orchestrator`'s.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, assert_never

from ray.exceptions import TaskCancelledError

from decode_node.rendering import LocalReason
from slo.errors import Rejected, RejectionReason
from slo.replacement import (
    FailureCause,
    Replaced,
    ReplacementDecision,
    ReplacementOutcome,
    ReplacementRequested,
    ReplacementRules,
)
from telemetry import logs
from telemetry.catalogue import REPLACEMENTS
from telemetry.reporting.answering import answer_within

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from decode_node.prefill_health import PrefillFailedError
    from decode_node.requests.underway import Underway
    from slo.request import ReplicaId, RequestContext
    from telemetry.instruments import Instruments


@dataclass(frozen=True, slots=True)
class Placing:
    """Asks the router for another place.

    Attributes:
        replica: Who decodes, and asks.
        router: Says where.
        timeout_s: Longest wait for that.
        rules: When a failed prefill is not placed again.
        instruments: Where it is counted.
        may_compute_here: Whether decode computes a prompt itself when there is no prefill replica.
    """

    replica: ReplicaId
    router: DeploymentHandle
    timeout_s: float
    rules: ReplacementRules
    instruments: Instruments
    may_compute_here: bool = False

    async def again(self, run: Underway, failure: PrefillFailedError) -> ReplacementOutcome:
        """Ask for another place, and have the run's context name it."""
        request_is_blameless = self.may_compute_here and self._is_blameless(run, failure)
        if failure.replica is not None:
            self._hold_against(run, failure.replica, failure)
        context = run.context.next_attempt()
        if run.carried is not None:  # what has begun is not ended for being late
            context = replace(context, explicit_deadline=False, explicit_e2e_s=None)
        refused = self.rules.refusal(context, run.replacements)
        if refused is None or (refused is ReplacementOutcome.LIMIT and request_is_blameless):
            outcome, run.context = await self._placed_again(
                run, failure, context, is_blameless=request_is_blameless
            )
            run.replacements += 1
        else:
            outcome, run.context = refused, context
        self._record(run.context, failure, outcome)
        return outcome

    async def _placed_again(
        self, run: Underway, failure: PrefillFailedError, context: RequestContext, *, is_blameless: bool
    ) -> tuple[ReplacementOutcome, RequestContext]:
        """What the router's answer comes to for a request, and its context with the new place."""
        lost_replica = failure.replica if failure.cause.is_replicas and not failure.is_up else None
        asked = self._request(run, context, failure.cause, lost_replica)
        started_s = time.monotonic()
        outcome, placed = _outcome_of(await self._ask_router(asked), context, failure.cause)
        if outcome is ReplacementOutcome.SERVE and is_blameless:
            outcome = ReplacementOutcome.NO_REPLICA  # Serve chooses such a one again
        if outcome is ReplacementOutcome.NO_REPLICA and self.may_compute_here:
            outcome = ReplacementOutcome.LOCAL
        if outcome is ReplacementOutcome.DEADLINE and run.carried is not None:
            outcome = ReplacementOutcome.SERVE
        is_local = outcome is ReplacementOutcome.LOCAL
        placed = replace(placed, local_prefill=LocalReason.NO_PREFILL_REPLICA.value if is_local else "")
        return outcome, placed.after(time.monotonic() - started_s)

    def _request(
        self,
        run: Underway,
        context: RequestContext,
        cause: FailureCause,
        lost_replica: ReplicaId | None = None,
    ) -> ReplacementRequested:
        """What the router is asked."""
        return ReplacementRequested(
            job_id=context.job_id,
            tier=context.tier,
            ttft_budget_s=context.ttft_budget_s,
            explicit_deadline=context.explicit_deadline,
            tokens=run.prefill_tokens,
            decode_replica=self.replica,
            failed_replicas=run.failed_replicas,
            cause=cause,
            lost_replica=lost_replica,
            avoided_replicas=tuple(run.doubted),
            explicit_e2e_s=context.explicit_e2e_s,
        )

    def _record(
        self, context: RequestContext, failure: PrefillFailedError, outcome: ReplacementOutcome
    ) -> None:
        self.instruments.count(REPLACEMENTS, cause=failure.cause.value, outcome=outcome.value)
        logs.event(
            "prefill_failed",
            level=logging.WARNING,
            request_id=context.request_id,
            job_id=context.job_id,
            replica=failure.replica,
            cause=str(failure),
            outcome=outcome.value,
            prefill_replica=context.prefill_replica,
        )

    @staticmethod
    def _is_blameless(run: Underway, failure: PrefillFailedError) -> bool:
        """Whether the failure says nothing against the request.

        Its replica serves another model, or was dead already when it came again, as happens while no router
        answers.
        """
        if failure.cause is FailureCause.OTHER_MODEL:
            return True
        is_replicas = failure.cause.is_replicas and not failure.is_up
        return is_replicas and failure.replica in run.failed_replicas

    @staticmethod
    def _hold_against(run: Underway, replica: ReplicaId, failure: PrefillFailedError) -> None:
        """Have the run prefer other replicas; only one that serves may try once more what was not pulled."""
        before = run.context.failed_replicas
        if failure.is_up and replica not in before:
            run.doubted.add(replica)
        else:
            run.doubted.discard(replica)
        run.context = replace(run.context, failed_replicas=tuple(dict.fromkeys((*before, replica))))

    async def left(self, run: Underway) -> RequestContext:
        """Where KV is computed again that the engine had no memory for: here, if nowhere else."""
        context = replace(
            run.context.next_attempt(),
            local_prefill="",
            explicit_deadline=False,
            explicit_e2e_s=None,
            ttft_budget_s=run.budget_s,
        )
        asked = self._request(run, context, FailureCause.LEFT)
        outcome, placed = _outcome_of(await self._ask_router(asked), context, asked.cause)
        if outcome not in {ReplacementOutcome.ROUTER, ReplacementOutcome.SERVE}:
            outcome = ReplacementOutcome.LOCAL
            placed = replace(context, local_prefill=LocalReason.LEFT.value)
        self.instruments.count(REPLACEMENTS, cause=asked.cause.value, outcome=outcome.value)
        logs.event(
            "stream_left",
            request_id=context.request_id,
            job_id=context.job_id,
            tokens=asked.tokens,
            outcome=outcome.value,
            prefill_replica=placed.prefill_replica,
        )
        return placed

    async def _ask_router(self, request: ReplacementRequested) -> ReplacementDecision | None:
        """The router's answer; None when it gives none in time."""
        try:
            asked = self.router.replace.remote(request)
            decision: ReplacementDecision = await answer_within(asked, self.timeout_s)
        except TaskCancelledError:  # the client is gone
            raise
        except Exception as error:  # noqa: BLE001 - whatever ails the router, the request goes on
            logs.event("replacement_without_router", job_id=request.job_id, error=repr(error)[:300])
            return None
        return decision


def _outcome_of(
    decision: ReplacementDecision | None, context: RequestContext, cause: FailureCause
) -> tuple[ReplacementOutcome, RequestContext]:
    """What follows from the router's answer, or its silence, and the context with the new place."""
    match decision:
        case Replaced(prefill_replica=None):
            return ReplacementOutcome.LOCAL, context
        case Replaced():
            placed = replace(context, prefill_replica=decision.prefill_replica, handoff_s=decision.handoff_s)
            return ReplacementOutcome.ROUTER, placed
        case Rejected(reason=RejectionReason.DEADLINE_INFEASIBLE):
            return ReplacementOutcome.DEADLINE, context
        case Rejected(reason=RejectionReason.NO_REPLICA):
            return ReplacementOutcome.NO_REPLICA, context
        case Rejected() | None:  # it was admitted before; no other reason counts now
            if cause is FailureCause.NO_REPLICA:
                return ReplacementOutcome.NO_REPLICA, context
            return ReplacementOutcome.SERVE, context
        case _:
            assert_never(decision)
