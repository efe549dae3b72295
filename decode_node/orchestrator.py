"""One request's way through prefill elsewhere and decode here, and again when the prefill fails.

Stands between vLLM's OpenAI layer and its engine, so that the layer sends one answer to the client, whatever
happens below it. Owns the order of the steps and the retries: until its KV cache is here, a request whose
prefill replica fails is placed on another one, within `slo.replacement`'s rules; the first token that prefill
has sampled goes to the client at once, and is carried to every later attempt; a request that leaves the
engine for lack of memory is prefilled again with what has been generated, and one that it has dropped is
refused. The two halves of an attempt are `decode_node.requests.remote_prefill`'s and
`decode_node.requests.local_decode`'s; where the next one goes is `decode_node.requests.placing`'s; whose
first token is carried is `decode_node.carrying`'s.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from vllm.sampling_params import RequestOutputKind, SamplingParams

from decode_node.answers import error_response
from decode_node.carrying import ResampledReason, deliver_carried, why_bound, why_resampled
from decode_node.grammars.bounded import TOO_SLOW
from decode_node.prefill_health import PrefillFailedError
from decode_node.rendering import LocalReason, is_search
from decode_node.requests.detokenizing import bound_detokenizers
from decode_node.requests.dropping import MAY_DROP_XARG, WHY_DROPPED, unless_dropped
from decode_node.requests.leaving import LeftError, ended_with, may_leave
from decode_node.requests.local_decode import Decode, LocalDecode, Outputs
from decode_node.requests.only_here import IN_A_SEARCH, Generate, OnlyHere
from decode_node.requests.openai_layer import OpenAILayer
from decode_node.requests.placing import Placing
from decode_node.requests.progress import Progress
from decode_node.requests.refusals import GRAMMAR_TOO_SLOW, NOTHING_ALLOWED, not_replaced
from decode_node.requests.remote_prefill import RemotePrefill
from decode_node.requests.underway import Call, RefusedError, Underway
from sampling.carried import CARRIED_XARG, Adapter, Carried, draws_of
from slo.decode.drop import may_be_dropped
from slo.errors import EvictionReason
from slo.model_digest import UNTOLD, ModelDigest
from slo.reports import AwaitedKv
from slo.request import (
    DECODE_SINCE_XARG,
    FIRST_DUE_XARG,
    JOB_XARG,
    TENANT_XARG,
    TIER_XARG,
    TPOT_XARG,
    JobId,
    RequestContext,
)
from slo.tiers import Tier
from telemetry import logs
from telemetry.catalogue import FIRST_TOKENS_RESAMPLED
from telemetry.instruments import Instruments

if TYPE_CHECKING:
    from ray.serve.llm.openai_api_models import ErrorResponse
    from vllm.config import VllmConfig

_HERE_XARG: Final = "slackserve_here"
"""The name of a request whose prompt the engine computes itself."""


@dataclass(slots=True, eq=False)
class Orchestrator:
    """Takes requests from prefill to decode.

    Attributes:
        layer: Makes the answers.
        prefilling: One half of an attempt, elsewhere.
        decoding: The other half, here.
        placing: Says where a prefill goes that has to be done again.
        instruments: Where first tokens that are sampled again are counted.
        leaves: Whether the prefill tier computes the KV of streams again that lose it here.
        droppable: Tiers whose streams the engine may end for lack of memory.
        digest: Of the model that is served here.
    """

    layer: OpenAILayer
    prefilling: RemotePrefill
    decoding: LocalDecode
    placing: Placing
    instruments: Instruments
    leaves: bool = False
    droppable: frozenset[Tier] = frozenset()
    digest: ModelDigest = UNTOLD
    _runs: dict[JobId, Underway] = field(default_factory=dict)
    _here: dict[JobId, OnlyHere] = field(default_factory=dict)
    _expected: dict[JobId, AwaitedKv] = field(default_factory=dict)

    def stand_before(self, client: Any) -> None:
        """Take what vLLM's OpenAI layer asks the engine for, of the requests of `run`, through prefill.

        What it asks for those of `run_here` has its turn.
        """
        straight = client.generate

        def generate(prompt: Any, params: SamplingParams, request_id: str, **options: Any) -> Outputs:
            def here(params: SamplingParams, name: str) -> Outputs:
                return cast("Outputs", straight(prompt, params, name, **options))

            given = params.extra_args or {}
            if (run := self._runs.get(given.get(JOB_XARG, ""))) is not None:
                if (lora := options.get("lora_request")) is not None:
                    run.adapter = Adapter(lora.lora_name, lora.lora_path)
                return self._through_prefill(
                    run, client, prompt, params, lambda given: here(given, request_id)
                )
            if (only := self._here.get(given.get(_HERE_XARG, ""))) is not None:
                return only.generate(prompt, params, request_id, self._unaborted(only, here))
            if (search := IN_A_SEARCH.get()) is not None:
                return search.in_a_search(prompt, params, request_id, self._unaborted(search, here))
            return here(params, request_id)

        client.generate = generate
        bound_detokenizers(client.output_processor)
        deliver_carried(client.output_processor)

    def _through_prefill(
        self, run: Underway, client: Any, prompt: Any, params: SamplingParams, here: Decode
    ) -> Outputs:
        """What the engine here, called with `here`, makes of a request after a prefill."""
        config: VllmConfig = client.vllm_config
        run.progress.bound = run.progress.bound or why_bound(config, params)
        run.may_leave = self.leaves and may_leave(config, params)
        if run.due_s is not None and (left_s := run.context.ttft_budget_s) is not None:
            # What it must conform to has been checked since it was rendered.
            run.context = run.context.after(left_s - (run.due_s - time.monotonic()))

        def decode(params: SamplingParams) -> Outputs:
            if run.decode_since_s is None:
                run.decode_since_s = time.monotonic()
            given: dict[str, Any] = {DECODE_SINCE_XARG: run.decode_since_s}
            if run.carried is None and run.due_s is not None:
                given[FIRST_DUE_XARG] = run.due_s
            if run.may_drop:
                given[MAY_DROP_XARG] = True
            params.extra_args = {**(params.extra_args or {}), **given}
            outputs = here(params)
            if params.output_kind is not RequestOutputKind.DELTA:  # what is new is counted as it goes on
                outputs = run.call.amount.counted(outputs, is_delta=False)
            if not run.may_drop:
                return outputs
            return unless_dropped(outputs, params.output_kind, lambda: _dropped(run))

        resampled, draws = why_resampled(config, params), draws_of(config)
        return self._generate(run, client, prompt, params, decode, resampled=resampled, draws=draws)

    def rendered(self, request: Any) -> Any:
        """What vLLM's renderer has made of a request of `run` or `run_here`; None for any other.

        An image that is rendered twice is lost: vLLM gives its data away once, and its hash from then on.
        """
        run = self._underway(request.vllm_xargs)
        return None if run is None else run.call.prompt

    def refuse(self, params: SamplingParams, response: ErrorResponse) -> Exception:
        """Answer the request of `run` or `run_here` that has these parameters so; what to raise for vLLM."""
        run = self._underway(params.extra_args)
        return RefusedError(response.error.message) if run is None else run.refuse(response)

    def _underway(self, xargs: Mapping[str, Any] | None) -> Underway | None:
        given = xargs or {}
        run = self._runs.get(given.get(JOB_XARG, ""))
        if run is None and (here := self._here.get(given.get(_HERE_XARG, ""))) is not None:
            return here.run
        return run

    def awaited(self) -> tuple[AwaitedKv, ...]:
        """Its requests whose KV cache the engine has not got yet, also those whose prefill still waits."""
        here = [each.run for each in self._here.values() if each.run is not None]
        runs = [run.awaited for run in (*self._runs.values(), *here) if not run.has_kv]
        return (*self._expected.values(), *runs)

    @contextmanager
    def expects(self, context: RequestContext) -> Iterator[None]:
        """Count a request as awaited that has come, until `run` or `run_here` has it."""
        expected = self._expected[context.job_id] = AwaitedKv(context.job_id, context.tier)
        try:
            yield
        finally:
            if self._expected.get(context.job_id) is expected:
                del self._expected[context.job_id]

    async def run(self, call: Call, context: RequestContext) -> AsyncGenerator[Any, None]:
        """The pieces of the answer; `context` is the request's as of now.

        A request that brings tokens along goes on from them; their events are left out.
        """
        xargs = call.request.vllm_xargs or {}
        may_drop = may_be_dropped(context, self.droppable)
        budget_s, due_s = context.ttft_budget_s, _first_due_s(context)
        is_begun = context.attempt > 0
        run = Underway(call, context, is_begun=is_begun, budget_s=budget_s, due_s=due_s, may_drop=may_drop)
        if (brought := xargs.get(CARRIED_XARG)) is not None:
            run.carried = msgspec.convert(brought, Carried)
            run.progress.known, run.progress.cache = len(run.carried.token_ids), run.carried.cache
        run.progress.bound, run.progress.digest = self.layer.why_bound(call), self.digest
        job_id = context.job_id
        self._runs[job_id] = run
        self._expected.pop(job_id, None)
        given = {**xargs, **_objective(context), JOB_XARG: job_id}
        request = call.request.model_copy(update={"vllm_xargs": given})
        try:
            async with aclosing(self.layer.answer(request, run)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            if self._runs.get(job_id) is run:  # the same job may have come here once more
                del self._runs[job_id]

    async def run_here(
        self, call: Call, context: RequestContext, here: OnlyHere, bound: str
    ) -> AsyncGenerator[Any, None]:
        """The pieces of an answer whose prompts the engine computes itself, and why it stays here."""
        due_s = _first_due_s(context)
        here.run = run = Underway(call, context, due_s=due_s, progress=Progress(bound=bound))
        given = {**(call.request.vllm_xargs or {}), **_objective(context), _HERE_XARG: context.job_id}
        if due_s is not None:
            given[FIRST_DUE_XARG] = due_s
        request = call.request.model_copy(update={"vllm_xargs": given})
        searches = is_search(request)
        self._here[context.job_id] = here
        self._expected.pop(context.job_id, None)
        if searches:
            IN_A_SEARCH.set(here)
        # The steps of a search have no turn, and each of them computes a prompt where nothing is cached.
        counted = self.decoding.local.counted() if searches else nullcontext(lambda: None)
        try:
            async with counted as computed, aclosing(self.layer.answer(request, run)) as pieces:
                async for piece in pieces:
                    yield piece
                computed()
        finally:
            if searches:
                IN_A_SEARCH.set(None)
            if self._here.get(context.job_id) is here:
                del self._here[context.job_id]

    async def _generate(
        self,
        run: Underway,
        client: Any,
        prompt: Any,
        params: SamplingParams,
        decode: Decode,
        *,
        resampled: ResampledReason | None,
        draws: str,
    ) -> Outputs:
        """The engine's outputs for one request, from the first token on.

        Args:
            run: The request.
            client: vLLM's, of the engine here.
            prompt: vLLM's `TokensInput`.
            params: As the client wants its answer sampled.
            decode: Runs the request on the engine here.
            resampled: Why decode does not go on from the token that prefill samples; None when it does.
            draws: How the engine here draws with a seed.

        Raises:
            VLLMClientError: vLLM refuses the request; also ValueError.
        """
        tasks = await client.get_supported_tasks()  # vLLM's own check comes after a prefill
        client.input_processor.process_inputs("", prompt, params, tasks)
        is_counted = False
        while True:
            started_s = time.monotonic()
            samples = resampled is None and run.carried is None
            try:
                if self.decoding.computes_prompt(run):
                    answer = self.decoding.with_prompt(run, params, decode)
                else:
                    prefilled = await self.prefilling.attempt(
                        run, prompt, params, samples=samples, draws=draws
                    )
                    if samples:
                        resampled = _carry(run, prefilled.completion, params)
                    if resampled is not None and not is_counted:
                        self.instruments.count(FIRST_TOKENS_RESAMPLED, reason=resampled.value)
                        is_counted = True
                    answer = self.decoding.after(prefilled, run, params, decode)
                async with aclosing(answer) as outputs:
                    async for output in outputs:
                        self._refuse_given_up(run, params, output)
                        if params.output_kind is RequestOutputKind.DELTA:
                            run.progress.take(output.outputs[0])
                            run.call.amount.take(output.outputs[0], is_delta=True)
                        yield output
            except LeftError as left:
                run.carried, run.has_left, run.has_kv = left.carried, True, False
                run.decode_since_s = None
                run.context = await self.placing.left(run)
            except PrefillFailedError as failure:
                run.context = run.context.after(time.monotonic() - started_s)
                await self._go_on_after(run, failure)
            else:
                return

    def _unaborted(self, only: OnlyHere, generate: Generate) -> Generate:
        """Runs the same on the engine, and fails where the engine gives up an answer."""

        async def run(params: SamplingParams, name: str) -> Outputs:
            assert only.run is not None
            async with aclosing(generate(params, name)) as outputs:
                async for output in outputs:
                    self._refuse_given_up(only.run, params, output)
                    yield output

        return run

    def _refuse_given_up(self, run: Underway, params: SamplingParams, output: Any) -> None:
        """Refuse a request whose answer the engine gives up, which nobody has asked it to.

        Raises:
            RefusedError: It does.
        """
        reasons = {one.finish_reason for one in output.outputs}
        if "abort" in reasons:
            raise run.refuse(self.layer.failed("the engine is ending"))
        if "error" in reasons and params.structured_outputs is not None:
            # Its grammar takes too long, or has no token that the other parameters allow, here or elsewhere.
            is_slow = any(ended_with(one, TOO_SLOW) for one in output.outputs)
            raise run.refuse((GRAMMAR_TOO_SLOW if is_slow else NOTHING_ALLOWED).response())

    async def _go_on_after(self, run: Underway, failure: PrefillFailedError) -> None:
        """Give the run another place after a failure, or refuse it.

        Raises:
            RefusedError: There is none for it.
        """
        run.is_begun = run.is_begun or failure.is_of_begun
        outcome = await self.placing.again(run, failure)
        if (refusal := not_replaced(outcome, is_begun=run.is_begun)) is None:
            return
        if not run.has_left:
            raise run.refuse(refusal.response()) from failure
        # Decode has had it before, and can do without prefill.
        run.context = replace(run.context, local_prefill=LocalReason.LEFT.value)


def _carry(run: Underway, completion: Any, params: SamplingParams) -> ResampledReason | None:
    """Have decode go on from the token that prefill has sampled; why it does not."""
    if completion is None:
        return ResampledReason.SEED
    run.carried = Carried.first(completion, params)
    return None


def _dropped(run: Underway) -> RefusedError:
    """Refuse a request that the engine has dropped."""
    logs.event("stream_dropped", request_id=run.context.request_id, job_id=run.context.job_id)
    return run.refuse(error_response(429, EvictionReason.DROPPED.value, WHY_DROPPED))


def _first_due_s(context: RequestContext) -> float | None:
    """When a request's first token is due, on this host's monotonic clock; None for no deadline."""
    return None if context.ttft_budget_s is None else time.monotonic() + context.ttft_budget_s


def _objective(context: RequestContext) -> dict[str, Any]:
    """What the engine's scheduler has to know of a request when memory or pace runs short."""
    given: dict[str, Any] = {TIER_XARG: context.tier, TENANT_XARG: context.tenant}
    return given if context.tpot_s is None else {**given, TPOT_XARG: context.tpot_s}
