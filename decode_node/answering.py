"""One request on a decode replica, from its arrival to the last piece of its answer.

Owns the order of the steps: it is rendered, which says whether the prefill tier can take it, and goes that
way or has its prompts computed here. The ways are `decode_node.orchestrator`'s.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMClientError, VLLMServerError

from decode_node.grammars.check import GrammarCheck, TooManyGrammarsError
from decode_node.orchestrator import Orchestrator
from decode_node.rendering import LocalReason, Rendered, computed_of_each, has_media
from decode_node.requests.local_prefills import LocalPrefills, TooManyPromptsError
from decode_node.requests.logprob_limit import LogprobLimit
from decode_node.requests.only_here import OnlyHere, admitted, too_many
from decode_node.requests.openai_layer import OpenAILayer
from decode_node.requests.underway import Amount, Call
from decode_node.spans import DECODE, TOKENISE, RequestSpans
from decode_node.tokenizing.turns import rendering_for
from slo.request import JOB_XARG, JobId, RequestContext
from telemetry import logs, tracing
from telemetry.catalogue import LOCAL_PREFILLS
from telemetry.instruments import Instruments
from telemetry.reporting.background import Background

if TYPE_CHECKING:
    from ray.serve.llm.openai_api_models import ErrorResponse
    from vllm.sampling_params import SamplingParams

    from telemetry.reporting.of_model import OfModel


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request as it has come.

    Attributes:
        request: vLLM's chat or text completion.
        info: What else came with it over HTTP.
        context: What the ingress has decided about it.
        arrived_s: When it came, on this process's monotonic clock.
        is_chat: Which of the two it is.
        amount: What has been generated for it.
    """

    request: Any
    info: Any
    context: RequestContext
    arrived_s: float
    is_chat: bool
    amount: Amount = field(default_factory=Amount)

    @property
    def context_now(self) -> RequestContext:
        """The same, with what has passed since it came taken off the budget."""
        return self.context.after(time.monotonic() - self.arrived_s)


