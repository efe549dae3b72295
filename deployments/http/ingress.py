"""The HTTP ingress, compatible with OpenAI and Anthropic: what each route answers, and a request's way there.

Owns the order of the steps: a body is read, its objective resolved, its account opened; it is admitted to a
place, and its answer generated. Each step is a module's own; which path leads to which route is
`deployments.http.routes`'s. Ray Serve LLM's ingress class does the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from opentelemetry.trace import SpanKind
from ray.llm._internal.serve.core.configs.openai_api_models import (
    DetokenizeRequest,
    TokenizeCompletionRequest,
)
from ray.llm._internal.serve.core.protocol import RawRequestInfo
from ray.serve.llm.ingress import OpenAiIngress
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from starlette.requests import Request  # noqa: TC002 - FastAPI reads it in annotations
from starlette.responses import JSONResponse, Response

from deployments.config.limits import LimitsConfig
from deployments.http import errors as http_errors
from deployments.http.accounting import METRICS, Identity, RequestRecord
from deployments.http.answering.answer import generate, respond
from deployments.http.answering.conversion import Conversions, said_whole
from deployments.http.answering.wording import Wording
from deployments.http.body import asks, reading
from deployments.http.body.allowed import refuse_priority
from deployments.http.body.prompt_size import refuse_too_long
from deployments.http.body.reading_turns import ReadingTurns
from deployments.http.gatekeeper import usable_id
from deployments.http.messages import request as messages
from deployments.http.messages.answer import MessageWording, said_count
from deployments.http.model_config import ModelConfig
from deployments.http.placing.admission import admit, response_headers
from deployments.http.placing.asked import Asked
from deployments.http.placing.readiness import Readiness
from deployments.http.responses import request as responses
from deployments.http.responses.answer import ResponseWording
from deployments.http.served_model import ServedModel, ServedModels, WaysConfig
from slo.objectives import TIER_HEADER, resolve
from slo.request import CONTEXT_HEADER, REQUEST_ID_HEADER, JobId, Party, RequestContext
from slo.tiers import Tier, TierSet
from telemetry import logs, tracing
from telemetry.instruments import Instruments
from telemetry.tracing import TRACEPARENT, TRACER, TracingOptions, wall_ns

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
    from starlette.datastructures import State


_OPERATIONS: Final = {"chat": "chat", "completions": "text_completion"}
"""The names of our methods in OpenTelemetry's conventions for generative AI."""
_Read = TypeVar("_Read")


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
    """Routes of the HTTP API; each answers in the shape of its API."""

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
        self._limits = config.limits
        self._tiers = config.tiers
        self._instruments = Instruments(*METRICS)
        models = [
            ServedModel.started(model, config.ways, router, llm_deployments[model.name], self._instruments)
            for model in config.models
        ]
        self._models = ServedModels(models, config.names)
        self._readiness = Readiness()
        self._conversions = Conversions()
        self._turns = ReadingTurns(config.limits.max_bytes_in_flight)

    def announce(self) -> None:
        """Inform the monitor of this ingress from now on."""
        self._models.announce()

    async def health(self) -> Response:
        """Whether this process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether a model is ready, with `?all` whether all are; who may send requests is told the fleet.

        With `?degraded` it suffices that requests are answered.
        """
        asked, fleets = request.query_params, await self._models.fleets()
        tells = request.state.tenant is not None
        return self._readiness.answer(
            fleets, of_all="all" in asked, degraded="degraded" in asked, tells=tells
        )

    async def chat(self, request: Request) -> Response:
        """Answer a chat completion."""
        return await self._serve(request, ChatCompletionRequest, "chat")

    async def completions(self, request: Request) -> Response:
        """Answer a text completion."""
        return await self._serve(request, CompletionRequest, "completions")

    async def responses(self, request: Request) -> Response:
        """Answer a request of the responses API, by a chat completion; nothing is kept of it."""
        arrived_s = time.monotonic()
        asked, body = await self._read(request, responses.read, self._limits, request.state.tenant)
        model = self._models.named_by(body).config
        is_named = "request_id" in asked.model_fields_set  # as in vLLM, the answer has that very id
        response_id = asked.request_id if is_named else f"resp_{request.state.request_id}"
        wording = ResponseWording(asked, response_id, model, self._limits.max_logprobs)
        return await self._serve_body(request, body, "chat", arrived_s, wording)

    async def messages(self, request: Request) -> Response:
        """Answer a request of Anthropic's messages API, by a chat completion."""
        arrived_s = time.monotonic()
        asked, body = await self._read(request, messages.read, self._limits, request.state.tenant)
        wording = MessageWording(asked, self._models.named_by(body).config)
        return await self._serve_body(request, body, "chat", arrived_s, wording)

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens the prompt of a messages request has."""
        body = await self._read(request, messages.read_to_count, self._limits)
        return await self._convert(request, body, "tokenize", "messages", said_count)

    async def models(self) -> Any:
        """The models that are served, and their adapters."""
        return {"object": "list", "data": [card.model_dump() for card in self._model_cards.values()]}

    async def model_data(self, model: str) -> Any:
        """Describe one model."""
        if not model:
            raise http_errors.no_route(404, "Not Found")
        self._models.check(model)
        return await super().model_data(model)

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text, or of the prompt of a chat."""
        body, field = await self._read(request, _read_to_tokenize, self._limits)
        return await self._convert(request, body, "tokenize", field)

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        body = await self._read(request, reading.parse, DetokenizeRequest, self._limits)
        return await self._convert(request, body, "detokenize", "tokens")

    async def _convert(
        self,
        request: Request,
        body: Any,
        method: str,
        field: str,
        say: Callable[[Any], dict[str, Any]] = said_whole,
    ) -> Response:
        """Answer what needs a decode replica's tokenizer, and nothing of its engine or the router."""
        self._models.named_by(body)
        tokenizer = getattr(self._get_configured_serve_handle(body.model), method)
        info = RawRequestInfo({REQUEST_ID_HEADER: request.state.request_id})
        return await self._conversions.answer(
            partial(tokenizer.remote, body, info), field, request.state, say
        )

    async def _read(self, request: Request, read: Callable[..., _Read], *given: Any) -> _Read:
        """What `read` makes of a request's body and of what it is `given`, when it is the body's turn."""
        raw = await _taken(request)
        named = dict(request.state.headers).get(TIER_HEADER, "")
        party = Party(request.state.tenant.name, Tier(named if named in self._tiers.names else ""))
        return await self._turns.read(party, len(raw), partial(read, raw, *given))

    async def _serve(self, request: Request, model: type, method: str) -> Response:
        arrived_s = time.monotonic()
        body = await self._read(request, reading.read, model, self._limits, request.state.tenant)
        return await self._serve_body(request, body, method, arrived_s)

    async def _serve_body(
        self,
        request: Request,
        body: Any,
        method: str,
        arrived_s: float,
        wording: Wording | None = None,
    ) -> Response:
        """Answer a request that was read, in the words of its own API if it has others."""
        state = request.state
        served = self._models.named_by(body)
        state.model = body.model
        objective = resolve(state.headers, asks.service_tier(body), self._tiers, state.tenant.highest_tier)
        state.tier = objective.tier
        refuse_priority(state.headers)
        refuse_too_long(body, served.config.max_model_len)
        if "request_id" in body.model_fields_set:  # before the header, as in Ray Serve LLM
            _name(state, usable_id(body.request_id, "request_id"))
        body.request_id = state.request_id
        most_tokens = asks.output_tokens(body, served.config)
        job_id = JobId(f"{state.request_id}-{state.server_id}")
        of = partial(Asked.of, body, state, objective, job_id, arrived_s, most_tokens)
        asked = self._turns.counted(of)  # it goes through the whole prompt
        record = self._record(served, asked, state, method)
        context = await admit(served.placement, asked, record, shows_usage=served.config.shows_usage)
        pieces = generate(served.decode, asked, context, partial(self._send, method), record)
        keep_alive_s = self._limits.sse_keep_alive_s if body.stream else None
        headers = response_headers(objective, record)
        return await respond(pieces, record, headers, wording, keep_alive_s, body=body)

    def _record(
        self,
        served: ServedModel,
        asked: Asked,
        state: State,
        method: str,
    ) -> RequestRecord:
        """The account of a request, from its arrival on."""
        body = asked.body
        return RequestRecord(
            self._instruments,
            Identity(
                asked.placement.job_id,
                state.request_id,
                state.tenant.name,
                body.model,
                bool(body.stream),
                asked.placement.answers,
                asked.placement.only_decode,
            ),
            asked.placement.objective,
            asked.arrived_s,
            ended=served.placement.job_ended,
            tell=served.tell,
            span=TRACER.start_span(
                "ingress",
                tracing.here(dict(state.headers).get(TRACEPARENT, "")),
                SpanKind.SERVER,
                {"gen_ai.operation.name": _OPERATIONS[method], "gen_ai.provider.name": "slackserve"},
                start_time=wall_ns(asked.arrived_s),
            ),
        )

    def _send(self, method: str, body: Any, context: RequestContext) -> DeploymentResponseGenerator[Any]:
        """Call the decode tier of the model or adapter that a request names."""
        handle = self._get_configured_serve_handle(body.model)
        return getattr(handle, method).remote(body, _internal_info(context))


