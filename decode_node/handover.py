"""One request's way through prefill elsewhere and decode here, and again when the prefill is lost.

Owns the order of the steps and the retries: until the first token has been sent, a request whose prefill
replica is lost is placed on another one, within `slo.replacement`'s rules. The steps themselves are the
server's.
"""

from __future__ import annotations

import logging
import time
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, assert_never

from decode_node.answers import error_in, is_answer, is_preamble
from decode_node.prefill_health import PULLED_S, PrefillLostError, PrefillWatch
from slo.errors import Rejected, RejectionReason
from slo.replacement import (
    FailureCause,
    Replaced,
    ReplacementOutcome,
    ReplacementRequested,
    ReplacementRules,
)
from telemetry import logs
from telemetry.catalogue import REPLACEMENTS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

    from slo.replacement import ReplacementDecision
    from slo.request import ReplicaId, RequestContext
    from telemetry.instruments import Instruments

_GIVEN_UP: Final = {
    ReplacementOutcome.LIMIT: "one replica after the other was lost while it computed the prompt; try again",
    ReplacementOutcome.DEADLINE: (
        "the replica that computed the prompt was lost, and no other can give the first token in time; retry "
        "later, or ask for a longer x-slo-ttft-ms"
    ),
    ReplacementOutcome.NO_REPLICA: "no prefill replica is running; try again when one has been started",
}


class GivenUpError(Exception):
    """A request whose prefill was lost is not placed again; `outcome` says why."""

    def __init__(self, outcome: ReplacementOutcome) -> None:
        super().__init__(_GIVEN_UP[outcome])
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Steps:
    """What a request goes through.

    Attributes:
        prefill: The prefill's answer, or its error, and who gave it. Raises `PrefillLostError` for none.
        decode: The pieces of the answer, from what prefill answered.
        is_dead: Whether the engine that decodes has died.
        replace: The router's word on another place; None when it gives none.
        release: Has the prefill side drop the request.
    """

    prefill: Callable[[RequestContext], Coroutine[Any, Any, tuple[Any, ReplicaId | None]]]
    decode: Callable[[Any], AsyncGenerator[Any, None]]
    is_dead: Callable[[], bool]
    replace: Callable[[ReplacementRequested], Coroutine[Any, Any, ReplacementDecision | None]]
    release: Callable[[RequestContext], None]


class Handover:
    """Takes requests from prefill to decode.

    Args:
        decode_replica: Who decodes.
        rules: When a lost prefill is not placed again.
        watch: Notices that a prefill replica is lost.
        instruments: Where replacements are counted.
    """

    def __init__(
        self,
        decode_replica: ReplicaId,
        rules: ReplacementRules,
        watch: PrefillWatch,
        instruments: Instruments,
    ) -> None:
        self._decode_replica = decode_replica
        self._rules = rules
        self._watch = watch
        self._instruments = instruments

    async def run(self, steps: Steps, context: RequestContext, tokens: int) -> AsyncGenerator[Any, None]:
        """The pieces of the answer.

        Args:
            steps: What the request goes through.
            context: Of the request, as of now.
            tokens: Length of its prompt.

        Raises:
            GivenUpError: when its prefill was lost; nothing has been yielded then.
        """
        replacements = 0
        while True:
            started_s = time.monotonic()
            try:
                async with aclosing(self._once(steps, context)) as pieces:
                    async for piece in pieces:
                        yield piece
            except PrefillLostError as loss:
                context = context.after(time.monotonic() - started_s)
                outcome, context = await self._place_again(steps, context, tokens, loss, replacements)
                if outcome in _GIVEN_UP:
                    raise GivenUpError(outcome) from loss
                replacements += 1
            else:
                return

    async def _once(self, steps: Steps, context: RequestContext) -> AsyncGenerator[Any, None]:
        """One try. Raises `PrefillLostError` only before it yields anything."""
        is_decoding = False
        try:
            prefilled, replica = await self._watch.result(steps.prefill(context), context.prefill_replica)
            if not is_answer(prefilled):
                yield prefilled
                return
            context = replace(context, prefill_replica=replica)
            async with aclosing(steps.decode(prefilled)) as pieces:
                opening = _opening(steps, pieces, replica)
                for piece in await self._watch.result(opening, replica, PULLED_S):
                    is_decoding = is_decoding or is_answer(piece)
                    yield piece
                async for piece in pieces:
                    is_decoding = is_decoding or is_answer(piece)
                    yield piece
        finally:
            if not is_decoding:
                steps.release(context)

    async def _place_again(
        self,
        steps: Steps,
        context: RequestContext,
        tokens: int,
        loss: PrefillLostError,
        replacements: int,
    ) -> tuple[ReplacementOutcome, RequestContext]:
        lost = context.failed_replicas if loss.replica is None else (*context.failed_replicas, loss.replica)
        context = replace(
            context, failed_replicas=lost, prefill_replica=None, prompt_bytes=0, cached_tokens=0
        )
        outcome = self._rules.refusal(context, replacements)
        if outcome is None:
            asked = ReplacementRequested(
                job_id=context.job_id,
                tier=context.tier,
                ttft_budget_s=context.ttft_budget_s,
                explicit_deadline=context.explicit_deadline,
                tokens=tokens,
                decode_replica=self._decode_replica,
                failed_replicas=lost,
                cause=loss.cause,
            )
            started_s = time.monotonic()
            outcome, context = _by(await steps.replace(asked), context, loss.cause)
            context = context.after(time.monotonic() - started_s)
        self._instruments.count(REPLACEMENTS, cause=loss.cause.value, outcome=outcome.value)
        logs.event(
            "prefill_failed",
            level=logging.WARNING,
            request_id=context.request_id,
            job_id=context.job_id,
            replica=loss.replica,
            cause=str(loss),
            outcome=outcome.value,
            prefill_replica=context.prefill_replica,
        )
        return outcome, context


def _by(
    decision: ReplacementDecision | None, context: RequestContext, cause: FailureCause
) -> tuple[ReplacementOutcome, RequestContext]:
    match decision:
        case Replaced():
            placed = replace(context, prefill_replica=decision.prefill_replica, handoff_s=decision.handoff_s)
            return ReplacementOutcome.ROUTER, placed
        case Rejected(reason=RejectionReason.DEADLINE_INFEASIBLE):
            return ReplacementOutcome.DEADLINE, context
        case Rejected(reason=RejectionReason.NO_REPLICA):
            return ReplacementOutcome.NO_REPLICA, context
        case Rejected() | None:  # it was let in before; whatever else the router has against it now
            if cause is FailureCause.NO_REPLICA:
                return ReplacementOutcome.NO_REPLICA, context
            return ReplacementOutcome.SERVE, context
        case _:
            assert_never(decision)


async def _opening(steps: Steps, pieces: AsyncGenerator[Any, None], replica: ReplicaId | None) -> list[Any]:
    """The pieces up to the first that carries a token, or all.

    Raises:
        PrefillLostError: when the engine gives the request up instead and goes on serving. vLLM does that
            to a request whose KV cache did not arrive (`kv_load_failure_policy: fail`).
    """
    opening: list[Any] = []
    async for piece in pieces:
        error = error_in(piece)
        if error is not None and error.is_servers and not steps.is_dead():
            raise PrefillLostError(FailureCause.PULL_FAILED, replica, error.message)
        opening.append(piece)
        if not is_preamble(piece):
            break
    return opening
