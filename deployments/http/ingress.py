"""The OpenAI-compatible HTTP ingress: validates a request, has it placed, streams its answer.

Owns the translation between HTTP and the decision rules, and the measurements that only the place where a
request arrives can make. Ray Serve LLM's ingress class does the rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from opentelemetry.trace import SpanKind, set_span_in_context
from ray import serve
from ray.exceptions import TaskCancelledError
from ray.llm._internal.serve.core.configs.openai_api_models import (
    DetokenizeRequest,
    TokenizeCompletionRequest,
)
from ray.llm._internal.serve.core.protocol import RawRequestInfo
from ray.serve.llm.ingress import OpenAiIngress, make_fastapi_ingress
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from decode_node.answers import error_in
from deployments.config.limits import LimitsConfig
from deployments.http import door, request_body, request_fields
from deployments.http import errors as http_errors
from deployments.http.accounting import METRICS, Identity, RequestRecord
from deployments.http.continuing.decode_tier import Asked, at_place
from deployments.http.errors import HTTPError
from deployments.http.event_stream import events
from deployments.http.gatekeeper import Gatekeeper, answer_refusal
from deployments.http.key_watch import KeyWatch
from deployments.http.placing.prefix_hashes import prefix_hashes
from deployments.http.responses import request as responses
from deployments.http.responses.answer import ResponseWording
from deployments.http.served_model import ModelConfig, ServedModel, WaysConfig
from deployments.http.token_meter import TokenMeter
from router.messages import Placed, PlacementReason, PlacementRequested
from slo.admission.tenant_limits import Usage
from slo.errors import FieldError, Rejected
from slo.objectives import TTFT_HEADERS, Objective, resolve
from slo.outcomes import Outcome, outcome_of
from slo.request import CONTEXT_HEADER, REQUEST_ID_HEADER, JobId, RequestContext
from slo.tiers import TierSet
from telemetry import logs, tracing
from telemetry.instruments import Instruments
from telemetry.tracing import (
    TRACEPARENT,
    TRACER,
    TracingOptions,
    trace_id_of,
    traceparent_of,
    wall_ns,
)

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from starlette.datastructures import State


_SSE = "text/event-stream"
_OPERATIONS = {"chat": "chat", "completions": "text_completion"}
"""The names of our methods in OpenTelemetry's conventions for generative AI."""


