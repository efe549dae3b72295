"""A decode engine in virtual time, step by step, whose KV memory is given out in blocks.

As vLLM's scheduler: running requests first, in their order, each for its next tokens; who finds no block
takes the memory of another one; those that wait come after that, unless memory was taken in this step.
Whoever comes back is spared what nobody has overwritten, as by vLLM's prefix cache. Owns steps and the clock.
Whose memory is taken and who may start is a way's (`simulator.pressure.ways`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from simulator.cost.decode_steps import DecodeModel
from simulator.pressure.decoding import PressedRequest, PressedStream
from simulator.pressure.free_blocks import FreeBlocks
from simulator.pressure.slowness import Slowness
from slo.decode.step_time import StepShape
from slo.decode.victims import TakenBy
from slo.tiers import TierSet


@dataclass(frozen=True, slots=True)
class PressedSetup:
    """An engine.

    Attributes:
        model: Times of decode steps.
        prompt_token_s: Seconds to compute a token of a prompt, or one again.
        blocks: Of the KV memory.
        block_tokens: Of a block.
        chunk_tokens: Of a sequence that one step computes at most.
        step_tokens: That one step computes at most.
        max_seqs: Requests that run at a time.
        block_s: Seconds to move a block to host memory, or back.
        host_blocks: That there is room for.
        pulls: Whether prompts come computed, from a prefill tier.
        moved_s: Seconds for each stream that the batch of a step gains or loses.
        noise: Standard deviation of the logarithm of what a step takes.
        drift: The same of what several seconds of steps take.
        seed: Of both.
    """

    model: DecodeModel
    prompt_token_s: float
    blocks: int
    block_tokens: int = 16
    chunk_tokens: int = 512
    step_tokens: int = 2048
    max_seqs: int = 256
    block_s: float = 0.0
    host_blocks: int = 0
    pulls: bool = True
    moved_s: float = 0.0
    noise: float = 0.0
    drift: float = 0.0
    seed: int = 0

    def blocks_of(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.block_tokens)


class Way(Protocol):
    """How a server bears it when memory runs short."""

    def relieve(self, engine: PressedEngine) -> None:
        """Take memory from whom it likes, before a step."""

    def order(self, engine: PressedEngine) -> list[PressedStream]:
        """Those that wait, the first to start first."""

    def admits(self, engine: PressedEngine, one: PressedStream) -> bool:
        """Whether it may start; there are blocks for its sequence."""

    def chunk_tokens(self, engine: PressedEngine) -> int:
        """Tokens of a sequence that the next step computes at most."""

    def victim(self, engine: PressedEngine) -> PressedStream:
        """Whose memory is taken when the step finds none."""

    def preempted(self, engine: PressedEngine) -> None:
        """Hear that somebody's was taken."""

    def leaves_out(self, engine: PressedEngine) -> frozenset[PressedStream]:
        """Whom of those that run the next step leaves out."""

    def stepped(self, shape: StepShape, seconds: float) -> None:
        """Hear what a step has taken."""

    def ended(self, one: PressedStream) -> None:
        """An answer is complete."""