async def _taken(request: Request) -> bytes:
    """The body of a request, which would keep it until it is answered if asked for that.

    Raises:
        HTTPError: 400 when it is not said to be JSON, as in vLLM.
    """
    said = request.headers.get("content-type", "").partition(";")[0]
    if said.strip().lower() != "application/json":
        raise http_errors.not_said_to_be_json()
    return b"".join([piece async for piece in request.stream() if piece])  # one alone is not copied


def _read_to_tokenize(raw: bytes, limits: LimitsConfig) -> tuple[Any, str]:
    """The body of a request for tokens, and its field that has their text."""
    values = reading.values_of(raw, limits)
    if "messages" in values:
        return reading.read_chat_to_convert(values, limits), "messages"
    return reading.as_model(values, TokenizeCompletionRequest, limits), "prompt"


def _name(state: State, request_id: str) -> None:
    """Call a request from here on what its body calls it; the `x-request-id` of its answer stays as it is."""
    if request_id != state.request_id:
        logs.event(
            "request_named",
            request_id=request_id,
            server_id=state.server_id,
            x_request_id=state.request_id,
        )
    state.request_id = request_id


def _internal_info(context: RequestContext) -> RawRequestInfo:
    """A request's headers to the next tier: what the server says, and nothing that the client said."""
    return RawRequestInfo({CONTEXT_HEADER: context.encode(), REQUEST_ID_HEADER: context.request_id})
