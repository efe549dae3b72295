"""The OpenAI-compatible HTTP ingress: validates a request, has it placed, streams its answer.

Owns the translation between HTTP and the decision rules, and the measurements that only the place where a
request arrives can make. Ray Serve LLM's ingress class does the rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.exceptions import TaskCancelledError
from ray.serve.llm.ingress import OpenAiIngress
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deployments import http_errors, request_fields
from deployments.accounting import RequestRecord, ingress_instruments
from deployments.http_errors import HTTPError
from deployments.middleware import REQUEST_ID_HEADER
from deployments.placement_client import PlacementClient
from router.core import Placed, PlacementRequested, Rejected
from slo.objectives import TTFT_HEADERS, resolve
from slo.outcomes import Outcome
from slo.request import CONTEXT_HEADER, JobId, RequestContext
from telemetry import logs

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from ray.serve.handle import DeploymentHandle

    from slo.objectives import Objective
    from slo.tiers import Tier, TierPolicy

_SSE = "text/event-stream"


@dataclass(frozen=True, slots=True)
class IngressConfig:
    """What the ingress is started with."""

    policies: Mapping[Tier, TierPolicy]
    router_timeout_s: float


@dataclass(slots=True)
class _Admitted:
    """A request that is on its way: what was promised, and its account."""

    context: RequestContext
    objective: Objective
    predicted_ttft_s: float | None
    record: RequestRecord

    def headers(self) -> dict[str, str]:
        """Response headers that tell the client what it got."""
        budget_s = self.record.ttft_budget_s
        headers = {
            "x-slo-tier": self.objective.tier.value,
            "x-slo-ttft-budget-ms": "none" if budget_s is None else f"{budget_s * 1e3:.1f}",
        }
        if self.predicted_ttft_s is not None:
            headers["x-slo-predicted-ttft-ms"] = f"{self.predicted_ttft_s * 1e3:.1f}"
        if self.objective.clamped_from is not None:
            headers["x-slo-tier-clamped-from"] = self.objective.clamped_from.value
        return headers


class SlackServeIngress(OpenAiIngress):  # type: ignore[misc] # Ray ships no types for it
    """Routes of the HTTP API; each answers in OpenAI's shape."""

    def __init__(
        self,
        llm_deployments: dict[str, DeploymentHandle],
        model_cards: dict[str, Any],
        *,
        config: IngressConfig,
        router: DeploymentHandle,
    ) -> None:
        super().__init__(llm_deployments, model_cards)
        self._config = config
        self._instruments = ingress_instruments()
        self._placement = PlacementClient(router, config.router_timeout_s, self._instruments)

    async def health(self) -> Response:
        """Whether this process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        """200 once both tiers are warm, 503 before."""
        fleet = await self._placement.fleet()
        if fleet is None:
            return JSONResponse({"status": "not ready", "reason": "the router does not answer"}, 503)
        if not fleet["ready"]:
            missing = [tier for tier in ("prefill", "decode") if not fleet[tier]]
            reason = f"no warm replica in: {', '.join(missing) or 'any tier, all reports are old'}"
            return JSONResponse({"status": "not ready", "reason": reason, "fleet": fleet}, 503)
        return JSONResponse({"status": "ready", "fleet": fleet})

    async def _process_llm_request(
        self, body: Any, call_method: str, raw_request: Request | None = None
    ) -> Response:
        """Answer a chat or text completion; called by the base class's routes."""
        assert raw_request is not None
        arrived_s = time.monotonic()
        await self._known_model(body.model)
        request_fields.refuse_internal_fields(body)
        request_fields.materialise(body)
        admitted = await self._admit(body, raw_request, arrived_s)
        chunks = self._generate(body, call_method, admitted)
        try:
            first = await anext(chunks)
        except StopAsyncIteration:
            admitted.record.end(Outcome.FAILED)
            raise http_errors.internal_error(admitted.context.request_id) from None
        if (error := getattr(first, "error", None)) is not None:
            failed = http_errors.engine_error(error)
            admitted.record.end(Outcome.REJECTED if failed.status < 500 else Outcome.FAILED)  # noqa: PLR2004
            failed.headers.update(admitted.headers())
            return failed.response()
        if hasattr(first, "model_dump"):
            admitted.record.end(Outcome.FINISHED)
            return JSONResponse(first.model_dump(), headers=admitted.headers())
        admitted.record.chunk()
        stream = _Stream(first, chunks, admitted.record)
        return StreamingResponse(stream.events(), media_type=_SSE, headers=admitted.headers())

    async def _known_model(self, model: str | None) -> None:
        if model is not None and model not in self._model_cards:
            raise http_errors.unknown_model(model, list(self._model_cards))

    async def _admit(self, body: Any, request: Request, arrived_s: float) -> _Admitted:
        """Resolve the objective and get a place, or raise the refusal."""
        state = request.state
        objective = self._objective(body, state)
        state.tier = objective.tier.value
        size = request_fields.prompt_size(body)
        job_id = JobId(f"{state.request_id}-{time.monotonic_ns():x}")
        decision = await self._placement.place(
            PlacementRequested(
                job_id=job_id,
                objective=objective,
                explicit_deadline=any(name in TTFT_HEADERS for name, _ in state.headers),
                prompt_tokens=size.tokens,
                prompt_bytes=size.text_bytes,
                elapsed_s=time.monotonic() - arrived_s,
            )
        )
        if isinstance(decision, Rejected):
            raise http_errors.rejected(decision)
        budget_s = decision.ttft_budget_s if decision is not None else objective.ttft_s
        context = _context(job_id, state.request_id, objective, budget_s, size.text_bytes, decision)
        predicted_s = None if decision is None else decision.predicted_ttft_s
        record = RequestRecord(
            self._instruments, context, budget_s, predicted_s, arrived_s, self._placement.job_ended
        )
        spent_s = time.monotonic() - arrived_s
        body.request_id = state.request_id
        return _Admitted(context.after(spent_s), objective, predicted_s, record)

    def _objective(self, body: Any, state: Any) -> Objective:
        return resolve(
            state.headers,
            request_fields.service_tier(body),
            self._config.policies,
            state.tenant.highest_tier,
        )

    async def _generate(self, body: Any, call_method: str, admitted: _Admitted) -> AsyncGenerator[Any, None]:
        """The answer's pieces, from the decode tier; accounts for whatever ends it."""
        record = admitted.record
        try:
            async for piece in self._get_response(
                body=body, call_method=call_method, raw_request=_internal_request(admitted.context)
            ):
                yield piece
        except (asyncio.CancelledError, GeneratorExit, TaskCancelledError):
            record.end(Outcome.CANCELLED)
            raise
        except Exception as error:
            record.end(Outcome.FAILED)
            logs.event(
                "request_failed",
                level=logging.ERROR,
                request_id=admitted.context.request_id,
                job_id=admitted.context.job_id,
                error=repr(error)[:2000],
            )
            raise http_errors.internal_error(admitted.context.request_id) from error