@dataclass(slots=True)
class PressedEngine:
    """Serves requests and counts what they have cost.

    Attributes:
        pull: Begins to pull the KV of a newcomer that has memory; `pulled` is to be called when it is there.
            None if it is there at once.
        running: In vLLM's order.
        waiting: Newcomers, and those whose memory was taken.
        pulling: Those whose KV is on its way.
        added_s: What the next step takes beyond its tokens.
        chunk_tokens: Tokens of a sequence that the step computes at most.
        computed: Tokens that were computed.
        again: Of them, those that had been computed before.
    """

    setup: PressedSetup
    way: Way
    tiers: TierSet
    pull: Callable[[PressedStream], None] | None = None
    now_s: float = 0.0
    running: list[PressedStream] = field(default_factory=list)
    waiting: list[PressedStream] = field(default_factory=list)
    pulling: list[PressedStream] = field(default_factory=list)
    added_s: float = 0.0
    chunk_tokens: int = 0
    done: list[PressedStream] = field(default_factory=list)
    computed: int = 0
    again: int = 0
    _moved: int = 0
    _has_taken: bool = False
    _host: int = 0
    _held: dict[PressedStream, int] = field(default_factory=dict)
    _before: dict[PressedStream, int] = field(default_factory=dict)
    _left_out: frozenset[PressedStream] = frozenset()
    _batch: frozenset[PressedStream] = frozenset()
    _free: FreeBlocks = field(init=False)
    _slowness: Slowness = field(init=False)

    def __post_init__(self) -> None:  # noqa: D105 - sets what the arguments say
        self._slowness = Slowness(self.setup.noise, self.setup.drift, self.setup.seed)
        self._free, self._host = FreeBlocks(self.setup.blocks), self.setup.host_blocks
        self.chunk_tokens = self.setup.chunk_tokens

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._free.count

    @property
    def free_host_blocks(self) -> int:
        """The same in host memory."""
        return self._host

    @property
    def holders(self) -> list[PressedStream]:
        """Those that have memory."""
        return [*self.running, *self.pulling]

    @property
    def step_s(self) -> float:
        """What a step of those that run takes."""
        context = sum(one.computed for one in self.running)
        return self.setup.model.step_s(len(self.running), context)

    def held(self, one: PressedStream) -> int:
        """Blocks that a request holds."""
        return self._held.get(one, 0)

    def next_tokens(self, one: PressedStream) -> int:
        """Tokens that the next step computes of it."""
        return min(self.chunk_tokens, one.length - one.computed)

    def next_blocks(self, one: PressedStream) -> int:
        """Blocks that it needs for that."""
        return max(0, self.setup.blocks_of(one.computed + self.next_tokens(one)) - self.held(one))

    def run(self, asked: Iterable[PressedRequest]) -> list[PressedStream]:
        """Serve all of them; in the order of their ends.

        Raises:
            ValueError: A request is larger than the memory.
        """
        due = [(one.at_s, number, one) for number, one in enumerate(asked)]
        heapq.heapify(due)
        while due or self.running or self.waiting:
            if not self.running and not self.waiting:
                self.now_s = max(self.now_s, due[0][0])
            while due and due[0][0] <= self.now_s:
                self.arrives(heapq.heappop(due)[2])
            self.step()
        return self.done

    def take(self, one: PressedStream, by: TakenBy) -> None:
        """Take the memory of a running request."""
        self.running.remove(one)
        if by is TakenBy.SWAP:
            blocks = self.setup.blocks_of(one.computed)
            self._host -= blocks
            self._moved += blocks
            one.swapped = one.computed
        self._frees(one)
        self._before[one] = max(one.computed, self._before.get(one, 0))
        one.computed = 0
        one.preemptions += 1
        one.parked_s = self.now_s
        self.waiting.insert(0, one)
        self.way.preempted(self)

    def arrives(self, asked: PressedRequest) -> PressedStream:
        """Queue a request.

        Raises:
            ValueError: It is larger than the memory.
        """
        if self.setup.blocks_of(asked.prompt + asked.most) > self.setup.blocks:
            raise ValueError(f"{asked.name} does not fit into {self.setup.blocks} blocks")
        policy = self.tiers[asked.tier]
        one = PressedStream(asked, self.tiers.rank(asked.tier), policy.weight)
        if asked.has_first:
            one.token_s.append(asked.at_s)
        self.waiting.append(one)
        return one

    def pulled(self, one: PressedStream) -> None:
        """The KV of a request's prompt is here; it is in the next step."""
        self.pulling.remove(one)
        self.running.append(one)
        one.computed = one.length - 1

    def withdraw(self, one: PressedStream) -> None:
        """Forget a request that does not run: its KV will not come."""
        if one in self.pulling:
            self.pulling.remove(one)
            self._frees(one)
        else:
            self.waiting.remove(one)

    def step(self) -> bool:
        """Take a step, at whose end the clock stands then; whether there was anything to compute."""
        self._moved, self._has_taken = 0, False
        self.chunk_tokens = self.way.chunk_tokens(self)
        self.way.relieve(self)
        self._left_out = self.way.leaves_out(self)
        step = self._compose_running()
        if not self._has_taken:
            self._start_waiting(step)
        if not step:
            return False
        streams = [one for one, new in step.items() if one.computed + new == one.length]
        computing = [one for one in step if one.length - one.computed > 1]
        prompt = sum(step[one] for one in computing)
        context = sum(one.computed for one in step)
        decoding = len(step) - len(computing)
        batch = frozenset(step)
        moved, self._batch = len(batch ^ self._batch), batch
        step_s = self.setup.model.step_s(decoding, context) + prompt * self.setup.prompt_token_s
        step_s += moved * self.setup.moved_s
        step_s *= self._slowness.factor(self.now_s)
        self.way.stepped(StepShape(decoding, context, prompt, moved), step_s)
        self.now_s += step_s + self._moved * self.setup.block_s
        self.now_s, self.added_s = self.now_s + self.added_s, 0.0
        for one, new in step.items():
            before = self._before.get(one, 0)
            self.again += max(0, min(before, one.computed + new) - one.computed)
            self.computed += new
            one.computed += new
            self._before[one] = max(before, one.computed)
        for one in streams:
            one.token_s.append(self.now_s)
            if one.emitted >= one.asked.answer:
                self._ends(one)
        return True

    def _compose_running(self) -> dict[PressedStream, int]:
        """Those that run, with blocks for their next tokens."""
        step: dict[PressedStream, int] = {}
        budget = self.setup.step_tokens
        for one in [one for one in self.running if one not in self._left_out]:
            while one in self.running and self.next_blocks(one) > self.free_blocks:
                victim = self.way.victim(self)
                self._has_taken = True
                step.pop(victim, None)
                self.take(victim, TakenBy.RECOMPUTE)
            if one in self.running and (new := min(self.next_tokens(one), budget)) > 0:
                self._give(one, new)
                step[one] = new
                budget -= new
        return step

    def _start_waiting(self, step: dict[PressedStream, int]) -> None:
        budget = self.setup.step_tokens - sum(step.values())
        for one in self.way.order(self):
            has_blocks = self.setup.blocks_of(one.length) <= self.free_blocks
            if len(self.running) + len(self.pulling) >= self.setup.max_seqs or budget <= 0 or not has_blocks:
                break
            if not self.way.admits(self, one):
                break
            self.waiting.remove(one)
            if one.parked_s is None and self.pull is not None:
                self._give(one, one.length)
                self.pulling.append(one)
                self.pull(one)
                continue
            self.running.append(one)
            if one.parked_s is not None:
                self._comes_back(one)
            elif self.setup.pulls:
                one.computed = one.length - 1
            one.started, one.parked_s = one.emitted, None
            new = min(self.next_tokens(one), budget)
            self._give(one, new)
            step[one] = new
            budget -= new

    def _comes_back(self, one: PressedStream) -> None:
        """Give one what is still there of its sequence, and what of it is in host memory."""
        self._held[one] = self._free.give_again(one)
        one.computed = self.held(one) * self.setup.block_tokens
        if one.swapped:
            blocks = self.setup.blocks_of(one.swapped)
            self._host += blocks
            self._moved += max(0, blocks - self.held(one))
            one.computed, one.swapped = one.swapped, 0

    def _give(self, one: PressedStream, new: int) -> None:
        needed = self.setup.blocks_of(one.computed + new)
        self._free.give(max(0, needed - self.held(one)))
        self._held[one] = max(needed, self.held(one))

    def _frees(self, one: PressedStream) -> None:
        self._free.come_back(one, self._held.pop(one), one.computed // self.setup.block_tokens)

    def _ends(self, one: PressedStream) -> None:
        self.running.remove(one)
        self._frees(one)
        self._before.pop(one)
        self.done.append(one)
        self.way.ended(one)
