"""One attempt at an answer on the engine here: after a prefill elsewhere, or with the prompt computed here.

Owns how a request goes on from what it carries, when its KV cache counts as pulled, and that a prefill which
is not pulled is released. Whether an attempt that has failed is followed by another one is
`decode_node.orchestrator`'s; what the engine runs of a request is its caller's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from vllm.sampling_params import RequestOutputKind, SamplingParams

from decode_node.prefill_health import PULLED_S, PrefillFailedError, PrefillWatch
from decode_node.rendering import LocalReason
from decode_node.requests.leaving import MAY_LEAVE_XARG, Generated, has_left
from decode_node.requests.local_prefills import LocalPrefills
from decode_node.requests.underway import Underway
from decode_node.spans import DECODE
from sampling.carried import KV_PARAMS, CacheUse, Prefilled
from slo.replacement import FailureCause
from telemetry.catalogue import LOCAL_PREFILLS
from telemetry.instruments import Instruments

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from decode_node.prefill_tier import PrefillTier

Outputs: TypeAlias = "AsyncGenerator[RequestOutput, None]"
Decode: TypeAlias = "Callable[[SamplingParams], Outputs]"
"""Runs one request on the engine here, as often as it is called."""


@dataclass(frozen=True, slots=True)
class LocalDecode:
    """Decodes requests on the engine here.

    Attributes:
        tier: Who has prefilled, and drops what is not pulled.
        watch: Notices that a prefill replica has failed.
        instruments: Where prompts that are computed here are counted.
        local: Prompts that the engine computes itself, those of streams that have left among them.
        short: Those that it computes for being short. They have places of their own: they make no step of the
            engine much longer.
        may_compute: Whether it also computes some for lack of a prefill replica.
        pulled: Called for each request whose KV cache has come from a prefill replica.
    """

    tier: PrefillTier
    watch: PrefillWatch
    instruments: Instruments
    local: LocalPrefills
    short: LocalPrefills
    may_compute: bool = False
    pulled: Callable[[], None] = lambda: None

    def computes_prompt(self, run: Underway) -> bool:
        """Whether the engine computes a request's prompt itself, in its turn."""
        is_local = run.context.local_prefill not in {"", LocalReason.LEFT}
        return self.may_compute and is_local and not run.has_ended

    async def after(
        self, prefilled: Prefilled, run: Underway, params: SamplingParams, decode: Decode
    ) -> Outputs:
        """What the engine makes of a prefill; what has been carried is the first output of a stream.

        Args:
            prefilled: Where the KV cache waits, or that none does.
            run: The request.
            params: As the client wants its answer sampled.
            decode: Runs the request.

        Raises:
            PrefillFailedError: The KV cache has not come.
            LeftError: The request has left the engine.
        """
        params, carried = _params_after(prefilled, run, params), run.carried
        generated = Generated(carried, params)
        needs_pull = prefilled.kv_transfer_params is not None
        is_stream = params.output_kind is not RequestOutputKind.FINAL_ONLY
        repeats_carried = is_stream and carried is not None and not carried.is_sent
        is_left = run.context.local_prefill == LocalReason.LEFT
        if needs_pull or is_left:
            _has_first_output(params)
        _carry(run, params)
        counted = self.local.counted() if is_left else nullcontext(_is_not_counted)
        try:
            async with counted as computed, aclosing(decode(params)) as outputs:
                if repeats_carried:
                    output = await anext(outputs)
                    run.call.spans.first_token()
                    _tell_cache(run, output)
                    yield output
                    if output.finished:
                        return
                output, has_pulled = await self._pulled(run, params, outputs, needs_pull=needs_pull)
                computed()
                run.has_kv = True
                needs_pull = needs_pull and not has_pulled
                run.call.spans.phase(DECODE)
                if carried is None or not is_stream:
                    run.call.spans.first_token()
                async for one in _after(output, outputs):
                    has_news, left = generated.take(one)
                    _tell_cache(run, one)
                    if has_news and (is_stream or one.finished):
                        yield one
                    if left is not None:
                        raise left
        finally:
            if needs_pull:
                self.tier.release(run.context)

    async def with_prompt(self, run: Underway, params: SamplingParams, decode: Decode) -> Outputs:
        """What the engine makes of a request whose prompt it computes itself, when that has its turn."""
        self.instruments.count(LOCAL_PREFILLS, reason=run.context.local_prefill)
        is_stream = params.output_kind is not RequestOutputKind.FINAL_ONLY
        params, carried = params.clone(), run.carried
        _has_first_output(params)
        _carry(run, params)
        is_short = run.context.local_prefill == LocalReason.CHEAPER_ON_DECODE
        local = self.short if is_short else self.local
        party, weight, tokens = run.context.party, run.context.tenant_weight, len(run.call.token_ids)
        async with local.claimed(party, weight=weight) as claim, local.turn(claim, tokens) as computed:
            run.call.spans.phase(DECODE)
            async with aclosing(decode(params)) as outputs:
                brings = carried is not None and not carried.is_sent
                async for output in outputs:
                    if not brings:
                        computed()
                        run.has_kv = True
                        run.progress.cache = run.progress.cache or CacheUse.of(output)
                    brings = False
                    _tell_cache(run, output)
                    if is_stream or output.finished:
                        run.call.spans.first_token()
                        yield output

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
            is_up = await self.watch.is_up(replica)  # a pull fails likewise if decode comes too late for it
            may_be_grammar = is_up and params.structured_outputs is not None
            cause = FailureCause.REQUEST_FAILED if may_be_grammar else FailureCause.PULL_FAILED
            raise PrefillFailedError(cause, replica, is_up=is_up)
        if needs_pull and has_pulled:
            self.pulled()
        return output, has_pulled


def _params_after(prefilled: Prefilled, run: Underway, params: SamplingParams) -> SamplingParams:
    """The parameters of a request that the engine decodes after a prefill."""
    params = params.clone()
    params.extra_args = {**(params.extra_args or {}), KV_PARAMS: prefilled.kv_transfer_params}
    if run.may_leave:
        params.extra_args[MAY_LEAVE_XARG] = True
    return params


def _carry(run: Underway, params: SamplingParams) -> None:
    """Have the engine go on from what the run carries, which its client has then."""
    if run.carried is not None:
        run.carried.put_in(params)
        run.carried = msgspec.structs.replace(run.carried, is_sent=True)


def _tell_cache(run: Underway, output: RequestOutput) -> None:
    """Have an output tell of prefill's prefix cache: to the engine here, all that it pulls is cached."""
    if run.progress.cache is not None:
        run.progress.cache.put_in(output)


def _has_first_output(params: SamplingParams) -> None:
    """Have the engine say at once that the KV has come or is computed, whatever the client wants to hear."""
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        params.output_kind = RequestOutputKind.CUMULATIVE
    params.stream_interval = None


def _is_not_counted() -> None:
    """Nothing is to be counted of a prompt that this engine does not compute."""


async def _after(first: RequestOutput, others: Outputs) -> Outputs:
    yield first
    async for output in others:
        yield output
