"""vLLM's engine in virtual time, with the scheduler that suspends steps.

Stands in for vLLM's queues, KV blocks and forward pass. What runs next is decided by
`prefill_node.engine.stepping.stepper` from what `prefill_node.engine.queue` sees, as on a server; here is
only what vLLM and `prefill_node.engine.scheduler` do to carry it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from prefill_node.board.messages import SchedulerView, StepView
from prefill_node.engine.queue import QueueView
from prefill_node.engine.stepping.memory import Memory
from prefill_node.engine.stepping.step_choice import ChoiceRules, Resume, Start, Wait
from prefill_node.engine.stepping.stepper import StartOver, Stepper
from prefill_node.engine.stepping.suspension import SuspendedStep
from simulator.cost.passes import CostModel, PassTimes
from simulator.findings import State
from simulator.replica.job import Job
from simulator.replica.prefix_cache import PrefixCache
from slo.predict.prefill_time import attention_pairs
from slo.preemption.types import Limits
from slo.queue.batching import STEP_TOKENS
from slo.queue.fairness import FairnessRule

BLOCK_TOKENS = 16
_SUSPENSION = Limits(max_suspended_s=30.0)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine may do.

    Attributes:
        budget_tokens: Most tokens of one step; a longer prompt is prefilled in chunks.
        suspension: How long and how much may be suspended.
        checkpoint_bytes_per_token: What stopping a step keeps.
    """

    budget_tokens: int = STEP_TOKENS
    kv_tokens: int = 400_000
    suspension: Limits = _SUSPENSION
    checkpoint_bytes_per_token: int = 16_384


class Issued(msgspec.Struct, frozen=True):
    """A step that runs.

    Attributes:
        view: As the scheduler publishes it.
        members: New tokens of each request.
        origin_s: Such that the device is at boundary k at origin_s + times.at_s(k).
    """

    view: StepView
    members: dict[Job, int]
    times: PassTimes
    origin_s: float

    @property
    def ends_s(self) -> float:
        """When it ends if nobody stops it."""
        return self.origin_s + self.times.total_s

    def boundary_after(self, now_s: float, launch_ahead_s: float) -> int:
        """The next boundary at which the host looks for a stop order.

        The host gets to a boundary so many seconds before the device; with 0 it waits until that is there.
        """
        reached = self.times.passed(now_s + launch_ahead_s - self.origin_s)
        return max(reached, self.view.from_boundary - 1) + 1