class _Stream:
    """A streaming answer as server-sent events, measured as it passes."""

    def __init__(self, first: Any, rest: AsyncGenerator[Any, None], record: RequestRecord) -> None:
        self._first = first
        self._rest = rest
        self._record = record

    async def events(self) -> AsyncGenerator[str, None]:
        """Text of the events, with exactly one `[DONE]` unless an error ends the stream."""
        try:
            yield _text(self._first)
            async for piece in self._rest:
                if (error := getattr(piece, "error", None)) is not None:
                    raise http_errors.engine_error(error)
                self._record.chunk()
                yield _text(piece)
            self._record.end(Outcome.FINISHED)
        except HTTPError as error:
            self._record.end(Outcome.FAILED)
            yield f"data: {bytes(error.response().body).decode()}\n\n"
        finally:
            self._record.end(Outcome.CANCELLED)
            await self._rest.aclose()


def _text(piece: Any) -> str:
    return "".join(piece) if isinstance(piece, list) else str(piece)


def _context(
    job_id: JobId,
    request_id: str,
    objective: Objective,
    budget_s: float | None,
    prompt_bytes: int,
    placed: Placed | None,
) -> RequestContext:
    return RequestContext(
        job_id=job_id,
        request_id=request_id,
        tier=objective.tier,
        ttft_budget_s=budget_s,
        handoff_s=0.0 if placed is None else placed.handoff_s,
        prefill_replica=None if placed is None else placed.prefill_replica,
        decode_replica=None if placed is None else placed.decode_replica,
        prompt_bytes=prompt_bytes,
    )


def _internal_request(context: RequestContext) -> Request:
    """A request that carries to the next tier what the server says, and nothing the client said."""
    headers = {CONTEXT_HEADER: context.encode(), REQUEST_ID_HEADER: context.request_id}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": encoded, "query_string": b""})
