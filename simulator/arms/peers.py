"""Schedulers to compare with: what other servers do, not what ours does.

Whole prompts or chunks, first come first served or by S-EDF, composed as vLLM composes a step: in order of
the queue, up to a budget of tokens, the last prompt cut where it ends.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from simulator.cost.passes import CostModel
from simulator.findings import State
from simulator.replica.job import Job
from simulator.replica.loop import EventLoop
from simulator.replica.prefix_cache import PrefixCache
from slo.predict.prefill_time import PrefillPredictor
from slo.queue.slack import SlackRank, sedf_rank
from slo.tiers import DEFAULT_TIERS, TierSet


class PeerOrder(enum.StrEnum):
    """Who goes first."""

    FCFS = "fcfs"
    SEDF = "sedf"
    TIER = "tier"


@dataclass(frozen=True, slots=True)
class PeerRules:
    """How a peer schedules.

    Attributes:
        budget_tokens: Most tokens of a step.
        chunked: Whether a prompt is cut at the budget; otherwise it runs whole, alone if it is longer.
        kv_tokens: Tokens that its prefix cache holds.
        tiers: For `PeerOrder.TIER`.
    """

    order: PeerOrder
    predictor: PrefillPredictor
    budget_tokens: int
    chunked: bool
    kv_tokens: int = 400_000
    tiers: TierSet = DEFAULT_TIERS


class ComparedReplica:
    """What the replicas that do not run our code have in common: a queue on a device.

    Attributes:
        blocking_s: Of each stop, from the decision to standstill.
    """

    def __init__(self, loop: EventLoop, cost: CostModel, prefilled: Callable[[Job], None]) -> None:
        self.blocking_s: list[float] = []
        self.busy_s = 0.0
        self._loop = loop
        self._cost = cost
        self._prefilled = prefilled
        self._queue: list[Job] = []

    def release(self, job: Job) -> None:
        """The KV of a prefilled request has left."""


class PeerReplica(ComparedReplica):
    """One prefill replica of a peer; it stops nothing."""

    def __init__(
        self, loop: EventLoop, cost: CostModel, rules: PeerRules, prefilled: Callable[[Job], None]
    ) -> None:
        super().__init__(loop, cost, prefilled)
        self._rules = rules
        self._step: dict[Job, int] | None = None
        self._cache = PrefixCache(rules.kv_tokens)

    def arrive(self, job: Job) -> None:
        """Take a request."""
        self._queue.append(job)
        job.expect_cached(self._cache.held_tokens(job.arrival))
        job.enter(State.WAITING, self._loop.now_s)
        if self._step is None:
            self._issue()

    def _issue(self) -> None:
        step = self._compose()
        if not step:
            return
        now_s = self._loop.now_s
        times = self._cost.times([(new, job.num_computed_tokens) for job, new in step.items()])
        for job, new in step.items():
            job.num_computed_tokens += new
            job.enter(State.RUNNING, now_s)
        self._step = step
        self.busy_s += times.total_s
        self._loop.call_at(now_s + times.total_s, self._complete)

    def _complete(self) -> None:
        step, self._step = self._step, None
        assert step is not None
        now_s = self._loop.now_s
        for job in step:
            if job.num_computed_tokens < job.num_tokens:
                job.enter(State.WAITING, now_s)
                continue
            job.prefilled_s = now_s
            self._queue.remove(job)
            self._cache.put(job.arrival)
            self._prefilled(job)
        if self._step is None:
            self._issue()

    def _compose(self) -> dict[Job, int]:
        budget = self._rules.budget_tokens
        step: dict[Job, int] = {}
        for job in self._ordered():
            done = job.num_computed_tokens if job.started else self._cache.held_tokens(job.arrival)
            left = job.num_tokens - done
            if left > budget and not self._rules.chunked and step:
                break
            self._take_prefix(job)
            step[job] = min(left, budget) if self._rules.chunked else left
            budget -= step[job]
            if budget <= 0:
                break
        return step

    def _ordered(self) -> list[Job]:
        match self._rules.order:
            case PeerOrder.FCFS:
                return self._queue
            case PeerOrder.TIER:
                rank_of = self._rules.tiers.rank
                return sorted(self._queue, key=lambda job: (-rank_of(job.arrival.tier), job.arrival.at_s))
            case PeerOrder.SEDF:
                return self._by_slack()
            case _:
                assert_never(self._rules.order)

    def _by_slack(self) -> list[Job]:
        now_s, predict = self._loop.now_s, self._rules.predictor.prefill_s

        def rank(job: Job) -> SlackRank:
            done = job.num_computed_tokens or job.cached_tokens
            return sedf_rank(job.deadline_s, now_s, predict(job.num_tokens - done, done), job.arrival.at_s)

        return sorted(self._queue, key=rank)

    def _take_prefix(self, job: Job) -> None:
        if job.started:
            return
        job.started = True
        job.num_computed_tokens = self._cache.hit_tokens(job.arrival)