class _KvBlocks:
    """vLLM's KV cache manager, as far as `QueueView` asks it; prompts share nothing here."""

    def blocks_of(self, request: Job) -> tuple[int, int]:
        """(held, missing) blocks for its whole prompt."""
        return request.blocks, max(0, -(-request.num_tokens // BLOCK_TOKENS) - request.blocks)


class VirtualEngine:
    """Queues, memory and the running step of one replica.

    Attributes:
        requests: Everything that has not ended.
        running: Requests that have started, between chunks or suspended or in the running step.
        waiting: Requests that have not started.
    """

    def __init__(self, cost: CostModel, rules: ChoiceRules, limits: EngineLimits) -> None:
        self.requests: dict[str, Job] = {}
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.kv_cache_manager = _KvBlocks()
        self.issued: Issued | None = None
        self._cost = cost
        self._limits = limits
        self._blocks = max(1, limits.kv_tokens // BLOCK_TOKENS)
        self._free_blocks = self._blocks
        self._stepper = Stepper(rules, limits.suspension)
        self._suspensions = self._stepper.suspensions
        self._queues = QueueView(self, self._stepper)
        self._times: dict[int, PassTimes] = {}
        self._cache = PrefixCache(limits.kv_tokens)
        self._view: SchedulerView | None = None

    @property
    def fairness(self) -> FairnessRule | None:
        """What the order of its queue owes to which class."""
        return self._stepper.rules.fairness

    @property
    def kv_tokens(self) -> int:
        """Tokens that its KV memory holds."""
        return self._blocks * BLOCK_TOKENS

    @property
    def kv_usage(self) -> float:
        """Fraction of the KV blocks in use."""
        return 1.0 - self._free_blocks / self._blocks

    def add(self, job: Job, now_s: float) -> None:
        """A request reaches the engine."""
        self.requests[job.request_id] = job
        self.waiting.append(job)
        prefill = self._queues.arrived(job)
        self._stepper.job_arrived(job.job_id, job.request_id, prefill, now_s)

    def view(self) -> SchedulerView:
        """What the scheduler publishes."""
        if self._view is None:
            self._view = self._stepper.view(self._queues.suspended_views())
        return self._view

    def issue(self, now_s: float) -> Issued | None:
        """Start the next step; None when there is nothing to run."""
        self._view = None
        command = self._next(now_s)
        times: PassTimes | None = None
        from_boundary = 0
        match command:
            case Start(requests, drop_steps=steps, drop_requests=dropped, most_tokens=most_tokens):
                self._start_over([*(name for step in steps for name in step.members), *dropped], now_s)
                members = self._start(requests, int(min(self._limits.budget_tokens, most_tokens)))
            case Resume(step=step):
                members = {self.requests[name]: tokens for name, tokens in step.members.items()}
                from_boundary, times = step.boundary, self._times.pop(step.step_id)
            case Wait():
                return None
        if not members:
            return None
        if times is None or from_boundary == 0:
            times = self._cost.times([(new, job.num_computed_tokens) for job, new in members.items()])
        for job, new in members.items():
            job.num_computed_tokens += new
            job.enter(State.RUNNING, now_s)
        tokens = {job.request_id: new for job, new in members.items()}
        view = self._stepper.step_issued(command, self._queues.members(tokens), now_s)
        origin_s = now_s + times.head_s - times.at_s(from_boundary)
        self.issued = Issued(view, members, times, origin_s)
        return self.issued

    def complete(self, now_s: float) -> list[Job]:
        """The running step has ended; the requests whose prefill is done."""
        self._view = None
        issued, self.issued = self.issued, None
        assert issued is not None
        self._stepper.step_ended(now_s)
        done = []
        for job, new in issued.members.items():
            job.chunks_s += issued.times.total_s * new / issued.view.tokens
            if job.num_computed_tokens >= job.num_tokens:
                done.append(job)
                self._stepper.job_done(job.job_id, now_s)
                job.prefilled_s = now_s
                self.running.remove(job)
                self._cache.put(job.arrival)
            else:
                job.enter(State.WAITING, now_s)
        return done

    def stop(self, now_s: float, boundary: int, beneficiary: str, *, keep: bool) -> None:
        """The running step has stopped at a boundary; `keep` says whether with a checkpoint."""
        self._view = None
        issued, self.issued = self.issued, None
        assert issued is not None
        self._stepper.step_ended(now_s)
        times, members = issued.times, {}
        resumes_at = times.resumes_at(boundary) if keep else 0
        lost_from_s = times.at_s(resumes_at) if keep else times.head_s
        for job, new in issued.members.items():
            job.num_computed_tokens -= new
            job.preemptions += 1
            job.enter(State.SUSPENDED, now_s)
            members[job.request_id] = new
            job.wasted_s += (times.at_s(boundary) - lost_from_s) * new / issued.view.tokens
        kept_bytes = issued.view.tokens * self._limits.checkpoint_bytes_per_token if keep else 0
        view, done = issued.view, times.done(resumes_at)
        stopped = SuspendedStep(
            view.step_id, members, view.pairs, resumes_at, done, kept_bytes, now_s, beneficiary
        )
        self._stepper.step_preempted(stopped, now_s)
        self._times[view.step_id] = times

    def release(self, job: Job) -> None:
        """A request's KV blocks are needed no longer: they have been pulled, or nobody wants them."""
        self._view = None
        self._free_blocks += job.blocks
        job.blocks = 0
        self._stepper.job_left(job.job_id, job.request_id)
        self.requests.pop(job.request_id, None)

    def _next(self, now_s: float) -> Start | Resume | Wait:
        while True:
            queue, suspended = self._queues.queued(), self._queues.suspended(now_s)
            memory = Memory(self._blocks - self._free_blocks)
            command = self._stepper.next_step(queue, suspended, self._free_blocks, now_s, memory=memory)
            if not isinstance(command, StartOver):
                return command
            self._start_over(command.requests, now_s)

    def _start(self, names: Sequence[str], budget: int) -> dict[Job, int]:
        """Compose the step as vLLM does from what it is shown: those under way first, up to the budget."""
        jobs = [self.requests[name] for name in names]
        members: dict[Job, int] = {}
        for job in sorted(jobs, key=lambda job: not job.started):
            if not job.started:
                job.hit_tokens = job.num_computed_tokens = self._cache.hit_tokens(job.arrival)
            new = min(job.num_tokens - job.num_computed_tokens, budget)
            if new <= 0 or not self._allocate(job, job.num_computed_tokens + new):
                break
            if not job.started:
                job.started = True
                self.waiting.remove(job)
                self.running.append(job)
            budget -= new
            members[job] = new
        return members

    def cached_tokens(self, job: Job) -> int:
        """How much of a prompt the prefix cache holds; at least one token always remains."""
        return self._cache.held_tokens(job.arrival)

    def _allocate(self, job: Job, tokens: int) -> bool:
        missing = math.ceil(tokens / BLOCK_TOKENS) - job.blocks
        if missing > self._free_blocks:
            return False
        self._free_blocks -= missing
        job.blocks += missing
        return True

    def _start_over(self, names: Iterable[str], now_s: float) -> None:
        """Take the KV blocks of requests that have started."""
        for job in [self.requests[name] for name in names]:
            if (step := self._suspensions.step_of(job.request_id)) is not None:
                times = self._times[step.step_id]
                job.wasted_s += times.at_s(step.boundary) * step.members[job.request_id] / step.tokens
                pairs = attention_pairs(step.members[job.request_id], job.num_computed_tokens)
                self._suspensions.forget(job.request_id, now_s, pairs)
            job.wasted_s += job.chunks_s
            job.chunks_s = 0.0
            self._free_blocks += job.blocks
            job.blocks = job.num_computed_tokens = 0
            job.started = False
            self.running.remove(job)
            self.waiting.append(job)
            self._stepper.started_over(self._queues.item(job))
            job.enter(State.WAITING, now_s)
