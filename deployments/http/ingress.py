"""The OpenAI-compatible HTTP ingress: validates a request, has it placed, streams its answer.

Owns the translation between HTTP and the decision rules, and the measurements that only the place where a
request arrives can make. Ray Serve LLM's ingress class does the rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import TaskCancelledError
from ray.serve.llm.ingress import OpenAiIngress, make_fastapi_ingress
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from decode_node.answers import error_in
from deployments.http import errors as http_errors
from deployments.http import request_body, request_fields
from deployments.http.accounting import Identity, RequestRecord, ingress_instruments
from deployments.http.errors import HTTPError
from deployments.http.gatekeeper import REQUEST_ID_HEADER, Gatekeeper, answer_refusal
from deployments.http.placement_client import PlacementClient
from deployments.http.prefix_hashes import prefix_hashes
from deployments.monitor.actor import MonitorOptions, start_monitor
from router.messages import Placed, PlacementRequested
from slo.errors import EvictionReason, FieldError, Rejected
from slo.monitor.messages import IngressSeen, Role
from slo.objectives import TTFT_HEADERS, resolve
from slo.outcomes import Outcome, outcome_of
from slo.request import CONTEXT_HEADER, JobId, RequestContext
from telemetry import logs
from telemetry.reporting.monitor_client import MonitorClient, Participant

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ray.serve.handle import DeploymentHandle
    from starlette.datastructures import State

    from slo.admission.tenants import KeyRing
    from slo.objectives import Objective
    from slo.outcomes import RequestEnded
    from slo.tiers import TierSet


_SSE = "text/event-stream"


@dataclass(frozen=True, slots=True)
class IngressConfig:
    """What the ingress is started with; without `monitor` there is no SLO monitor."""

    tiers: TierSet
    router_timeout_s: float
    monitor: MonitorOptions | None = None


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
        self._monitor = None if config.monitor is None else self._start_reporting(config.monitor)

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

    async def chat(self, request: Request) -> Response:
        """Answer a chat completion."""
        return await self._serve(request, ChatCompletionRequest, "chat")

    async def completions(self, request: Request) -> Response:
        """Answer a text completion."""
        return await self._serve(request, CompletionRequest, "completions")

    async def model_data(self, model: str) -> Any:
        """Describe one model."""
        self._check_model(model)
        return await super().model_data(model)

    async def _serve(self, request: Request, model: type, method: str) -> Response:
        arrived_s = time.monotonic()
        body = request_body.parse(await request.body(), model)
        self._check_model(body.model)
        request_fields.refuse_internal_fields(body)
        request_fields.materialise(body)
        state = request.state
        objective = resolve(
            state.headers,
            request_fields.service_tier(body),
            self._config.tiers,
            state.tenant.highest_tier,
        )
        state.tier = objective.tier
        job_id = JobId(f"{state.request_id}-{time.monotonic_ns():x}")
        record = RequestRecord(
            self._instruments,
            Identity(job_id, state.request_id, state.tenant.name, body.model, bool(body.stream)),
            objective,
            arrived_s,
            ended=self._placement.job_ended,
            tell=self._tell,
        )
        context = await self._admit(body, objective, record, state, arrived_s)
        body.request_id = state.request_id
        headers = _response_headers(objective, record)
        return await self._answer(self._generate(body, method, context, record), record, headers)

    def _start_reporting(self, options: MonitorOptions) -> MonitorClient:
        """Keep the monitor informed, and start it when there is none."""
        reporter = serve.get_replica_context().replica_id.unique_id
        participant = Participant(reporter, Role.INGRESS, IngressSeen, settings=options.settings)
        client = MonitorClient(participant, self._instruments, partial(start_monitor, options))
        client.start()
        return client

    def _tell(self, ended: RequestEnded) -> None:
        if self._monitor is not None:
            self._monitor.note(ended)

    def _check_model(self, model: str | None) -> None:
        if model is not None and model not in self._model_cards:
            raise http_errors.unknown_model(model, list(self._model_cards))

    async def _admit(
        self,
        body: Any,
        objective: Objective,
        record: RequestRecord,
        state: State,
        arrived_s: float,
    ) -> RequestContext:
        """Get a place for the request, or raise the refusal."""
        size = request_fields.prompt_size(body)
        prefix = prefix_hashes(body)
        is_explicit = any(name in TTFT_HEADERS for name, _ in state.headers)
        try:
            decision = await self._placement.place(
                PlacementRequested(
                    job_id=record.job_id,
                    objective=objective,
                    explicit_deadline=is_explicit,
                    prompt_tokens=size.tokens,
                    prompt_bytes=size.text_bytes,
                    elapsed_s=time.monotonic() - arrived_s,
                    tenant=state.tenant.name,
                    prefix_hashes=prefix.hashes,
                    hash_block=prefix.block,
                )
            )
        except (asyncio.CancelledError, TaskCancelledError):
            record.end(Outcome.CANCELLED)
            raise
        if isinstance(decision, Rejected):
            record.placed(decision.ttft_budget_s, decision.predicted_ttft_s)
            record.refused(outcome_of(decision.reason))
            raise http_errors.rejected(decision, _response_headers(objective, record))
        context = _context(record, objective, size.text_bytes, decision)
        record.placed(context.ttft_budget_s, None if decision is None else decision.predicted_ttft_s)
        return replace(context, explicit_deadline=is_explicit).after(time.monotonic() - arrived_s)

    async def _answer(
        self, pieces: AsyncGenerator[Any, None], record: RequestRecord, headers: dict[str, str]
    ) -> Response:
        """Answer with the first piece if it is all there is, else with the stream that it begins."""
        try:
            first = await anext(pieces)
        except StopAsyncIteration:
            record.end(Outcome.FAILED)
            raise http_errors.internal_error(record.request_id) from None
        if (error := error_in(first)) is not None:
            failed = http_errors.engine_error(error)
            record.end(_outcome(failed))
            failed.headers.update(headers)
            return failed.response()
        if hasattr(first, "model_dump"):
            record.end(Outcome.FINISHED)
            return JSONResponse(first.model_dump(), headers=headers)
        return StreamingResponse(_events(first, pieces, record), media_type=_SSE, headers=headers)

    async def _generate(
        self, body: Any, method: str, context: RequestContext, record: RequestRecord
    ) -> AsyncGenerator[Any, None]:
        """The answer's pieces, from the decode tier; accounts for what ends it early."""
        try:
            async for piece in self._get_response(
                body=body, call_method=method, raw_request=_internal_request(context)
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
                request_id=record.request_id,
                job_id=record.job_id,
                error=repr(error)[:2000],
            )
            raise http_errors.internal_error(record.request_id) from error


