"""A request whose prompts only the engine here can compute: several of them or several answers, and the like.

Owns that each of its prompts has its turn among those that the engine computes itself, once for each answer:
vLLM has all answers to a prompt compute it at once, and a step full of that has nothing for the streams
beside it. How many may be computed at once, and whose, is `decode_node.requests.local_prefills`'s.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.async_utils import merge_async_iterators

from decode_node.answers import error_response
from decode_node.requests.local_prefills import Claim, LocalPrefills, TooManyPromptsError, Turn
from slo.errors import RejectionReason
from slo.request import DECODE_SINCE_XARG, FIRST_DUE_XARG, SEARCH_STEP_XARG, TENANT_XARG, TIER_XARG

if TYPE_CHECKING:
    from ray.serve.llm.openai_api_models import ErrorResponse
    from vllm.outputs import CompletionOutput, RequestOutput

    from decode_node.requests.underway import Underway
    from slo.request import RequestContext

Outputs: TypeAlias = "AsyncGenerator[RequestOutput, None]"
Generate: TypeAlias = Callable[[SamplingParams, str], Outputs]
"""Runs one request on the engine, with its parameters and its name there."""

_MAX_RETRY_S: Final = 60.0
_SEEDS: Final = 2**64
"""So many there are, half of them below zero."""
_MEDIA_TOKENS: Final = 1024
"""A prompt with media counts as so many where turns are compared: it is not rendered before it has one."""


@dataclass(slots=True, eq=False)
class OnlyHere:
    """A request whose prompts this replica's engine computes, each in its turn.

    Attributes:
        local: Gives turns.
        claim: Its prompts, once for each answer.
        run: What has become of it; None before it runs.
        first: The turn that it has before it runs; None for none.
        is_single: Whether it has one prompt and one answer, so that its events say which tokens they bring.
    """

    local: LocalPrefills
    claim: Claim
    run: Underway | None = None
    first: Turn | None = None
    is_single: bool = False

    async def begin(self) -> None:
        """Wait for its first turn before it is rendered, as is to be done with media.

        vLLM's renderer gives an image away once, so that the engine must be given them in the order of their
        rendering.

        Raises:
            TooManyPromptsError: It was too long.
        """
        self.first = await self.local.wait(self.claim, _MEDIA_TOKENS)

    def generate(self, prompt: Any, params: SamplingParams, name: str, generate: Generate) -> Outputs:
        """What the engine makes of one of its prompts.

        Args:
            prompt: vLLM's `EngineInput`.
            params: As the client wants its answers sampled.
            name: What the engine is to call it.
            generate: Runs it.

        Raises:
            RefusedError: It has waited too long for its turn.
        """
        several = self._answer if params.n == 1 else self._answers
        return several(prompt, params, name, generate)

    def in_a_search(self, prompt: Any, params: SamplingParams, name: str, generate: Generate) -> Outputs:
        """The same for a step of a beam search, which has a request of its own for each of its beams.

        The first step computes the prompt, and the others find it in the prefix cache.
        """
        is_later = self.claim.unasked <= 0 and self.first is None

        def step(params: SamplingParams, name: str) -> Outputs:
            return generate(self._of_step(params, is_later=is_later), name)

        if is_later:
            return self._heard(step(params, name), params.output_kind, name)
        return self._answer(prompt, params, name, step)

    async def _answer(self, prompt: Any, params: SamplingParams, name: str, generate: Generate) -> Outputs:
        params, kind = params.clone(), params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY:
            params.output_kind = RequestOutputKind.CUMULATIVE  # to hear at once that its prompt is computed
        assert self.run is not None
        turn = await self._turn(len(prompt.get("prompt_token_ids") or ()) or 1)
        try:
            async with aclosing(self._heard(generate(params, name), kind, name)) as outputs:
                async for output in outputs:
                    turn.computed()
                    self.run.has_kv = True  # of several prompts, that of the first
                    if self.is_single and kind is RequestOutputKind.DELTA:
                        self.run.progress.take(output.outputs[0])
                    if output.finished or kind is not RequestOutputKind.FINAL_ONLY:
                        yield output
        finally:
            turn.leave()

    async def _answers(self, prompt: Any, params: SamplingParams, name: str, generate: Generate) -> Outputs:
        """Several answers, by a request each, as vLLM makes them of one (`ParentRequest`)."""
        answers = [
            self._answer(prompt, _of_one(params, number), f"{number}_{name}", generate)
            for number in range(params.n)
        ]
        whole: list[CompletionOutput | None] = [None] * params.n
        left = params.n
        async with aclosing(merge_async_iterators(*answers)) as outputs:
            async for number, output in outputs:
                (completion,) = output.outputs
                completion.index, output.request_id = number, name
                left -= output.finished
                output.finished = left == 0
                if params.output_kind is not RequestOutputKind.FINAL_ONLY:
                    yield output
                    continue
                whole[number] = completion
                if output.finished:
                    output.outputs = whole
                    yield output

    def _of_step(self, params: SamplingParams, *, is_later: bool) -> SamplingParams:
        """How a step of a search is sampled, with what the engine's scheduler has to know of the search.

        That is no TPOT objective: none of its tokens is sent before all of them are there.
        """
        run = self.run
        assert run is not None
        if run.decode_since_s is None:
            run.decode_since_s = time.monotonic()
        params = params.clone()
        params.extra_args = {
            **(params.extra_args or {}),
            TIER_XARG: run.context.tier,
            TENANT_XARG: run.context.tenant,
            DECODE_SINCE_XARG: run.decode_since_s,
            SEARCH_STEP_XARG: is_later,
        }
        if run.due_s is not None and not is_later:
            params.extra_args[FIRST_DUE_XARG] = run.due_s
        return params

    def _heard(self, outputs: Outputs, kind: RequestOutputKind, name: str) -> Outputs:
        """Outputs of the engine, whose tokens are counted."""
        assert self.run is not None
        return self.run.call.amount.counted(outputs, is_delta=kind is RequestOutputKind.DELTA, answer=name)

    async def _turn(self, tokens: int) -> Turn:
        """The turn that it has had before it ran, or the next.

        Raises:
            RefusedError: It has waited too long.
        """
        if (first := self.first) is not None:
            self.first = None
            return first
        try:
            return await self.local.wait(self.claim, tokens)
        except TooManyPromptsError as error:
            assert self.run is not None
            raise self.run.refuse(too_many(error)) from None


IN_A_SEARCH: Final[ContextVar[OnlyHere | None]] = ContextVar("in_a_search", default=None)
"""The request whose beam search is running: vLLM's search calls the engine without saying for whom."""


