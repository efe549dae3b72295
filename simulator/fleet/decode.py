"""A decode replica with continuous batching, without an event for each token.

Owns the time of a decode step, KV memory, and when tokens come. All members of the batch get one token per
step, so the replica's own count of steps is every member's clock: a request that joins at count k and wants
n tokens leaves at k + n. The count is turned into time only where somebody joins or leaves.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from simulator.cost.decode_steps import DecodeModel
from simulator.replica.loop import EventLoop
from slo.decode.headroom import DecodeLoad
from slo.tiers import SYSTEM, Tier


@dataclass(slots=True, eq=False)
class Decoding:
    """One request on a decode replica.

    Attributes:
        prompt_tokens: Context that it comes with.
        output_tokens: Tokens that it wants, at least one.
        admitted: Called when its KV memory is reserved; only then may its KV come.
        ended: Called after its last token.
        compute_s: What computing its prompt here adds to its first step, which all members take part in; the
            first token is the prompt's then.
        name: The router's for it.
    """

    prompt_tokens: int
    output_tokens: int
    admitted: Callable[[], None]
    ended: Callable[[Decoding], None]
    compute_s: float = 0.0
    name: str = ""
    tier: Tier = SYSTEM
    first_token_s: float = math.inf
    last_token_s: float = math.inf
    holds_memory: bool = False
    gone: bool = False

    @property
    def kv_tokens(self) -> int:
        """KV memory that it needs by its end."""
        return self.prompt_tokens + self.output_tokens

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None when there is only one."""
        if self.output_tokens < 2:  # noqa: PLR2004 - the first token has no interval
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)


class SimulatedDecode(Protocol):
    """A decode replica in virtual time; see `VirtualDecodeReplica`."""

    tokens: int
    waited: int
    reserved_token_s: float

    @property
    def kv_tokens(self) -> int: ...  # noqa: D102 - see there

    @property
    def kv_usage(self) -> float: ...  # noqa: D102

    @property
    def waiting(self) -> int: ...  # noqa: D102

    @property
    def tpot_s(self) -> float | None: ...  # noqa: D102

    @property
    def load(self) -> DecodeLoad | None: ...  # noqa: D102

    def admit(self, request: Decoding) -> None: ...  # noqa: D102

    def withdraw(self, request: Decoding) -> None: ...  # noqa: D102

    def join(self, request: Decoding) -> None: ...  # noqa: D102


@dataclass(slots=True)
class _Batch:
    """Members since `since_s`, the beginning of a step, and how many steps had been done by then.

    Attributes:
        prompts_s: What the prompts that are computed in its first step since then add to that.
    """

    since_s: float = 0.0
    prompts_s: float = 0.0
    steps: int = 0
    size: int = 0
    context_tokens: int = 0
    leaving: list[tuple[int, int, Decoding]] = field(default_factory=list)
    fresh: list[Decoding] = field(default_factory=list)


