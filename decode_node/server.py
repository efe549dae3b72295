"""The decode replica: takes a request through prefill elsewhere and decodes it here.

A shell around one vLLM engine. Owns the handover: the prompt is rendered here first, prefilled at the
replica that the router chose, and its KV blocks are pulled over NIXL. Whatever ends a request before that,
the blocks held for it on the prefill side are released.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.llm.deployment import PDDecodeServer
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest, ErrorResponse

from decode_node.handoff_probe import HandoffProbe
from decode_node.prefill_wait import NoPrefillReplicaError, PrefillWait
from decode_node.rendering import Rendered, render
from slo.monitoring import DecodeSeen, Role
from slo.reports import DecodeReported, ReplicaGone
from slo.request import CONTEXT_HEADER, ReplicaId, RequestContext
from telemetry import logs, monitor_client
from telemetry.background import Background
from telemetry.catalogue import LOCAL_PREFILLS
from telemetry.engine_tap import EngineTap
from telemetry.instruments import Instruments
from telemetry.monitor_client import MonitorClient, Participant
from telemetry.reporter import Reporter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ray.serve.handle import DeploymentHandle
    from ray.serve.llm import LLMConfig

    from slo.handoff import HandoffSample
    from slo.reports import Report

SERVICE_UNAVAILABLE = 503
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
    """

    prefill_replicas: int
    cores: tuple[str, ...] = ()
    is_monitored: bool = False


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
        self._instruments = Instruments(LOCAL_PREFILLS, *EngineTap.METRICS, *monitor_client.METRICS)
        self._tap = EngineTap("decode", self._instruments)
        self._tap.attach(self.engine)
        self._background = Background()
        self._prefill_wait = PrefillWait(self._is_prefill_up)
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
            handovers = await self._broadcast("prewarm_prefill", prefill_request)
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

    async def _broadcast(self, method: str, *args: Any) -> list[Any]:
        """What `method` returns on the running prefill replicas, without those where it fails."""
        try:
            results = await self._prefill_handle.broadcast(method, *args).results_async(
                return_exceptions=True
            )
        except DeploymentUnavailableError:
            return []
        return [result for result in results if result is not None and not isinstance(result, Exception)]

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
            async for chunk in self._hand_over(
                request, rendered, info, context.after(spent_s), is_chat=is_chat
            ):
                yield chunk
        finally:
            self._ongoing -= 1
            self._reporter.changed()

    async def _hand_over(
        self, request: Any, rendered: Rendered, info: Any, context: RequestContext, *, is_chat: bool
    ) -> AsyncGenerator[Any, None]:
        """Prefill elsewhere, decode here; release the prefill's blocks if decode never gets going."""
        decoding = False
        try:
            prefilled = await self._remote_prefill(request, rendered, info, context)
            if not _is_answer(prefilled):
                yield prefilled
                return
            decode_request = self._get_connector_backend().prepare_decode_request(
                request=request, peer=None, prefill_response=prefilled
            )
            async for chunk in await self._decode(decode_request, info, is_chat=is_chat):
                decoding = decoding or _is_answer(chunk)
                yield chunk
        finally:
            if not decoding:
                self._release_prefill(context)

    async def _remote_prefill(
        self, request: Any, rendered: Rendered, info: Any, context: RequestContext
    ) -> Any:
        """The prefill replica's response, with the address of the KV blocks, or its error."""
        prompt_only = CompletionRequest(
            model=request.model,
            prompt=rendered.token_ids,
            request_id=request.request_id,
            cache_salt=getattr(request, "cache_salt", None),
            ignore_eos=True,
        )
        prefill_request = self._get_connector_backend().prepare_prefill_request(
            request=prompt_only, peer=None
        )
        headers = {**info.headers, CONTEXT_HEADER: context.for_prefill().encode()}
        responses = self._prefill_handle.completions.remote(prefill_request, type(info)(headers=headers))
        try:
            return await self._prefill_wait.result(anext(aiter(responses)))
        except NoPrefillReplicaError as error:
            return ErrorResponse(
                error={"message": str(error), "type": "no_replica", "code": SERVICE_UNAVAILABLE}
            )

    async def _is_prefill_up(self) -> bool:
        return bool(await self._broadcast("is_up"))

    async def _decode(self, request: Any, info: Any, *, is_chat: bool) -> AsyncGenerator[Any, None]:
        stream: AsyncGenerator[Any, None] = await self._run_request(
            request,
            engine_method="chat" if is_chat else "completions",
            batch_output_stream=True,
            raw_request_info=info,
        )
        return stream

    def _release_prefill(self, context: RequestContext) -> None:
        """Have the prefill side drop the job; if that fails, the lease frees its blocks."""
        logs.event("prefill_released", request_id=context.request_id, job_id=context.job_id)
        self._background.run("release", self._send_release(context), job_id=context.job_id)

    async def _send_release(self, context: RequestContext) -> None:
        """Tell the prefill replica that has the job, or all of them when Serve chose it."""
        if context.prefill_replica is None:
            await self._broadcast("release", context.job_id)
        else:
            release = self._prefill_handle.options(stream=False).release
            await release.remote(context.job_id, pin=context.prefill_replica)

    async def _not_for_prefill(self, context: RequestContext) -> None:
        """Tell the router that the placed prefill will not be asked for."""
        await self._router.job_ended.remote(context.job_id)

    def _seen(self, _: tuple[Any, ...]) -> DecodeSeen:
        return DecodeSeen(self._replica_id, self._tap.kv_usage, self._ongoing)

    def _report(self) -> Report:
        if self.engine._engine_client.errored:  # noqa: SLF001 - no public way in
            return ReplicaGone(self._replica_id)
        tap = self._tap
        return DecodeReported(self._replica_id, tap.kv_usage, self._ongoing, tap.kv_tokens, tap.tpot_s)


def _is_answer(piece: Any) -> bool:
    """Whether a piece of an engine's answer is part of one: not an error, nor the end of a stream."""
    text = piece[0] if isinstance(piece, list) and piece else piece
    if isinstance(text, str):
        return text.startswith("data: {") and not text.startswith('data: {"error"')
    return getattr(piece, "error", None) is None