@asynccontextmanager
async def admitted(
    local: LocalPrefills, context: RequestContext, prompts: int, wait_s: float
) -> AsyncIterator[OnlyHere]:
    """A request of so many prompts, once for each answer, when it may have them computed here.

    Args:
        local: Gives turns.
        context: Its context.
        prompts: How many.
        wait_s: Longest wait for the first turn; one that goes on here after a loss waits however long.

    Raises:
        TooManyPromptsError: There are too many.
    """
    longest_s = wait_s if context.attempt == 0 else None
    async with local.claimed(context.party, prompts, longest_s, context.tenant_weight) as claim:
        here = OnlyHere(local, claim, is_single=prompts == 1)
        try:
            yield here
        finally:
            if here.first is not None:
                here.first.leave()


def too_many(error: TooManyPromptsError) -> ErrorResponse:
    """What a request is answered with; the answer's `param` says when to come again, in seconds from then."""
    message = "the server has too many prompts that only decode can compute; retry later"
    retry_after = str(math.ceil(min(error.retry_s, _MAX_RETRY_S)))
    return error_response(429, RejectionReason.BACKLOG.value, message, retry_after)


def _of_one(params: SamplingParams, number: int) -> SamplingParams:
    """How one of several answers is sampled."""
    params = params.clone()
    params.n = 1
    if params.seed is not None:  # an engine ends of a seed of more than 64 bits
        params.seed = (params.seed + number + _SEEDS // 2) % _SEEDS - _SEEDS // 2
    return params