class VirtualDecodeReplica:
    """One decode replica: admits by memory, first come, first served; batches; ends.

    A request's memory is reserved for all of its tokens when it is admitted, so nobody is ever thrown out
    again. `simulator.fleet.pressed_decode` gives it out as the answers grow.

    Args:
        model: How fast and how large it is.

    Attributes:
        waited: Requests that had to wait for memory.
        reserved_token_s: Tokens of memory reserved times the seconds for which they were.
    """

    def __init__(self, loop: EventLoop, model: DecodeModel) -> None:
        self.tokens = 0
        self.waited = 0
        self.reserved_token_s = 0.0
        self._loop = loop
        self._model = model
        self._reserved_tokens = 0
        self._reserved_since_s = 0.0
        self._admitted = 0
        self._queue: deque[Decoding] = deque()
        self._joining: list[Decoding] = []
        self._batch = _Batch()
        self._number = 0
        self._appointment = 0

    @property
    def kv_tokens(self) -> int:
        """Tokens that its memory holds."""
        return self._model.kv_tokens

    @property
    def tpot_s(self) -> float | None:
        """Seconds of a step of the present batch; None of none."""
        if self._batch.size == 0:
            return None
        return self._model.step_s(self._batch.size, self._batch.context_tokens)

    @property
    def load(self) -> DecodeLoad | None:
        """Nothing is told of it but how much is reserved."""
        return None

    @property
    def kv_usage(self) -> float:
        """Fraction of its KV memory that is reserved."""
        return self._reserved_tokens / self._model.kv_tokens

    @property
    def waiting(self) -> int:
        """Requests that wait for memory or a place."""
        return sum(not request.gone for request in self._queue)

    def admit(self, request: Decoding) -> None:
        """Reserve memory for a request as soon as there is enough; `request.admitted` is called then."""
        self._queue.append(request)
        self._admit_next()
        self.waited += not request.holds_memory

    def withdraw(self, request: Decoding) -> None:
        """Forget a request that has not joined: its KV will not come."""
        request.gone = True
        if request.holds_memory:
            self._give_back(request)
        self._admit_next()

    def join(self, request: Decoding) -> None:
        """The KV of an admitted request is there; it takes part from the next step on."""
        self._joining.append(request)
        batch = self._batch
        if batch.size == 0:
            batch.since_s = self._loop.now_s
            self._meet(0)
            return
        elapsed_s = self._loop.now_s - batch.since_s
        self._meet(min(self._until_leave(), self._steps_within(elapsed_s)))

    def _admit_next(self) -> None:
        while self._queue:
            request = self._queue[0]
            if not request.gone:
                full = self._reserved_tokens + request.kv_tokens > self._model.kv_tokens
                if full or self._admitted >= self._model.max_batch:
                    return
                self._reserve(request.kv_tokens)
                self._admitted += 1
                request.holds_memory = True
            self._queue.popleft()
            if not request.gone:
                request.admitted()

    def _give_back(self, request: Decoding) -> None:
        self._reserve(-request.kv_tokens)
        self._admitted -= 1
        request.holds_memory = False

    def _reserve(self, tokens: int) -> None:
        now_s = self._loop.now_s
        self.reserved_token_s += self._reserved_tokens * (now_s - self._reserved_since_s)
        self._reserved_since_s = now_s
        self._reserved_tokens += tokens

    def _steps_within(self, elapsed_s: float) -> int:
        batch = self._batch
        if 0 < elapsed_s <= batch.prompts_s:
            return 1
        return self._model.steps_within(elapsed_s - batch.prompts_s, batch.size, batch.context_tokens)

    def _until_leave(self) -> int:
        return self._batch.leaving[0][0] - self._batch.steps

    def _meet(self, steps: int) -> None:
        """Look at the batch again when so many steps are done; replaces the last appointment."""
        self._appointment += 1
        took_s = self._steps_s(steps)
        self._loop.call_at(self._batch.since_s + took_s, self._turn, self._appointment, steps)

    def _steps_s(self, steps: int) -> float:
        if steps == 0:
            return 0.0
        batch = self._batch
        return batch.prompts_s + self._model.steps_s(steps, batch.size, batch.context_tokens)

    def _turn(self, appointment: int, steps: int) -> None:
        """Between two steps: tokens are out, some leave, others join."""
        if appointment != self._appointment:
            return
        batch = self._batch
        if steps:
            self._pass(steps)
        left = []
        while batch.leaving and batch.leaving[0][0] <= batch.steps:
            left.append(heappop(batch.leaving)[2])
        joining, self._joining = self._joining, []
        for request in left:
            batch.size -= 1
            batch.context_tokens -= request.kv_tokens
        batch.prompts_s += math.fsum(request.compute_s for request in joining)
        for request in joining:
            self._number += 1
            batch.size += 1
            batch.context_tokens += request.prompt_tokens
            batch.fresh.append(request)
            heappush(batch.leaving, (batch.steps + request.output_tokens, self._number, request))
        if batch.size:
            self._meet(self._until_leave())
        for request in left:
            request.last_token_s = self._loop.now_s
            self._give_back(request)
            request.ended(request)
        if left:
            self._admit_next()

    def _pass(self, steps: int) -> None:
        batch = self._batch
        if batch.fresh:
            first_s = batch.since_s + self._steps_s(1)
            for request in batch.fresh:
                request.first_token_s = first_s
            batch.fresh.clear()
        self.tokens += steps * batch.size
        batch.since_s, batch.prompts_s = self._loop.now_s, 0.0
        batch.steps += steps
        batch.context_tokens += steps * batch.size
