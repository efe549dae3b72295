"""A request on a decode replica: as it came, and what has become of it so far."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.exceptions import GenerationError

from decode_node.requests.progress import Progress
from slo.reports import AwaitedKv

if TYPE_CHECKING:
    from ray.serve.llm.openai_api_models import ErrorResponse
    from vllm.outputs import RequestOutput

    from decode_node.spans import RequestSpans
    from sampling.carried import Adapter, Carried
    from slo.request import ReplicaId, RequestContext


@dataclass(slots=True)
class Amount:
    """How many tokens have been generated of the answers to a request."""

    _of_each: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Of all answers so far."""
        return sum(self._of_each.values())

    def take(self, completion: Any, *, is_delta: bool, answer: str = "") -> None:
        """Note what the engine has generated.

        Args:
            completion: vLLM's `CompletionOutput`.
            is_delta: Whether it has only what is new.
            answer: Which one it is of.
        """
        before = self._of_each.get(answer, 0) if is_delta else 0
        self._of_each[answer] = before + len(completion.token_ids)

    async def counted(
        self, outputs: AsyncGenerator[RequestOutput, None], *, is_delta: bool, answer: str = ""
    ) -> AsyncGenerator[RequestOutput, None]:
        """The engine's outputs for an answer, noted as by `take`."""
        async with aclosing(outputs):
            async for output in outputs:
                for completion in output.outputs:
                    self.take(completion, is_delta=is_delta, answer=answer)
                yield output


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it came.

    Attributes:
        request: A chat or a completion request; it is not changed.
        info: What else came with it over HTTP.
        is_chat: Which of the two it is.
        token_ids: Its prompt; empty when that is not prefilled elsewhere.
        spans: Where its phases are noted.
        prompt: What vLLM's renderer has made of it; None for what is still to be rendered.
        amount: What has been generated for it.
    """

    request: Any
    info: Any
    is_chat: bool
    token_ids: list[int]
    spans: RequestSpans
    prompt: Any = None
    amount: Amount = field(default_factory=Amount)


class RefusedError(GenerationError):  # type: ignore[misc] # vLLM ships no types for it
    """Ends vLLM's part in a request that is answered with `Underway.refusal`."""


@dataclass(slots=True)
class Underway:
    """A request that is under way.

    Attributes:
        context: As of its latest attempt.
        replacements: How often it has been placed again.
        is_begun: Whether a replica has had it that may have computed something of it.
        doubted: Replicas that serve, and from which one pull of its KV has failed.
        budget_s: What it had when it came until its first token was due; None for no deadline.
        due_s: When that was, on this host's monotonic clock.
        may_leave: Whether the engine may let it go for lack of memory.
        may_drop: Whether the engine may end it for good then.
        has_left: Whether it has; whatever fails from then on, decode can compute it.
        carried: What has been generated of its answer elsewhere; None for nothing that decode goes on from.
        progress: What the pieces of its stream stand for.
        refusal: What it is answered with instead.
        adapter: The LoRA adapter that answers; None for the model itself.
        has_kv: Whether the engine has the KV cache that it goes on from.
        decode_since_s: When the engine was first given what it goes on from, on this host's monotonic clock;
            None before that.
    """

    call: Call
    context: RequestContext
    replacements: int = 0
    is_begun: bool = False
    doubted: set[ReplicaId] = field(default_factory=set)
    budget_s: float | None = None
    due_s: float | None = None
    may_leave: bool = False
    may_drop: bool = False
    has_left: bool = False
    carried: Carried | None = None
    progress: Progress = field(default_factory=Progress)
    refusal: ErrorResponse | None = None
    adapter: Adapter | None = None
    has_kv: bool = False
    decode_since_s: float | None = None

    @property
    def awaited(self) -> AwaitedKv:
        """What the router is told of it until it has its KV cache."""
        carried = 0 if self.carried is None else len(self.carried.token_ids)
        tokens = len(self.call.token_ids) + carried if self.call.token_ids else 0
        return AwaitedKv(self.context.job_id, self.context.tier, tokens)

    @property
    def has_ended(self) -> bool:
        """Whether it lacks no token any more, so that nothing is computed for it."""
        return self.carried is not None and self.carried.finish_reason is not None

    @property
    def prefill_tokens(self) -> int:
        """What prefill computes of its prompt and of what it carries, whose last token decode computes."""
        carried = () if self.carried is None else self.carried.token_ids[:-1]
        return len(self.call.token_ids) + len(carried)

    @property
    def failed_replicas(self) -> tuple[ReplicaId, ...]:
        """Replicas that it is not placed on again; `context` has those that are `doubted` among them."""
        return tuple(one for one in self.context.failed_replicas if one not in self.doubted)

    def refuse(self, response: ErrorResponse) -> RefusedError:
        """Answer with this; the exception is for vLLM."""
        self.refusal = response
        return RefusedError(response.error.message)