@dataclass(frozen=True, slots=True)
class IngressConfig:
    """What the ingress is started with; without tracing there are no spans.

    Attributes:
        models: What is served; the first answers requests that name no model.
        names: By name that a request may have, the name of the model.
    """

    models: tuple[ModelConfig, ...]
    names: Mapping[str, str]
    tiers: TierSet
    limits: LimitsConfig
    ways: WaysConfig
    tracing: TracingOptions | None = None


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
        tracing.start(config.tracing, "ingress", begins_traces=True)
        self._config = config
        self._instruments = Instruments(*METRICS)
        self._models = [
            ServedModel.started(model, config.ways, router, llm_deployments[model.name], self._instruments)
            for model in config.models
        ]
        by_name = {served.config.name: served for served in self._models}
        self._served = {name: by_name[model] for name, model in config.names.items()}

    async def health(self) -> Response:
        """Whether this process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 once both tiers of a model are warm, 503 before; with `?all` only once those of all models are.

        One model that is not ready takes no request from another. The fleet is told to those who may send
        requests.
        """
        fleets = await asyncio.gather(*(served.placement.fleet() for served in self._models))
        heard = {fleet["model"]: fleet for fleet in fleets if fleet is not None}
        if len(heard) < len(fleets):
            return JSONResponse({"status": "not ready", "reason": "the router does not answer"}, 503)
        waiting = {model: _missing(fleet) for model, fleet in heard.items() if not fleet["ready"]}
        known: dict[str, Any] = {}
        if request.state.tenant is not None:
            known = {"fleet": fleets[0]} if len(fleets) == 1 else {"fleets": heard}
        if waiting and len(heard) > 1:
            known["waiting"] = waiting
        if waiting and ("all" in request.query_params or len(waiting) == len(heard)):
            reason = ", ".join(waiting.values() if len(heard) == 1 else map(": ".join, waiting.items()))
            return JSONResponse({"status": "not ready", "reason": reason, **known}, 503)
        return JSONResponse({"status": "ready", **known})

    async def chat(self, request: Request) -> Response:
        """Answer a chat completion."""
        return await self._serve(request, ChatCompletionRequest, "chat")

    async def completions(self, request: Request) -> Response:
        """Answer a text completion."""
        return await self._serve(request, CompletionRequest, "completions")

    async def responses(self, request: Request) -> Response:
        """Answer a request of the responses API, by a chat completion; nothing is kept of it."""
        arrived_s = time.monotonic()
        asked, body = responses.read(await request.body(), self._config.limits, request.state.tenant)
        longest = self._named(body).config.max_model_len
        wording = ResponseWording(asked, f"resp_{request.state.request_id}", longest)
        return await self._serve_body(request, body, "chat", arrived_s, wording)

    async def model_data(self, model: str) -> Any:
        """Describe one model."""
        self._check_model(model)
        return await super().model_data(model)

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text."""
        return await self._convert(request, TokenizeCompletionRequest, "tokenize")

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        return await self._convert(request, DetokenizeRequest, "detokenize")

    async def _convert(self, request: Request, model: type, method: str) -> Response:
        """Answer what needs a decode replica's tokenizer, and nothing of its engine or the router."""
        body = request_body.parse(await request.body(), model, self._config.limits)
        self._named(body)
        request_id = request.state.request_id
        asking = self._get_response(body=body, call_method=method, raw_request=_bare_request(request_id))
        try:
            answer = await anext(asking)
        except (asyncio.CancelledError, TaskCancelledError):
            raise
        except Exception as error:
            logs.event("request_failed", level=logging.ERROR, request_id=request_id, error=repr(error)[:2000])
            raise http_errors.internal_error(request_id) from error
        if (refused := error_in(answer)) is not None:
            raise http_errors.engine_error(refused)
        return JSONResponse(answer.model_dump())

    async def _serve(self, request: Request, model: type, method: str) -> Response:
        arrived_s = time.monotonic()
        body = request_body.read(await request.body(), model, self._config.limits, request.state.tenant)
        return await self._serve_body(request, body, method, arrived_s)

    async def _serve_body(
        self,
        request: Request,
        body: Any,
        method: str,
        arrived_s: float,
        wording: ResponseWording | None = None,
    ) -> Response:
        """Answer a request that was read, in the words of its own API if it has others."""
        state = request.state
        served = self._named(body)
        state.model = body.model
        objective = resolve(
            state.headers,
            request_fields.service_tier(body),
            self._config.tiers,
            state.tenant.highest_tier,
        )
        state.tier = objective.tier
        job_id = JobId(f"{state.request_id}-{state.server_id}")
        record = RequestRecord(
            self._instruments,
            Identity(
                job_id,
                state.request_id,
                state.tenant.name,
                body.model,
                bool(body.stream),
                request_fields.answers_per_prompt(body) * request_fields.prompts(body),
            ),
            objective,
            arrived_s,
            ended=served.placement.job_ended,
            tell=served.tell,
            span=TRACER.start_span(
                "ingress",
                tracing.here(dict(state.headers).get(TRACEPARENT, "")),
                SpanKind.SERVER,
                {"gen_ai.operation.name": _OPERATIONS[method], "gen_ai.provider.name": "slackserve"},
                start_time=wall_ns(arrived_s),
            ),
        )
        body.request_id = state.request_id
        asked = self._asked(body, objective, record, state, arrived_s)
        context = await self._admit(served, asked, objective, record)
        headers = _response_headers(objective, record)
        pieces = self._generate(served, asked, method, context, record)
        return await self._answer(pieces, record, headers, wording)

    def _check_model(self, model: str | None) -> None:
        if model is not None and model not in self._model_cards:
            raise http_errors.unknown_model(model, list(self._model_cards))

    def _named(self, body: Any) -> ServedModel:
        """The model that a request names; from now on one names it that has named none."""
        if body.model is None:
            body.model = self._models[0].config.name
        self._check_model(body.model)
        return self._served[body.model]

    def _asked(
        self, body: Any, objective: Objective, record: RequestRecord, state: State, arrived_s: float
    ) -> Asked:
        """The request as the router is asked for a place for it."""
        size = request_fields.prompt_size(body)
        prefix = prefix_hashes(body)
        placement = PlacementRequested(
            job_id=record.job_id,
            objective=objective,
            explicit_deadline=any(name in TTFT_HEADERS for name, _ in state.headers),
            prompt_tokens=size.tokens,
            prompt_bytes=size.text_bytes,
            elapsed_s=time.monotonic() - arrived_s,
            tenant=state.tenant.name,
            prefix_hashes=prefix.hashes,
            hash_block=prefix.block,
            limit=state.tenant.limit,
            key_limit=state.tenant.key_limit,
            answers_per_prompt=request_fields.answers_per_prompt(body),
            decode_samples_first=request_fields.decode_samples_first(body),
            output_tokens=request_fields.output_tokens(
                body, self._config.limits, self._served[body.model].config.max_model_len
            ),
        )
        return Asked(body, placement, arrived_s)

    async def _admit(
        self, served: ServedModel, asked: Asked, objective: Objective, record: RequestRecord
    ) -> RequestContext:
        """Get a place for the request, or raise the refusal."""
        placing = TRACER.start_span("place", set_span_in_context(record.span))
        try:
            decision = await served.placement.place(asked.placement)
        except (asyncio.CancelledError, TaskCancelledError):
            record.end(Outcome.CANCELLED)
            raise
        finally:
            placing.end()
        if isinstance(decision, Rejected):
            promised_s = objective.missed_ttft_s(decision.ttft_budget_s)
            record.placed(decision.ttft_budget_s, decision.predicted_ttft_s, promised_s)
            record.refused(outcome_of(decision.reason))
            raise _traced(http_errors.rejected(decision, _response_headers(objective, record)), record)
        placement = asked.placement
        admitted = None
        if placement.counts_tokens and decision is not None:
            prompt_tokens = decision.tokens * placement.answers_per_prompt
            admitted = Usage(prompt_tokens, placement.output_tokens)
        record.meter = TokenMeter(asked.body, admitted, shows_all=served.config.shows_usage)
        context = _context(record, placement, decision)
        if decision is None:
            record.placed(context.ttft_budget_s, None, objective.ttft_s)
        else:
            record.placed(
                context.ttft_budget_s,
                decision.predicted_ttft_s,
                decision.promised_ttft_s,
                decision.decode_wait_s,
            )
        record.local_prefill = context.local_prefill
        return context.after(time.monotonic() - asked.arrived_s)

    async def _answer(
        self,
        pieces: AsyncGenerator[Any, None],
        record: RequestRecord,
        headers: dict[str, str],
        wording: ResponseWording | None,
    ) -> Response:
        """Answer with the first piece if it is all there is, else with the stream that it begins."""
        try:
            first = await anext(pieces)
        except HTTPError as refusal:
            refusal.headers.update(headers)
            raise
        except StopAsyncIteration:
            record.end(Outcome.FAILED)
            raise _traced(http_errors.internal_error(record.request_id), record) from None
        if (error := error_in(first)) is not None:
            failed = _traced(http_errors.engine_error(error), record)
            if wording is not None:
                responses.renamed(failed)
            record.answered(None)
            record.end(http_errors.ended_by(failed))
            failed.headers.update(headers)
            return failed.response()
        if hasattr(first, "model_dump"):
            record.answered(first.usage)
            record.end(Outcome.FINISHED)
            answer = first.model_dump()
            return JSONResponse(answer if wording is None else wording.whole(answer), headers=headers)
        stream = events(first, pieces, record)
        told = stream if wording is None else wording.events(stream)
        return StreamingResponse(told, media_type=_SSE, headers=headers)

    async def _generate(
        self,
        served: ServedModel,
        asked: Asked,
        method: str,
        context: RequestContext,
        record: RequestRecord,
    ) -> AsyncGenerator[Any, None]:
        """The answer's pieces, from the decode tier; accounts for what ends it early."""
        try:
            handle = self._get_configured_serve_handle(await self._get_model_id(asked.body.model))

            def send(body: Any, context: RequestContext) -> Any:
                return getattr(handle, method).remote(body, _internal_info(context))

            async with aclosing(served.decode.answer(asked, context, send)) as pieces:
                async for piece in pieces:
                    yield piece
        except (asyncio.CancelledError, GeneratorExit, TaskCancelledError):
            record.end(Outcome.CANCELLED)
            raise
        except HTTPError as error:
            record.end(http_errors.ended_by(error))
            raise _traced(error, record) from None
        except Exception as error:
            record.end(Outcome.FAILED)
            logs.event(
                "request_failed",
                level=logging.ERROR,
                request_id=record.request_id,
                job_id=record.job_id,
                error=repr(error)[:2000],
            )
            raise _traced(http_errors.internal_error(record.request_id), record) from error


