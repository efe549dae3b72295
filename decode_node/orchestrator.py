"""One request's way through prefill elsewhere and decode here, and again when the prefill fails.

Stands between vLLM's OpenAI layer and its engine, so that the layer sends one answer to the client, whatever
happens below it. Owns the order of the steps and the retries: until its KV cache is here, a request whose
prefill replica fails is placed on another one, within `slo.replacement`'s rules; the first token that prefill
has sampled goes to the client at once, and is carried to every later attempt; a request that leaves the
engine for lack of memory is prefilled again with what has been generated, and one that it has dropped is
refused. How a prefill replica is called is `decode_node.prefill_tier`'s; noticing that it has failed is
`decode_node.prefill_health`'s; where the next attempt goes is `decode_node.requests.placing`'s; whose first
token is carried is `decode_node.carrying`'s.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import msgspec
from ray.serve.llm.openai_api_models import ErrorResponse
from vllm.exceptions import VLLMServerError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from decode_node.answers import REQUEST_FAILED, SERVER_ERRORS, error_in, error_response
from decode_node.carrying import BoundReason, deliver_carried, why_bound, why_resampled
from decode_node.local_prefills import LocalPrefills
from decode_node.prefill_health import PULLED_S, PrefillFailedError, PrefillWatch
from decode_node.rendering import LocalReason
from decode_node.requests.dropping import MAY_DROP_XARG, WHY_DROPPED, unless_dropped
from decode_node.requests.leaving import MAY_LEAVE_XARG, Generated, LeftError, has_left, may_leave
from decode_node.requests.placing import Placing
from decode_node.requests.progress import Progress
from decode_node.requests.underway import Call, RefusedError, Underway
from decode_node.spans import DECODE, HANDOFF, PREFILL
from sampling.carried import (
    CARRIED_XARG,
    KV_PARAMS,
    Adapter,
    Carried,
    Prefilled,
    PrefillRequest,
    first_token,
    nothing_but_kv,
)
from slo.decode.drop import may_be_dropped
from slo.errors import EvictionReason, RejectionReason
from slo.replacement import (
    FailureCause,
    ReplacementOutcome,
)
from slo.request import (
    ENGINE_DIED,
    JOB_XARG,
    TENANT_XARG,
    TIER_XARG,
    TPOT_XARG,
    JobId,
    ReplicaId,
    RequestContext,
)
from slo.tiers import Tier
from telemetry import logs
from telemetry.catalogue import FIRST_TOKENS_RESAMPLED, LOCAL_PREFILLS
from telemetry.instruments import Instruments

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from decode_node.prefill_tier import PrefillTier

Outputs: TypeAlias = "AsyncGenerator[RequestOutput, None]"

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
"""Code, type and message that a client gets."""


@dataclass(frozen=True, slots=True)
class Orchestrator:
    """Takes requests from prefill to decode.

    Attributes:
        replica: Who decodes.
        engine: Its started engine.
        tier: Who prefills.
        watch: Notices that a prefill replica has failed.
        placing: Says where a prefill goes that has to be done again.
        instruments: Where first tokens that are sampled again and prompts that are computed here are counted.
        local: Prompts that the engine computes itself; None when it computes none for lack of a prefill
            replica.
        leaves: Whether the prefill tier computes the KV of streams again that lose it here.
        droppable: Tiers whose streams the engine may end for lack of memory.
    """

    replica: ReplicaId
    engine: Any
    tier: PrefillTier
    watch: PrefillWatch
    placing: Placing
    instruments: Instruments
    local: LocalPrefills | None = None
    leaves: bool = False
    droppable: frozenset[Tier] = frozenset()
    _runs: dict[JobId, Underway] = field(default_factory=dict)

    @property
    def is_dead(self) -> bool:
        """Whether the engine has died."""
        return bool(self.engine._engine_client.errored)  # noqa: SLF001 - no public way in

    def stand_before(self, client: Any) -> None:
        """Take what vLLM's OpenAI layer asks the engine for, of the requests of `run`, through prefill."""
        straight = client.generate
        config = client.vllm_config

        def generate(prompt: Any, params: SamplingParams, request_id: str, **options: Any) -> Outputs:
            run = self._runs.get((params.extra_args or {}).get(JOB_XARG, ""))
            if run is None:
                return cast("Outputs", straight(prompt, params, request_id, **options))
            run.progress.bound = run.progress.bound or why_bound(config, params)
            if (lora := options.get("lora_request")) is not None:
                run.adapter = Adapter(lora.lora_name, lora.lora_path)
            run.may_leave = self.leaves and may_leave(config, params)
            resampled = why_resampled(config, params)
            if resampled is not None:
                self.instruments.count(FIRST_TOKENS_RESAMPLED, reason=resampled.value)

            def decode(params: SamplingParams) -> Outputs:
                if not run.may_drop:
                    return cast("Outputs", straight(prompt, params, request_id, **options))
                params.extra_args = {**(params.extra_args or {}), MAY_DROP_XARG: True}
                outputs = straight(prompt, params, request_id, **options)
                return unless_dropped(outputs, params.output_kind, lambda: _dropped(run))

            return self._generate(run, prompt, params, decode, carries=resampled is None)

        client.generate = generate
        deliver_carried(client.output_processor)

    def rendered(self, request: Any) -> Any:
        """What vLLM's renderer has made of a request of `run`; None for any other."""
        run = self._runs.get((request.vllm_xargs or {}).get(JOB_XARG, ""))
        return None if run is None else run.call.prompt

    async def run(self, call: Call, context: RequestContext) -> AsyncGenerator[Any, None]:
        """The pieces of the answer; `context` is the request's as of now.

        A request that brings tokens along goes on from them; their events are left out.
        """
        xargs = call.request.vllm_xargs or {}
        may_drop = may_be_dropped(context, self.droppable)
        run = Underway(call, context, budget_s=context.ttft_budget_s, may_drop=may_drop)
        if (brought := xargs.get(CARRIED_XARG)) is not None:
            run.carried = msgspec.convert(brought, Carried)
            run.progress.known = len(run.carried.token_ids)
        run.progress.bound = self._why_layer_binds(call)
        job_id = context.job_id
        self._runs[job_id] = run
        given = {**xargs, **_objective(context), JOB_XARG: job_id}
        request = call.request.model_copy(update={"vllm_xargs": given})
        try:
            async with aclosing(self._answer(request, run)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            if self._runs.get(job_id) is run:  # the same job may have come here once more
                del self._runs[job_id]

    async def run_here(self, call: Call, context: RequestContext, bound: str) -> AsyncGenerator[Any, None]:
        """The pieces of an answer whose prompt the engine computes itself, and why it stays here."""
        run = Underway(call, context, progress=Progress(bound=bound))
        given = {**(call.request.vllm_xargs or {}), **_objective(context)}
        request = call.request.model_copy(update={"vllm_xargs": given})
        async with aclosing(self._answer(request, run)) as pieces:
            async for piece in pieces:
                yield piece

    async def _answer(self, request: Any, run: Underway) -> AsyncGenerator[Any, None]:
        """What vLLM's OpenAI layer makes of `request`, which is the run's call's or has been made of it."""
        answer = self.engine.chat if run.call.is_chat else self.engine.completions
        try:
            async with aclosing(answer(request, run.call.info)) as pieces:
                async for piece in pieces:
                    if run.refusal is not None:
                        break  # the piece is vLLM's word for it
                    error = error_in(piece)
                    if error is not None and error.code >= SERVER_ERRORS:
                        run.refusal = self._failed(error.message)
                        break
                    told = run.progress.piece(piece) if isinstance(piece, str) else piece
                    if told is not None:
                        yield told
        except VLLMServerError as error:  # not streaming; a stream has it as an event
            run.refusal = run.refusal or self._failed(str(error))
        if run.refusal is not None:
            yield run.refusal

    def _failed(self, message: str) -> ErrorResponse:
        """That the engine has failed a request, and whether it lives on."""
        return error_response(500, ENGINE_DIED if self.is_dead else REQUEST_FAILED, message, self.replica)

    def _why_layer_binds(self, call: Call) -> BoundReason | None:
        """What vLLM's OpenAI layer keeps of a chat that is not carried; None for nothing."""
        if not call.is_chat:
            return None
        if self.engine._oai_serving_chat.parser_cls is not None:  # noqa: SLF001 - no public way in
            return BoundReason.PARSER
        return BoundReason.ECHO if call.request.echo else None

    async def _generate(
        self,
        run: Underway,
        prompt: Any,
        params: SamplingParams,
        decode: Callable[[SamplingParams], Outputs],
        *,
        carries: bool,
    ) -> Outputs:
        """The engine's outputs for one request, from the first token on.

        Args:
            run: The request.
            prompt: vLLM's `TokensInput`.
            params: As the client wants its answer sampled.
            decode: Runs the request on the engine here.
            carries: Whether decode goes on from the token that prefill samples.
        """
        while True:
            started_s = time.monotonic()
            samples = carries and run.carried is None
            try:
                is_local = run.context.local_prefill not in {"", LocalReason.LEFT}
                if is_local and self.local is not None:
                    answer = self._compute_here(run, params, decode, self.local)
                else:
                    prefilled = await self._prefill(run, _prefill_of(run, prompt, params, samples=samples))
                    if samples:
                        run.carried = Carried.first(prefilled.completion, params)
                    answer = self._decode(run, params, prefilled, decode)
                async with aclosing(answer) as outputs:
                    async for output in outputs:
                        if output.outputs[0].finish_reason == "abort":  # nobody asked for that
                            raise run.refuse(self._failed("the engine is ending"))
                        if params.output_kind is RequestOutputKind.DELTA:
                            run.progress.take(output.outputs[0])
                        yield output
            except LeftError as left:
                run.carried, run.has_left = left.carried, True
                run.context = await self.placing.left(run)
            except PrefillFailedError as failure:
                run.context = run.context.after(time.monotonic() - started_s)
                await self._go_on_after(run, failure)
            else:
                return

    async def _go_on_after(self, run: Underway, failure: PrefillFailedError) -> None:
        """Give the run another place after a failure, or refuse it.

        Raises:
            RefusedError: There is none for it.
        """
        outcome = await self.placing.again(run, failure)
        if outcome not in _NOT_REPLACED:
            return
        if not run.has_left:
            raise run.refuse(error_response(*_NOT_REPLACED[outcome])) from failure
        # Decode has had it before, and can do without prefill.
        run.context = replace(run.context, local_prefill=LocalReason.LEFT.value)

    async def _prefill(self, run: Underway, asked: PrefillRequest) -> Prefilled:
        """One attempt, on the replica that the run's context names; none for an answer that has ended."""
        context = run.context
        if run.carried is not None and run.carried.finish_reason is not None:
            return Prefilled(None, None, "")
        if context.local_prefill == LocalReason.LEFT:
            self.instruments.count(LOCAL_PREFILLS, reason=context.local_prefill)
            return Prefilled(None, None, "")
        try:
            asking = replace(context, traceparent=run.call.spans.phase(PREFILL))
            answer = self.tier.prefill(asked, run.call.info, asking)
            prefilled = await self.watch.result(answer, context.prefill_replica)
        except BaseException:
            self.tier.release(context)
            raise
        if isinstance(prefilled, ErrorResponse):
            if run.has_left:
                run.context = replace(context, local_prefill=LocalReason.LEFT.value)
                return await self._prefill(run, asked)
            raise run.refuse(prefilled)
        run.call.spans.phase(HANDOFF)
        run.context = replace(context, prefill_replica=ReplicaId(prefilled.replica))
        if run.cached_tokens is None:
            run.cached_tokens = prefilled.cached_tokens
        return cast("Prefilled", prefilled)

    async def _decode(
        self,
        run: Underway,
        params: SamplingParams,
        prefilled: Prefilled,
        decode: Callable[[SamplingParams], Outputs],
    ) -> Outputs:
        """What the engine here makes of a prefill; what has been carried is the first output of a stream."""
        params = params.clone()
        params.extra_args = {**(params.extra_args or {}), KV_PARAMS: prefilled.kv_transfer_params}
        if run.may_leave:
            params.extra_args[MAY_LEAVE_XARG] = True
        generated = Generated(run.carried, params)
        carried = run.carried
        needs_pull = prefilled.kv_transfer_params is not None
        is_stream = params.output_kind is not RequestOutputKind.FINAL_ONLY
        if needs_pull:
            _has_first_output(params)
        _carry(run, params)
        try:
            async with aclosing(decode(params)) as outputs:
                if carried is not None and not carried.is_sent and is_stream:
                    output = await anext(outputs)
                    run.call.spans.first_token()
                    output.num_cached_tokens = run.cached_tokens
                    yield output
                    if output.finished:
                        return
                output, has_pulled = await self._pulled(run, params, outputs, needs_pull=needs_pull)
                needs_pull = needs_pull and not has_pulled
                run.call.spans.phase(DECODE)
                if carried is None or not is_stream:
                    run.call.spans.first_token()
                async for one in _after(output, outputs):
                    has_news, left = generated.take(one)
                    one.num_cached_tokens = run.cached_tokens  # to the engine here, what it pulls is cached
                    if has_news and (is_stream or one.finished):
                        yield one
                    if left is not None:
                        raise left
        finally:
            if needs_pull:
                self.tier.release(run.context)

    async def _pulled(
        self, run: Underway, params: SamplingParams, outputs: Outputs, *, needs_pull: bool
    ) -> tuple[RequestOutput, bool]:
        """The first output of the engine's own, and whether it shows that the KV cache has come.

        Raises:
            PrefillFailedError: It has not.
        """
        replica, carried = run.context.prefill_replica, run.carried
        is_delta = params.output_kind is RequestOutputKind.DELTA
        known = 0 if carried is None or is_delta else len(carried.token_ids)
        while True:
            waits = anext(outputs)
            output = await (self.watch.result(waits, replica, PULLED_S) if needs_pull else waits)
            completion = output.outputs[0]
            has_pulled = len(completion.token_ids) > known or has_left(completion)
            if has_pulled or output.finished:
                break  # otherwise it is what has been carried
        if not has_pulled and completion.finish_reason == "error":
            # The connector could not pull, or a grammar does not compile, which vLLM reports alike.
            is_grammar = params.structured_outputs is not None
            cause = FailureCause.REQUEST_FAILED if is_grammar else FailureCause.PULL_FAILED
            raise PrefillFailedError(cause, replica)
        return output, has_pulled

    async def _compute_here(
        self,
        run: Underway,
        params: SamplingParams,
        decode: Callable[[SamplingParams], Outputs],
        local: LocalPrefills,
    ) -> Outputs:
        """What the engine here makes of a prompt that it computes itself, when that has its turn."""
        self.instruments.count(LOCAL_PREFILLS, reason=run.context.local_prefill)
        is_stream = params.output_kind is not RequestOutputKind.FINAL_ONLY
        params, carried = params.clone(), run.carried
        _has_first_output(params)
        _carry(run, params)
        is_short = run.context.local_prefill == LocalReason.CHEAPER_ON_DECODE
        async with local.turn(is_short=is_short) as computed:
            run.call.spans.phase(DECODE)
            async with aclosing(decode(params)) as outputs:
                brings = carried is not None and not carried.is_sent
                async for output in outputs:
                    if not brings:
                        computed()
                    brings = False
                    if is_stream or output.finished:
                        run.call.spans.first_token()
                        yield output


def _carry(run: Underway, params: SamplingParams) -> None:
    """Have the engine go on from what the run carries, which its client has then."""
    if run.carried is not None:
        run.carried.put_in(params)
        run.carried = msgspec.structs.replace(run.carried, is_sent=True)


def _has_first_output(params: SamplingParams) -> None:
    """Have the engine say at once that the KV has come or is computed, whatever the client wants to hear."""
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        params.output_kind = RequestOutputKind.CUMULATIVE
    params.stream_interval = None


async def _after(first: RequestOutput, others: Outputs) -> Outputs:
    yield first
    async for output in others:
        yield output


def _dropped(run: Underway) -> RefusedError:
    """Refuse a request that the engine has dropped."""
    logs.event("stream_dropped", request_id=run.context.request_id, job_id=run.context.job_id)
    return run.refuse(error_response(429, EvictionReason.DROPPED.value, WHY_DROPPED))


def _objective(context: RequestContext) -> dict[str, Any]:
    """What the engine's scheduler has to know of a request when memory or pace runs short."""
    given: dict[str, Any] = {TIER_XARG: context.tier, TENANT_XARG: context.tenant}
    return given if context.tpot_s is None else {**given, TPOT_XARG: context.tpot_s}


def _prefill_of(run: Underway, prompt: Any, params: SamplingParams, *, samples: bool) -> PrefillRequest:
    """What to ask the prefill tier for: the KV cache of all but the token that decode computes next."""
    token_ids = prompt["prompt_token_ids"]
    if run.carried is not None:
        token_ids = [*token_ids, *run.carried.token_ids[:-1]]
    how = first_token(params) if samples else nothing_but_kv()
    return PrefillRequest(token_ids, how, prompt.get("cache_salt"), run.adapter)