@dataclass(frozen=True, slots=True)
class Answering:
    """Answers the requests of one replica.

    Attributes:
        layer: Renders them.
        orchestrator: Knows the ways.
        local: Prompts that the engine here computes itself.
        grammars: Checks what answers must conform to.
        router: Hears that a prefill which it has placed does not come, or comes late for its grammar's sake.
        background: Tells it.
        instruments: Where prompts that prefill cannot take are counted.
        max_model_len: Longest prompt and answer, tokens.
        max_wait_s: Longest wait for the turn of a prompt that only the engine here can compute.
        logprobs: How many a request may ask for.
        is_alone: Whether it computes all prompts, as the KV cache of no prefill replica can be pulled.
    """

    layer: OpenAILayer
    orchestrator: Orchestrator
    local: LocalPrefills
    grammars: GrammarCheck
    router: OfModel
    background: Background
    instruments: Instruments
    max_model_len: int
    max_wait_s: float
    logprobs: LogprobLimit
    is_alone: Callable[[], bool] = lambda: False

    async def answer(self, arrived: Arrived) -> AsyncGenerator[Any, None]:
        """The pieces of the answer, one of which may be an error."""
        spans = RequestSpans(arrived.context.traceparent)
        try:
            async with AsyncExitStack() as stack, aclosing(self._pieces(arrived, spans, stack)) as pieces:
                async for piece in pieces:
                    yield piece
        except TooManyPromptsError as error:
            yield too_many(error)
        finally:
            spans.end()

    def awaits_verdict(self, params: SamplingParams) -> None:
        """Have the router told that the request with these parameters waits until its grammar is checked.

        How long that takes says nothing of how long others take from their placement to their prefill.
        """
        if (job_id := (params.extra_args or {}).get(JOB_XARG)) is not None:
            self.background.run("telling_router", self._held_up(job_id), job_id=job_id)

    async def _pieces(
        self, arrived: Arrived, spans: RequestSpans, stack: AsyncExitStack
    ) -> AsyncGenerator[Any, None]:
        request, context, here = arrived.request, arrived.context, None
        spans.phase(TOKENISE)
        if has_media(request):
            looked_at = admitted(self.local, context, computed_of_each(request), self.max_wait_s)
            here = await stack.enter_async_context(looked_at)
            if (refusal := await self._refusal(request, context)) is not None:
                yield refusal
                return
            await here.begin()
        with rendering_for(context):
            rendered = await self.layer.rendered(
                request, is_chat=arrived.is_chat, max_model_len=self.max_model_len
            )
        if not isinstance(rendered, Rendered):
            yield rendered
            return
        if (many := self.logprobs.refusal(request, rendered)) is not None:
            yield many
            return
        self.logprobs.bound(request, rendered)
        spans.note({"gen_ai.usage.input_tokens": rendered.input_tokens})
        info = type(arrived.info)(headers=tracing.carrying(arrived.info.headers, spans.traceparent))
        call = Call(
            rendered.request,
            info,
            arrived.is_chat,
            rendered.token_ids,
            spans,
            rendered.prompt,
            arrived.amount,
        )
        if rendered.local is None:
            await stack.aclose()
            _log_rendered(arrived, len(rendered.token_ids))
            answer = self.orchestrator.run(call, self._as_alone(arrived.context_now))
        else:
            if here is None:
                let_in = admitted(self.local, context, rendered.prompts, self.max_wait_s)
                here = await stack.enter_async_context(let_in)
            answer = self._only_here(call, arrived.context_now, here, rendered.local)
        async with aclosing(answer) as pieces:
            async for piece in pieces:
                yield piece

    async def _refusal(self, request: Any, context: RequestContext) -> ErrorResponse | None:
        """Why a chat is refused for what its answer must conform to; None for no reason.

        Asked of one with media before it has its turn: it would hold that during the check before the engine.
        """
        with rendering_for(context):
            grammar = await self.layer.grammar_of(request, max_model_len=self.max_model_len)
        if grammar is None:
            return None
        try:
            await self.grammars.check(grammar, context.tenant, request.allowed_token_ids)
        except VLLMClientError:  # the check before the engine says it again, at once and as vLLM does
            return None
        except TooManyGrammarsError as error:
            return error.response()
        except (VLLMServerError, RuntimeError) as error:
            return self.layer.failed(str(error))
        return None

    def _only_here(
        self, call: Call, context: RequestContext, here: OnlyHere, reason: LocalReason
    ) -> AsyncGenerator[Any, None]:
        """The answer to a request that prefill cannot take, which the router hears if it does not know."""
        call.spans.phase(DECODE)
        self.instruments.count(LOCAL_PREFILLS, reason=reason.value)
        self._tell_not_for_prefill(context)
        return self.orchestrator.run_here(call, context, here, reason.value)

    def _as_alone(self, context: RequestContext) -> RequestContext:
        """The context of a request that prefill could take, whose prompt is computed here while it cannot.

        Raises:
            TooManyPromptsError: There are too many for one more. What goes on after a loss is not refused.
        """
        if context.local_prefill or not self.is_alone():
            return context
        if context.attempt == 0:
            self.local.check(context.party, context.tenant_weight)
        self._tell_not_for_prefill(context)
        return replace(context, prefill_replica=None, local_prefill=LocalReason.NOTHING_PULLED.value)

    def _tell_not_for_prefill(self, context: RequestContext) -> None:
        """Have the router told, if it has placed a prefill."""
        if context.prefill_replica is not None:
            job_id = context.job_id
            self.background.run("telling_router", self._not_for_prefill(job_id), job_id=job_id)

    async def _not_for_prefill(self, job_id: JobId) -> None:
        """Tell the router that the placed prefill will not be asked for."""
        await self.router.not_for_prefill.remote(job_id)

    async def _held_up(self, job_id: JobId) -> None:
        await self.router.held_up.remote(job_id)


def _log_rendered(arrived: Arrived, tokens: int) -> None:
    logs.event(
        "request_rendered",
        request_id=arrived.context.request_id,
        job_id=arrived.context.job_id,
        tokens=tokens,
        seconds=time.monotonic() - arrived.arrived_s,
    )