def _missing(fleet: dict[str, Any]) -> str:
    """What a model waits for that is not ready."""
    missing = [tier for tier in ("prefill", "decode") if not fleet[tier]]
    return f"no warm replica in: {', '.join(missing) or 'any tier, all reports are old'}"


def _traced(error: HTTPError, record: RequestRecord) -> HTTPError:
    """The error of a request with the trace in which it is recorded, if it is."""
    error.trace_id = trace_id_of(record.span)
    return error


def _response_headers(objective: Objective, record: RequestRecord) -> dict[str, str]:
    """Response headers that tell the client what it got."""
    budget_s = record.ttft_budget_s
    headers = {
        "x-slo-tier": objective.tier,
        "x-slo-ttft-budget-ms": "none" if budget_s is None else f"{budget_s * 1e3:.1f}",
    }
    if record.predicted_ttft_s is not None:
        headers["x-slo-predicted-ttft-ms"] = f"{record.predicted_ttft_s * 1e3:.1f}"
    if record.local_prefill == PlacementReason.CHEAPER_ON_DECODE:
        headers["x-slo-prefilled-by"] = "decode"
    elif record.local_prefill:
        headers["x-slo-degraded"] = "local_prefill"
    if objective.clamped_from is not None:
        headers["x-slo-tier-clamped-from"] = objective.clamped_from
    return headers


