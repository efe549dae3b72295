"""The decode replica: takes a request through prefill elsewhere and decodes it here.

A shell around one vLLM engine. The prompt is rendered here first, prefilled at the replica that the router
chose, and its KV blocks are pulled over NIXL. Owns the replica's start, its reports, and which requests it
prefills itself; the way through the two tiers is `decode_node.orchestrator`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.exceptions import TaskCancelledError
from ray.serve.llm.deployment import PDDecodeServer

from decode_node import rendering
from decode_node.answering import Answering, Arrived
from decode_node.answers import error_response
from decode_node.fair_places import FairPlaces
from decode_node.grammars.backends import backend_of
from decode_node.grammars.check import DEFAULT_LIMITS, GrammarCheck, GrammarLimits
from decode_node.handoff_probe import measure_handoff
from decode_node.handshakes import Handshakes
from decode_node.orchestrator import Orchestrator
from decode_node.prefill_health import PrefillWatch
from decode_node.prefill_tier import PrefillTier
from decode_node.rendering import BAD_REQUEST, chars_of, too_much_text
from decode_node.requests import engine_limits, openai_layer
from decode_node.requests.local_decode import LocalDecode
from decode_node.requests.local_prefills import LocalPrefills, turns_by_tier
from decode_node.requests.logprob_limit import MAX_LOGPROBS, LogprobLimit
from decode_node.requests.openai_layer import OpenAILayer
from decode_node.requests.placing import Placing
from decode_node.requests.remote_prefill import RemotePrefill
from decode_node.tokenizing import decoding, turns
from decode_node.tokenizing.conversions import conversions_apart
from engine_host.cores import bind_engine
from engine_host.engine import ReplicaEngine
from engine_host.places import Places
from engine_host.processes import unlink_shared_memory
from engine_host.watchdog import EngineWatchdog
from kv_transfer.side_channel import take_port
from slo.liveness import HUNG_AFTER_S
from slo.model_digest import UNTOLD, ModelDigest, is_same_model
from slo.monitor.messages import DecodeSeen, Role
from slo.predict.handoff import HandoffSample
from slo.protocol import OTHER_PROTOCOL, OtherProtocolError
from slo.replacement import NO_REPLACEMENTS, ReplacementRules
from slo.reports import DecodeReported, ReplicaGone, Report, who_is_up
from slo.request import ReplicaId, RequestContext
from slo.tiers import Tier, TierSet
from telemetry import logs, tracing
from telemetry.catalogue import FIRST_TOKENS_RESAMPLED, LOCAL_PREFILLS, REPLACEMENTS
from telemetry.engine_tap import EngineTap
from telemetry.instruments import Instruments
from telemetry.pressure import PRESSURE_METRICS
from telemetry.reporting import monitor_client
from telemetry.reporting.background import Background
from telemetry.reporting.draining import is_draining
from telemetry.reporting.monitor_client import MonitorClient, Participant
from telemetry.reporting.of_model import OfModel
from telemetry.reporting.reporter import Reporter
from telemetry.tracing import TracingOptions

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from ray.serve.llm import LLMConfig
    from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
    from vllm.entrypoints.serve.tokenize.protocol import (
        DetokenizeRequest,
        TokenizeChatRequest,
        TokenizeCompletionRequest,
    )


_PROMPT_PASS_S = 60.0
"""How long a pass with a part of a prompt may take is not known here; an engine hangs after five times this,
which is vLLM's own limit for a pass."""
_STEPS = 4.0
"""An engine that decodes hangs after five times the time of so many of its steps."""
_STEPS_LEFT = 2
"""After so many more steps none has a prompt that nobody wants any more: the one that runs may have it, and
one may have ended without being heard of yet."""


