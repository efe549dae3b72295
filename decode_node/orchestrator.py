"""One request's way through prefill elsewhere and decode here, and again when the prefill fails.

Owns the order of the steps and the retries: until the first token has been sent, a request whose prefill
replica fails is placed on another one, within `slo.replacement`'s rules. How a prefill replica is called is
`decode_node.prefill_tier`'s; noticing that it has failed is `decode_node.prefill_health`'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, assert_never

from ray.exceptions import TaskCancelledError
from ray.serve.llm.openai_api_models import CompletionRequest
from vllm.exceptions import GenerationError

from decode_node.answers import error_in, error_response, is_answer, is_preamble
from decode_node.prefill_health import PULLED_S, PrefillFailedError, PrefillWatch
from slo.errors import EvictionReason, Rejected, RejectionReason
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

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ray.serve.handle import DeploymentHandle

    from decode_node.prefill_tier import PrefillTier
    from slo.request import ReplicaId, RequestContext
    from telemetry.instruments import Instruments

_NOT_REPLACED: Final = {
    ReplacementOutcome.LIMIT: (
        503,
        "prefill_failed",
        "one replica after the other failed while it computed the prompt; try again",
    ),
    ReplacementOutcome.DEADLINE: (
        429,
        EvictionReason.DEADLINE_PASSED.value,
        (
            "the replica that computed the prompt failed, and no other can give the first token in time; "
            "retry later, or ask for a longer x-slo-ttft-ms"
        ),
    ),
    ReplacementOutcome.NO_REPLICA: (
        503,
        RejectionReason.NO_REPLICA.value,
        "no prefill replica is running; try again when one has been started",
    ),
}
"""Status, code and message that a client gets."""


class NotReplacedError(Exception):
    """The prefill of a request failed, and it is not placed again; `outcome` says why."""

    def __init__(self, outcome: ReplacementOutcome) -> None:
        self.status, self.code, message = _NOT_REPLACED[outcome]
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it came.

    Attributes:
        request: A chat or a completion request; it is not changed.
        info: What else came with it over HTTP.
        is_chat: Which of the two it is.
        token_ids: Its prompt; empty when that is not prefilled elsewhere.
    """

    request: Any
    info: Any
    is_chat: bool
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Orchestrator:
    """Takes requests from prefill to decode.

    Attributes:
        replica: Who decodes.
        engine: Its started engine.
        backend: Ray Serve LLM's side of the KV connector; writes a request for each tier, changes none.
        tier: Who prefills.
        watch: Notices that a prefill replica has failed.
        router: Says where a prefill goes that has to be placed again.
        router_timeout_s: Longest wait for that.
        rules: When a failed prefill is not placed again.
        instruments: Where replacements are counted.
    """

    replica: ReplicaId
    engine: Any
    backend: Any
    tier: PrefillTier
    watch: PrefillWatch
    router: DeploymentHandle
    router_timeout_s: float
    rules: ReplacementRules
    instruments: Instruments

    @property
    def is_dead(self) -> bool:
        """Whether the engine has died."""
        return bool(self.engine._engine_client.errored)  # noqa: SLF001 - no public way in

    def decode(self, request: Any, call: Call) -> AsyncGenerator[Any, None]:
        """The pieces of the engine's answer to `request`, which is the call's or has been made of it."""
        run = self.engine.chat if call.is_chat else self.engine.completions
        pieces: AsyncGenerator[Any, None] = run(request, call.info)
        return pieces

    async def run(self, call: Call, context: RequestContext) -> AsyncGenerator[Any, None]:
        """The pieces of the answer; `context` is the request's as of now.

        Raises:
            NotReplacedError: when its prefill failed; nothing has been yielded then.
        """
        replacements = 0
        while True:
            started_s = time.monotonic()
            try:
                async with aclosing(self._once(call, context)) as pieces:
                    async for piece in pieces:
                        yield piece
            except PrefillFailedError as failure:
                context = context.after(time.monotonic() - started_s)
                outcome, context = await self._place_again(call, context, failure, replacements)
                if outcome in _NOT_REPLACED:
                    raise NotReplacedError(outcome) from failure
                replacements += 1
            else:
                return

    async def _once(self, call: Call, context: RequestContext) -> AsyncGenerator[Any, None]:
        """One try. Raises `PrefillFailedError` only before it yields anything."""
        is_decoding = False
        try:
            prefill = self.tier.prefill(self._prompt_of(call), call.info, context)
            prefilled, replica = await self.watch.result(prefill, context.prefill_replica)
            if not is_answer(prefilled):
                yield prefilled
                return
            context = replace(context, prefill_replica=replica)
            async with aclosing(self._decode_prefilled(call, prefilled)) as pieces:
                opening = self._opening(pieces, replica)
                for piece in await self.watch.result(opening, replica, PULLED_S):
                    is_decoding = is_decoding or is_answer(piece)
                    yield piece
                async for piece in pieces:
                    is_decoding = is_decoding or is_answer(piece)
                    yield piece
        finally:
            if not is_decoding:
                self.tier.release(context)

    def _prompt_of(self, call: Call) -> Any:
        """The request to have the prompt prefilled, and nothing decoded."""
        request = call.request
        prompt_only = CompletionRequest(
            model=request.model,
            prompt=call.token_ids,
            request_id=request.request_id,
            cache_salt=getattr(request, "cache_salt", None),
            ignore_eos=True,
        )
        return self.backend.prepare_prefill_request(request=prompt_only, peer=None)

    async def _decode_prefilled(self, call: Call, prefilled: Any) -> AsyncGenerator[Any, None]:
        prepared = self.backend.prepare_decode_request(
            request=call.request, peer=None, prefill_response=prefilled
        )
        try:
            async for piece in self.decode(prepared, call):
                yield piece
        except GenerationError as error:  # not streaming; a stream has it as an event
            yield error_response(500, "engine_error", str(error))

    async def _place_again(
        self, call: Call, context: RequestContext, failure: PrefillFailedError, replacements: int
    ) -> tuple[ReplacementOutcome, RequestContext]:
        failed = context.failed_replicas
        if failure.replica is not None:
            failed = (*failed, failure.replica)
        context = replace(
            context, failed_replicas=failed, prefill_replica=None, prompt_bytes=0, cached_tokens=0
        )
        outcome = self.rules.refusal(context, replacements)
        if outcome is None:
            asked = ReplacementRequested(
                job_id=context.job_id,
                tier=context.tier,
                ttft_budget_s=context.ttft_budget_s,
                explicit_deadline=context.explicit_deadline,
                tokens=len(call.token_ids),
                decode_replica=self.replica,
                failed_replicas=failed,
                cause=failure.cause,
            )
            started_s = time.monotonic()
            outcome, context = _by(await self._ask_router(asked), context, failure.cause)
            context = context.after(time.monotonic() - started_s)
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
        return outcome, context

    async def _ask_router(self, request: ReplacementRequested) -> ReplacementDecision | None:
        """The router's answer; None when it gives none in time."""
        try:
            decision: ReplacementDecision = await asyncio.wait_for(
                self.router.replace.remote(request), self.router_timeout_s
            )
        except TaskCancelledError:  # the client is gone
            raise
        except Exception as error:  # noqa: BLE001 - whatever ails the router, the request goes on
            logs.event("replacement_without_router", job_id=request.job_id, error=repr(error)[:300])
            return None
        return decision

    async def _opening(self, pieces: AsyncGenerator[Any, None], replica: ReplicaId | None) -> list[Any]:
        """The pieces up to the first that carries a token, or all.

        Raises:
            PrefillFailedError: when the engine answers with an error of its own and goes on serving, as vLLM
                does with a request whose KV cache did not arrive (`kv_load_failure_policy: fail`).
        """
        opening: list[Any] = []
        async for piece in pieces:
            error = error_in(piece)
            if error is not None and error.is_servers and not self.is_dead:
                raise PrefillFailedError(FailureCause.PULL_FAILED, replica, error.message)
            opening.append(piece)
            if not is_preamble(piece):
                break
        return opening


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
        case Rejected() | None:  # it was admitted before; no other reason counts now
            if cause is FailureCause.NO_REPLICA:
                return ReplacementOutcome.NO_REPLICA, context
            return ReplacementOutcome.SERVE, context
        case _:
            assert_never(decision)