async def _events(
    first: Any, rest: AsyncGenerator[Any, None], record: RequestRecord
) -> AsyncGenerator[str, None]:
    """The stream's server-sent events, measured as they pass; an error that comes late is its last event."""
    outcome = Outcome.FINISHED
    try:
        for text in _texts(first):
            record.event(text)
            yield text
        async for piece in rest:
            if error_in(piece) is not None:
                outcome = Outcome.FAILED
            for text in _texts(piece):
                record.event(text)
                yield text
        record.end(outcome)
    except HTTPError as error:
        yield _error_event(error)
    finally:
        record.end(Outcome.CANCELLED)
        await rest.aclose()


def _outcome(failed: HTTPError) -> Outcome:
    """How a request ends that its replicas answer with an error."""
    if failed.code == EvictionReason.DEADLINE_PASSED:
        return Outcome.EVICTED
    return Outcome.REJECTED if failed.status < 500 else Outcome.FAILED  # noqa: PLR2004 - HTTP classes


def _texts(piece: Any) -> list[str]:
    if not isinstance(piece, list | str) and (error := error_in(piece)) is not None:
        return [_error_event(http_errors.engine_error(error))]
    return [str(text) for text in piece] if isinstance(piece, list) else [str(piece)]


def _error_event(error: HTTPError) -> str:
    return f"data: {bytes(error.response().body).decode()}\n\n"


def _response_headers(objective: Objective, record: RequestRecord) -> dict[str, str]:
    """Response headers that tell the client what it got."""
    budget_s = record.ttft_budget_s
    headers = {
        "x-slo-tier": objective.tier,
        "x-slo-ttft-budget-ms": "none" if budget_s is None else f"{budget_s * 1e3:.1f}",
    }
    if record.predicted_ttft_s is not None:
        headers["x-slo-predicted-ttft-ms"] = f"{record.predicted_ttft_s * 1e3:.1f}"
    if objective.clamped_from is not None:
        headers["x-slo-tier-clamped-from"] = objective.clamped_from
    return headers


def _context(
    record: RequestRecord, objective: Objective, prompt_bytes: int, placed: Placed | None
) -> RequestContext:
    """What the request's other processes need to know; without a placement they choose for themselves."""
    if placed is None:
        return RequestContext(
            record.job_id, record.request_id, objective.tier, objective.ttft_s, prompt_bytes=prompt_bytes
        )
    return RequestContext(
        job_id=record.job_id,
        request_id=record.request_id,
        tier=objective.tier,
        ttft_budget_s=placed.ttft_budget_s,
        handoff_s=placed.handoff_s,
        prefill_replica=placed.prefill_replica,
        decode_replica=placed.decode_replica,
        prompt_bytes=prompt_bytes,
        cached_tokens=placed.cached_tokens,
    )


def _internal_request(context: RequestContext) -> Request:
    """A request that carries to the next tier what the server says, and nothing the client said."""
    headers = {CONTEXT_HEADER: context.encode(), REQUEST_ID_HEADER: context.request_id}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": encoded, "query_string": b""})


def make_ingress(keys: KeyRing, max_body_bytes: int) -> type:
    """The ingress class with its routes, ready to be deployed.

    Args:
        keys: Known API keys.
        max_body_bytes: Largest request body.
    """
    app = FastAPI(title="SlackServe", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HTTPError, answer_refusal)
    app.add_exception_handler(FieldError, answer_refusal)
    app.add_exception_handler(HTTPException, answer_refusal)
    app.add_middleware(Gatekeeper, keys=keys, max_body_bytes=max_body_bytes)
    routes: dict[str, Any] = {
        "models": lambda api: api.get("/v1/models"),
        "model_data": lambda api: api.get("/v1/models/{model:path}"),
        "completions": lambda api: api.post("/v1/completions"),
        "chat": lambda api: api.post("/v1/chat/completions"),
        "health": lambda api: api.get("/health"),
        "ready": lambda api: api.get("/ready"),
    }
    return make_fastapi_ingress(SlackServeIngress, endpoint_map=routes, app=app)  # type: ignore[no-any-return]