@dataclass(frozen=True, slots=True)
class DecodeNodeConfig:
    """What a decode replica needs beyond its engine.

    Attributes:
        prefill_replicas: How many to shake hands with before reporting ready.
        tiers: Rank of each tier.
        cores: VLLM_CPU_OMP_THREADS_BIND by the replica's place on its node; empty leaves it alone.
        is_monitored: Whether the cluster has an SLO monitor.
        replacement: When a failed prefill is not placed again.
        router_timeout_s: Longest wait for the router's answer on a new place.
        tracing: Where spans go; None for nowhere.
        max_ongoing_requests: How many it has at once; others wait. Serve's own limit is out of the way: a
            replica that is full would not say that it is there.
        local_prefill: Whether it computes prompts itself while there is no prefill replica.
        at_once: How many prompts it computes at once itself, those that only decode can compute among them.
        max_prompts: How many it may have to compute; then only those of whom has less than their part.
        max_wait_s: Longest wait of a request for the turn of one that only decode can compute.
        grammars: What compiling a grammar may take.
        max_logprobs: Log-probabilities that one request may ask for.
        leaves: Whether the prefill tier computes the KV of streams again that lose it here.
        droppable: Tiers whose streams may be ended for lack of memory.
        hung_after_s: Seconds without progress before which its engine does not count as hung.
        digest: Of the model that it serves.
    """

    prefill_replicas: int
    tiers: TierSet
    cores: tuple[str, ...] = ()
    is_monitored: bool = False
    replacement: ReplacementRules = NO_REPLACEMENTS
    router_timeout_s: float = 0.05
    tracing: TracingOptions | None = None
    max_ongoing_requests: int = 4096
    local_prefill: bool = False
    at_once: int = 2
    max_prompts: int = 64
    max_wait_s: float = 120.0
    grammars: GrammarLimits = DEFAULT_LIMITS
    max_logprobs: int = MAX_LOGPROBS
    leaves: bool = False
    droppable: frozenset[Tier] = frozenset()
    hung_after_s: float = HUNG_AFTER_S
    digest: ModelDigest = UNTOLD


