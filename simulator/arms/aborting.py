"""The abort-and-recompute variant of vLLM that a blog measured without gain, and its conditions.

A pass that is preempted loses its work. The variant orders its queue by S-EDF, fills a pass up to a
budget with whole prompts, and looks for an order to abort at each layer. Its conditions can be lifted.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulator.arms.peers import ComparedReplica
from simulator.cost.passes import CostModel, PassTimes
from simulator.findings import State
from simulator.replica.job import Job
from simulator.replica.loop import EventLoop
from slo.predict.prefill_time import PrefillPredictor
from slo.queue.slack import SlackRank, sedf_rank


class AbortPolicy(enum.StrEnum):
    """Whether a pass is never aborted, or for a request more urgent than all of it, or than one of it."""

    CONTROL = "control"
    CONSERVATIVE = "conservative"
    AGGRESSIVE = "aggressive"


@dataclass(frozen=True, slots=True)
class AbortRules:
    """How the variant schedules.

    Attributes:
        sees_arrivals: Whether what arrives during a pass can stop it, or only what waited when it began.
        separates_victims: Whether a pass for those who preempted leaves their victims out.
        credits_progress: Whether the work still to do counts in the slack of what runs, or the whole prefill.
    """

    policy: AbortPolicy
    predictor: PrefillPredictor
    budget_tokens: int = 8192
    sees_arrivals: bool = False
    separates_victims: bool = False
    credits_progress: bool = False


@dataclass(slots=True)
class _Pass:
    members: list[Job]
    times: PassTimes
    since_s: float
    stopping: bool = False


class AbortingReplica(ComparedReplica):
    """One prefill replica of the variant."""

    def __init__(
        self, loop: EventLoop, cost: CostModel, rules: AbortRules, prefilled: Callable[[Job], None]
    ) -> None:
        super().__init__(loop, cost, prefilled)
        self._rules = rules
        self._pass: _Pass | None = None

    def arrive(self, job: Job) -> None:
        """Take a request."""
        self._queue.append(job)
        job.enter(State.WAITING, self._loop.now_s)
        if self._pass is None:
            self._issue(())
        elif self._rules.sees_arrivals:
            self._reconsider()

    def _rank(self, job: Job, done: float = 0.0) -> SlackRank:
        left_s = self._rules.predictor.prefill_s(job.num_tokens)
        if self._rules.credits_progress:
            left_s *= 1 - done
        return sedf_rank(job.deadline_s, self._loop.now_s, left_s, job.arrival.at_s)

    def _issue(self, victims: Sequence[Job]) -> None:
        ordered = sorted(self._queue, key=self._rank)
        if victims and self._rules.separates_victims:
            others = [job for job in ordered if job not in victims]
            best = min(map(self._rank, victims))
            ordered = [job for job in others if self._rank(job) < best] or ordered
        members: list[Job] = []
        budget = self._rules.budget_tokens
        for job in ordered:
            if members and job.num_tokens > budget:
                break
            members.append(job)
            budget -= job.num_tokens
        if not members:
            return
        now_s = self._loop.now_s
        for job in members:
            self._queue.remove(job)
            job.enter(State.RUNNING, now_s)
        times = self._cost.times([(job.num_tokens, 0) for job in members])
        self._pass = issued = _Pass(members, times, now_s)
        self._loop.call_at(now_s + times.total_s, self._complete, issued)
        self._reconsider()

    def _complete(self, issued: _Pass) -> None:
        if self._pass is not issued or issued.stopping:
            return
        now_s = self._loop.now_s
        self._pass = None
        self.busy_s += now_s - issued.since_s
        for job in issued.members:
            job.prefilled_s = now_s
            self._prefilled(job)
        self._issue(())

    def _reconsider(self) -> None:
        issued, policy = self._pass, self._rules.policy
        if issued is None or issued.stopping or not self._queue or policy is AbortPolicy.CONTROL:
            return
        now_s = self._loop.now_s
        done = (now_s - issued.since_s) / issued.times.total_s
        ranks = [self._rank(job, done) for job in issued.members]
        rival = min(ranks) if policy is AbortPolicy.CONSERVATIVE else max(ranks)
        if min(map(self._rank, self._queue)) >= rival:
            return
        boundary = issued.times.passed(now_s - issued.since_s) + 1
        if boundary < issued.times.boundaries:
            issued.stopping = True
            self._loop.call_at(issued.since_s + issued.times.at_s(boundary), self._abort, issued, now_s)

    def _abort(self, issued: _Pass, ordered_s: float) -> None:
        now_s = self._loop.now_s
        self.blocking_s.append(now_s - ordered_s)
        self.busy_s += now_s - issued.since_s
        self._pass = None
        for job in issued.members:
            job.preemptions += 1
            job.wasted_s += (now_s - issued.since_s) / len(issued.members)
            job.enter(State.WAITING, now_s)
        self._queue.extend(issued.members)
        self._issue(issued.members)