def _context(record: RequestRecord, asked: PlacementRequested, placed: Placed | None) -> RequestContext:
    """What the request's other processes need to know; without a placement they choose for themselves."""
    context = RequestContext(
        record.job_id,
        record.request_id,
        asked.objective.tier,
        asked.objective.known_ttft_budget_s,
        prompt_bytes=asked.prompt_bytes,
        explicit_deadline=asked.explicit_deadline,
        tenant=asked.tenant,
        traceparent=traceparent_of(record.span),
        tpot_s=asked.objective.tpot_s,
    )
    return at_place(context, placed)


def _internal_info(context: RequestContext) -> RawRequestInfo:
    """A request's headers to the next tier: what the server says, and nothing that the client said."""
    return RawRequestInfo({CONTEXT_HEADER: context.encode(), REQUEST_ID_HEADER: context.request_id})


def _bare_request(request_id: str) -> Request:
    headers = [(REQUEST_ID_HEADER.encode(), request_id.encode())]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""})


def _is_in_place() -> bool:
    """Whether requests find the ingress: Serve names it to them once its start is over."""
    return serve.get_replica_context().servable_object is not None


def make_ingress(ingress: type[SlackServeIngress], keys: KeyWatch, limits: LimitsConfig) -> type:
    """The ingress class with its routes, ready to be deployed.

    Args:
        ingress: The class that has the routes' methods.
        keys: Known API keys.
        limits: What a client may send.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with door.opened(app, limits, _is_in_place):
            yield

    app = FastAPI(title="SlackServe", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_exception_handler(HTTPError, answer_refusal)
    app.add_exception_handler(FieldError, answer_refusal)
    app.add_exception_handler(HTTPException, answer_refusal)
    app.add_middleware(Gatekeeper, keys=keys, limits=limits)
    routes: dict[str, Any] = {
        "models": lambda api: api.get("/v1/models"),
        "model_data": lambda api: api.get("/v1/models/{model:path}"),
        "completions": lambda api: api.post("/v1/completions"),
        "chat": lambda api: api.post("/v1/chat/completions"),
        "responses": lambda api: api.post("/v1/responses"),
        "tokenize": lambda api: api.post("/tokenize"),
        "detokenize": lambda api: api.post("/detokenize"),
        "health": lambda api: api.get("/health"),
        "ready": lambda api: api.get("/ready"),
    }
    return make_fastapi_ingress(ingress, endpoint_map=routes, app=app)  # type: ignore[no-any-return]