class DecodeServer(PDDecodeServer):  # type: ignore[misc] # Ray ships no types for it
    """Orchestrates prefill and decode of its requests."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self,
        llm_config: LLMConfig,
        *,
        node: DecodeNodeConfig,
        router: DeploymentHandle,
        prefill_server: DeploymentHandle,
    ) -> None:
        context = serve.get_replica_context()
        tracing.start(node.tracing, "decode")  # before vLLM, which would export by itself
        bind_engine(node.cores, take_port(llm_config))
        with logs.kept():
            await super().__init__(llm_config, prefill_server=prefill_server, engine_cls=ReplicaEngine)
        client = self.engine._engine_client  # noqa: SLF001 - no public way in
        unlink_shared_memory(client)
        self._replica_id = ReplicaId(context.replica_id.unique_id)
        self._router = OfModel(router, llm_config.model_id)
        self._instruments = Instruments(
            FIRST_TOKENS_RESAMPLED,
            LOCAL_PREFILLS,
            REPLACEMENTS,
            *EngineTap.METRICS,
            *PRESSURE_METRICS,
            *monitor_client.METRICS,
        )
        self._tap = EngineTap("decode", self._instruments)
        self._tap.attach(self.engine)
        self._background = Background()
        self._tier = PrefillTier(self._prefill_handle, self._background)
        by_tier = turns_by_tier(client.vllm_config)
        self._local = LocalPrefills(
            node.at_once, node.max_prompts, steps=lambda: self._tap.steps, by_tier=by_tier
        )
        self._short = LocalPrefills(node.at_once, by_tier=by_tier)
        self._handshakes = Handshakes(
            self.engine, self._tier, llm_config.model_id, self._get_connector_backend()
        )
        self._layer = OpenAILayer(self._replica_id, self.engine)
        watch = PrefillWatch(self._tier.ask)
        self._orchestrator = Orchestrator(
            self._layer,
            RemotePrefill(self._tier, watch, self._instruments),
            LocalDecode(
                self._tier,
                watch,
                self._instruments,
                self._local,
                self._short,
                node.local_prefill,
                self._handshakes.pulled,
            ),
            Placing(
                self._replica_id,
                self._router,
                node.router_timeout_s,
                node.replacement,
                self._instruments,
                may_compute_here=node.local_prefill,
            ),
            self._instruments,
            node.leaves,
            node.droppable,
            node.digest,
        )
        decoding.stand_before(client.renderer, client.renderer._executor)  # noqa: SLF001 - no public way in
        at_once = client.model_config.renderer_num_workers
        turns.stand_before(client.renderer, FairPlaces(at_once, node.tiers))
        # Ray 2.60 looks for vLLM's service under the name that it had before 0.29.
        conversions = conversions_apart(self.engine._app_state.serving_tokenization)  # noqa: SLF001
        self.engine._oai_serving_tokenization = conversions  # noqa: SLF001
        self._orchestrator.stand_before(client)
        engine_limits.stand_before(client)
        rendering.stand_before(self.engine, self._orchestrator.rendered)
        openai_layer.log_no_refusals()
        backend = backend_of(
            client.vllm_config.structured_outputs_config,
            client.get_tokenizer(),
            client.model_config.get_vocab_size(),
        )
        self._grammars = GrammarCheck(node.grammars, backend)
        self._ongoing = 0
        self._places = Places(node.max_ongoing_requests, node.tiers)
        self._computes_prompts = node.local_prefill
        await self._handshakes.begin(node.prefill_replicas, needed=not node.local_prefill)
        self._max_model_len = client.model_config.max_model_len
        self._answering = Answering(
            self._layer,
            self._orchestrator,
            self._local,
            self._grammars,
            self._router,
            self._background,
            self._instruments,
            self._max_model_len,
            node.max_wait_s,
            LogprobLimit.of(node.max_logprobs, client.model_config),
            is_alone=lambda: self._computes_prompts and self._handshakes.failure is not None,
        )
        self._grammars.stand_before(client, self._orchestrator.refuse, self._answering.awaits_verdict)
        self._watchdog = EngineWatchdog(client, lambda: self._tap.steps, self._pass_s, node.hung_after_s)
        self._reporter = Reporter(self._report, self._router.report.remote)
        if node.is_monitored:
            participant = Participant(self._replica_id, Role.DECODE, self._seen, model=llm_config.model_id)
            self._monitor = MonitorClient(participant, self._instruments)
            self._monitor.start()
        self._watchdog.start()
        logs.event("decode_ready", max_model_len=self._max_model_len)

    async def chat(
        self, request: ChatCompletionRequest, raw_request_info: Any = None
    ) -> AsyncGenerator[Any, None]:
        """Answer a chat completion."""
        return self._in_turn(request, raw_request_info, is_chat=True)

    async def completions(
        self, request: CompletionRequest, raw_request_info: Any = None
    ) -> AsyncGenerator[Any, None]:
        """Answer a text completion."""
        return self._in_turn(request, raw_request_info, is_chat=False)

    async def tokenize(
        self, request: TokenizeCompletionRequest | TokenizeChatRequest, raw_request_info: Any = None
    ) -> AsyncGenerator[Any, None]:
        """The tokens of a text or of a chat's prompt, which is no longer than one that may be a prompt."""
        tokenizer = self.engine._engine_client.get_tokenizer()  # noqa: SLF001 - no public way in
        chars, most = chars_of(request), tokenizer.max_chars_per_token
        named = "messages" if hasattr(request, "messages") else "prompt"
        refusal = too_much_text(chars, most, self._max_model_len, named)
        if refusal is not None:
            return _only(refusal)
        return await super().tokenize(request, raw_request_info)  # type: ignore[no-any-return]

    async def detokenize(
        self, request: DetokenizeRequest, raw_request_info: Any = None
    ) -> AsyncGenerator[Any, None]:
        """The text of tokens, of which there are no more than a prompt may have."""
        if (found := len(request.tokens)) > self._max_model_len:
            message = (
                f"tokens has {found} token ids; this model takes at most {self._max_model_len}. "
                f"Send them in several requests"
            )
            return _only(error_response(BAD_REQUEST, "invalid_request_error", message, "tokens"))
        return await super().detokenize(request, raw_request_info)  # type: ignore[no-any-return]

    async def is_up(self, pin: ReplicaId | None = None) -> ReplicaId | None:
        """Who answers, for those who wait for `pin`; see `slo.reports.who_is_up`.

        `router.serve.replica_pinning` reads `pin`, too, on the caller's side.
        """
        return who_is_up(self._replica_id, pin, is_dead=self._layer.is_dead)

    async def check_health(self) -> None:
        """Serve asks for it, and replaces a replica whose engine is dead, or that is of no use.

        Raises:
            NothingPulledError: It has nothing to decode.
        """
        await super().check_health()
        if not self._computes_prompts and (failure := self._handshakes.failure) is not None:
            raise failure.with_traceback(None)  # which would grow each time

    async def measure_handoff(self, tokens: int) -> HandoffSample:
        """See `decode_node.handoff_probe.measure_handoff`."""
        model, backend = self._llm_config.model_id, self._get_connector_backend()
        return await measure_handoff(self.engine, model, self._prefill_handle, backend, tokens)

    async def _start_engine(self) -> None:
        """Start it, without the report of what is used, for which Ray starts an actor."""
        await self.engine.start()

    async def _in_turn(self, request: Any, info: Any, *, is_chat: bool) -> AsyncGenerator[Any, None]:
        """The answer, once one of the replica's places is free."""
        arrived_s = time.monotonic()
        try:
            context = RequestContext.from_headers(info.headers) if info is not None else None
        except OtherProtocolError as error:
            yield error_response(503, OTHER_PROTOCOL, str(error))
            return
        if context is None:
            msg = "a decode replica serves requests from its own ingress only; they carry a context"
            raise RuntimeError(msg)
        if not is_same_model(context.digest, self._orchestrator.digest):
            yield self._layer.other_model("the answer was begun by another model of that name")
            return
        arrived = Arrived(request, info, context, arrived_s, is_chat)
        try:
            async with aclosing(self._counted(arrived)) as pieces:
                async for piece in pieces:
                    yield piece
        except (asyncio.CancelledError, GeneratorExit, TaskCancelledError):  # the client is gone
            self._background.run("telling_router", self._tell_generated(arrived), job_id=context.job_id)
            raise

    async def _counted(self, arrived: Arrived) -> AsyncGenerator[Any, None]:
        """The answer, which counts here from its arrival, so also while it waits for a place."""
        self._ongoing += 1
        self._reporter.changed()
        context = arrived.context
        try:
            with self._orchestrator.expects(context):
                answer = self._answering.answer(arrived)
                async with self._places.one(context.tier), aclosing(answer) as pieces:
                    async for piece in pieces:
                        yield piece
        finally:
            self._ongoing -= 1
            self._reporter.changed()

    async def _tell_generated(self, arrived: Arrived) -> None:
        """Tell the router how much of an answer there was that nobody wants any more."""
        await self._router.generated.remote(arrived.context.job_id, arrived.amount.tokens)

    def _pass_s(self) -> float:
        """Predicted seconds of a pass: that of four steps, unless a prompt may be among what it computes."""
        is_unheard = self._tap.steps < self._local.given_up_after + _STEPS_LEFT
        if self._local.computing or is_unheard or self._tap.recomputes:
            return _PROMPT_PASS_S
        return _STEPS * (self._tap.step_s or 0.0)

    def _seen(self, _: tuple[Any, ...]) -> DecodeSeen:
        return DecodeSeen(self._ongoing)

    async def __del__(self) -> None:
        """Serve's last call, with no request left."""
        if hasattr(self, "_reporter"):
            await self._reporter.end(ReplicaGone(self._replica_id))
            await self._grammars.close()
        await super().__del__()

    def _report(self) -> Report:
        if self._layer.is_dead:
            return ReplicaGone(self._replica_id, (Role.DECODE, self._watchdog.engine_end))
        tap = self._tap
        tap.show()
        return DecodeReported(
            self._replica_id,
            tap.kv_usage,
            self._ongoing,
            tap.kv_tokens,
            tap.newest_tpot_s(),
            draining=is_draining(),
            local_prefills=self._local.outstanding + self._short.outstanding,
            local_prompt_s=self._local.prompt_s,
            # An engine without requests takes no steps, and so says nothing any more.
            load=tap.load if tap.load is None or self._ongoing else replace(tap.load, streams={}),
            awaited=self._orchestrator.awaited(),
            caches_prefixes=tap.caches_prefixes,
            digest=self._orchestrator.digest,
            has_pulled=self._handshakes.has_pulled,
            waiting=tap.waiting,
        )


async def _only(piece: Any) -> AsyncGenerator[Any, None]:
    yield piece
