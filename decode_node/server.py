"""The decode replica: takes a request through prefill elsewhere and decodes it here.

A shell around one vLLM engine. Owns the handover: the prompt is rendered here first, prefilled at the
replica that the router chose, and its KV blocks are pulled over NIXL. The order of that, and what happens
when the prefill is lost, is in `decode_node.handover`.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.exceptions import TaskCancelledError
from ray.serve.llm.deployment import PDDecodeServer
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest, ErrorResponse
from vllm.exceptions import GenerationError

from decode_node.handoff_probe import HandoffProbe
from decode_node.handover import GivenUpError, Handover, Steps
from decode_node.prefill_health import PrefillWatch
from decode_node.prefill_tier import PrefillTier
from decode_node.rendering import Rendered, render
from slo.errors import EvictionReason, RejectionReason
from slo.monitor.messages import DecodeSeen, Role
from slo.replacement import NO_REPLACEMENTS, ReplacementOutcome, ReplacementRules
from slo.reports import DecodeReported, ReplicaGone
from slo.request import ReplicaId, RequestContext
from telemetry import logs
from telemetry.catalogue import LOCAL_PREFILLS, REPLACEMENTS
from telemetry.engine_tap import EngineTap
from telemetry.instruments import Instruments
from telemetry.reporting import monitor_client
from telemetry.reporting.background import Background
from telemetry.reporting.draining import is_draining
from telemetry.reporting.monitor_client import MonitorClient, Participant
from telemetry.reporting.reporter import Reporter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ray.serve.handle import DeploymentHandle
    from ray.serve.llm import LLMConfig

    from slo.predict.handoff import HandoffSample
    from slo.replacement import ReplacementDecision, ReplacementRequested
    from slo.reports import Report

_GIVEN_UP = {
    ReplacementOutcome.LIMIT: (503, "prefill_failed"),
    ReplacementOutcome.DEADLINE: (429, EvictionReason.DEADLINE_PASSED.value),
    ReplacementOutcome.NO_REPLICA: (503, RejectionReason.NO_REPLICA.value),
}
"""Status and code that a client gets."""
_FIRST_HANDSHAKE_TIMEOUT_S = 600.0
_OTHER_HANDSHAKES_TIMEOUT_S = 60.0
_HANDSHAKE_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class DecodeNodeConfig:
    """What a decode replica needs beyond its engine.

    Attributes:
        prefill_replicas: How many to shake hands with before reporting ready.
        cores: CPU cores by replica rank on its node, as VLLM_CPU_OMP_THREADS_BIND; empty leaves it alone.
        is_monitored: Whether the cluster has an SLO monitor.
        replacement: When a lost prefill is not placed again.
        router_timeout_s: Longest wait for the router's word on a new place.
    """

    prefill_replicas: int
    cores: tuple[str, ...] = ()
    is_monitored: bool = False
    replacement: ReplacementRules = NO_REPLACEMENTS
    router_timeout_s: float = 0.05


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
        if node.cores:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = node.cores[context.rank.local_rank % len(node.cores)]
        await super().__init__(llm_config, prefill_server=prefill_server)
        self._replica_id = ReplicaId(context.replica_id.unique_id)
        self._instruments = Instruments(
            LOCAL_PREFILLS, REPLACEMENTS, *EngineTap.METRICS, *monitor_client.METRICS
        )
        self._tap = EngineTap("decode", self._instruments)
        self._tap.attach(self.engine)
        self._background = Background()
        self._tier = PrefillTier(self._prefill_handle, self._background)
        self._handover = Handover(
            self._replica_id, node.replacement, PrefillWatch(self._tier.ask), self._instruments
        )
        self._router_timeout_s = node.router_timeout_s
        self._ongoing = 0
        self._router = router
        await self._shake_hands(node.prefill_replicas)
        self._max_model_len = self.engine._engine_client.model_config.max_model_len  # noqa: SLF001
        self._reporter = Reporter(self._report, router.report.remote)
        if node.is_monitored:
            participant = Participant(self._replica_id, Role.DECODE, self._seen)
            self._monitor = MonitorClient(participant, self._instruments)
            self._monitor.start()
        logs.event("decode_ready", max_model_len=self._max_model_len)

    async def chat(
        self, request: ChatCompletionRequest, raw_request_info: Any = None
    ) -> AsyncGenerator[Any, None]:
        """Answer a chat completion."""
        return self._serve(request, raw_request_info, is_chat=True)

    async def completions(
        self, request: CompletionRequest, raw_request_info: Any = None
    ) -> AsyncGenerator[Any, None]:
        """Answer a text completion."""
        return self._serve(request, raw_request_info, is_chat=False)

    async def measure_handoff(self, tokens: int) -> HandoffSample:
        """See `HandoffProbe.measure`."""
        backend = self._get_connector_backend()
        probe = HandoffProbe(self.engine, self._llm_config.model_id, self._prefill_handle, backend)
        return await probe.measure(tokens)

    async def _shake_hands(self, expected: int) -> None:
        """Decode one token prefilled by each prefill replica, so that NIXL's handshakes are done.

        Goes on without those that are not up in time: a decode replica that is replaced while a prefill
        replica is down must not wait for it. Their first request shakes hands then.
        """
        deadline_s = time.monotonic() + _FIRST_HANDSHAKE_TIMEOUT_S
        backend = self._get_connector_backend()
        dummy = CompletionRequest(model=self._llm_config.model_id, prompt=" x", max_tokens=1)
        prefill_request = backend.prepare_prefill_request(request=dummy, peer=None)
        while True:
            handovers = await self._tier.broadcast("prewarm_prefill", prefill_request)
            if handovers:
                deadline_s = min(deadline_s, time.monotonic() + _OTHER_HANDSHAKES_TIMEOUT_S)
            for params in handovers:
                request = dummy.model_copy(deep=True)
                request.kv_transfer_params = params
                async for _ in self.engine.completions(request, None):
                    pass
            if len(handovers) >= expected or time.monotonic() > deadline_s:
                logs.event("handshakes_done", replicas=len(handovers), expected=expected)
                return
            await asyncio.sleep(_HANDSHAKE_RETRY_S)

    async def _serve(self, request: Any, info: Any, *, is_chat: bool) -> AsyncGenerator[Any, None]:
        arrived_s = time.monotonic()
        context = RequestContext.from_headers(info.headers) if info is not None else None
        if context is None:
            msg = "a decode replica serves requests from its own ingress only; they carry a context"
            raise RuntimeError(msg)
        self._ongoing += 1
        self._reporter.changed()
        try:
            rendered = await render(self.engine, request, is_chat=is_chat, max_model_len=self._max_model_len)
            if not isinstance(rendered, Rendered):
                yield rendered
                return
            if rendered.local is not None:
                self._instruments.count(LOCAL_PREFILLS, reason=rendered.local.value)
                self._background.run("telling_router", self._not_for_prefill(context), job_id=context.job_id)
                async for chunk in await self._decode(request, info, is_chat=is_chat):
                    yield chunk
                return
            spent_s = time.monotonic() - arrived_s
            logs.event(
                "request_rendered",
                request_id=context.request_id,
                job_id=context.job_id,
                tokens=len(rendered.token_ids),
                seconds=spent_s,
            )
            steps = self._steps(request, rendered, info, is_chat=is_chat)
            chunks = self._handover.run(steps, context.after(spent_s), len(rendered.token_ids))
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
        except GivenUpError as error:
            yield _error(*_GIVEN_UP[error.outcome], str(error))
        finally:
            self._ongoing -= 1
            self._reporter.changed()

    def _steps(self, request: Any, rendered: Rendered, info: Any, *, is_chat: bool) -> Steps:
        """What `request` goes through; none of it changes the request itself."""
        backend = self._get_connector_backend()

        async def prefill(context: RequestContext) -> tuple[Any, ReplicaId | None]:
            prompt_only = CompletionRequest(
                model=request.model,
                prompt=rendered.token_ids,
                request_id=request.request_id,
                cache_salt=getattr(request, "cache_salt", None),
                ignore_eos=True,
            )
            prefill_request = backend.prepare_prefill_request(request=prompt_only, peer=None)
            return await self._tier.prefill(prefill_request, info, context)

        async def decode(prefilled: Any) -> AsyncGenerator[Any, None]:
            prepared = backend.prepare_decode_request(request=request, peer=None, prefill_response=prefilled)
            try:
                async for piece in await self._decode(prepared, info, is_chat=is_chat):
                    yield piece
            except GenerationError as error:  # not streaming; a stream has it as an event
                yield _error(500, "engine_error", str(error))

        return Steps(prefill, decode, self._is_dead, self._place_again, self._tier.release)

    async def _decode(self, request: Any, info: Any, *, is_chat: bool) -> AsyncGenerator[Any, None]:
        stream: AsyncGenerator[Any, None] = await self._run_request(
            request,
            engine_method="chat" if is_chat else "completions",
            batch_output_stream=True,
            raw_request_info=info,
        )
        return stream

    async def _place_again(self, request: ReplacementRequested) -> ReplacementDecision | None:
        """The router's word; None when it gives none in time."""
        try:
            return await asyncio.wait_for(self._router.replace.remote(request), self._router_timeout_s)
        except TaskCancelledError:  # the client is gone
            raise
        except Exception as error:  # noqa: BLE001 - whatever ails the router, the request goes on
            logs.event("replacement_without_router", job_id=request.job_id, error=repr(error)[:300])
            return None

    async def _not_for_prefill(self, context: RequestContext) -> None:
        """Tell the router that the placed prefill will not be asked for."""
        await self._router.job_ended.remote(context.job_id)

    def _seen(self, _: tuple[Any, ...]) -> DecodeSeen:
        return DecodeSeen(self._replica_id, self._tap.kv_usage, self._ongoing)

    def _is_dead(self) -> bool:
        return bool(self.engine._engine_client.errored)  # noqa: SLF001 - no public way in

    async def __del__(self) -> None:
        """Serve's last call, with no request left."""
        if hasattr(self, "_reporter"):
            await self._reporter.end(ReplicaGone(self._replica_id))
        await super().__del__()

    def _report(self) -> Report:
        if self._is_dead():
            return ReplicaGone(self._replica_id)
        tap = self._tap
        return DecodeReported(
            self._replica_id,
            tap.kv_usage,
            self._ongoing,
            tap.kv_tokens,
            tap.tpot_s,
            draining=is_draining(),
        )


def _error(code: int, kind: str, message: str) -> ErrorResponse:
    return ErrorResponse(error={"message": message, "type": kind, "code": code})
