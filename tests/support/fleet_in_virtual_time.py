"""A prefill fleet in virtual time: the real router core in front of replicas that follow the real rules."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count

from router.core import RouterCore
from router.messages import Placed, PlacementRequested
from slo.objectives import Objective
from slo.predict.prefill_time import PrefillPredictor
from slo.queue.batching import Candidate, compose_step
from slo.queue.slack import NO_DEADLINE, sedf_rank
from slo.reports import DecodeReported, OutstandingJob, PrefillReported
from slo.request import JobId, ReplicaId
from slo.tiers import Tier, TierPolicy

STEP_TOKENS = 8192


@dataclass(frozen=True)
class Arrival:
    at_s: float
    tokens: int
    tier: Tier
    ttft_s: float | None


@dataclass
class Replica:
    replica_id: ReplicaId
    predictor: PrefillPredictor
    waiting: dict[JobId, tuple[Arrival, float]] = field(default_factory=dict)
    running: dict[JobId, tuple[Arrival, float]] = field(default_factory=dict)
    started_s: float = 0.0

    def start_step(self, now_s: float) -> float:
        """Move the next step's prefills to running; when it will end."""
        ranked = sorted(
            self.waiting,
            key=lambda job: sedf_rank(
                self.waiting[job][1],
                now_s,
                self.predictor.prefill_s(self.waiting[job][0].tokens),
                self.waiting[job][0].at_s,
            ),
        )
        candidates = [Candidate(self.waiting[job][0].tokens, self.waiting[job][1]) for job in ranked]
        step = compose_step(candidates, now_s, self.predictor, STEP_TOKENS)
        self.running = {job: self.waiting.pop(job) for job in ranked[: step.size]}
        self.started_s = now_s
        return now_s + self.predictor.prefill_s(sum(job.tokens for job, _ in self.running.values()))

    def report(self, now_s: float, ended: tuple[JobId, ...] = ()) -> PrefillReported:
        jobs = {**self.running, **self.waiting}
        return PrefillReported(
            self.replica_id,
            self.predictor,
            tuple(
                OutstandingJob(job, arrival.tier, arrival.tokens, None if due == NO_DEADLINE else due - now_s)
                for job, (arrival, due) in jobs.items()
            ),
            next(iter(self.running), None),
            now_s - self.started_s if self.running else 0.0,
            ended=ended,
        )


@dataclass(frozen=True)
class Result:
    on_time: dict[Tier, int]
    total: dict[Tier, int]
    rejected: int

    def attainment(self, tier: Tier | None = None) -> float:
        tiers = list(self.total) if tier is None else [tier]
        return sum(self.on_time[t] for t in tiers) / max(1, sum(self.total[t] for t in tiers))


def run(
    arrivals: list[Arrival],
    core: RouterCore,
    replicas: list[Replica],
    policies: dict[Tier, TierPolicy],
) -> Result:
    """Play `arrivals` against the fleet; a rejected request counts as late."""
    fleet = {replica.replica_id: replica for replica in replicas}
    for replica in replicas:
        core.prefill_reported(replica.report(0.0), 0.0)
    core.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0), 0.0)
    order = count()
    events: list[tuple[float, int, object]] = [(a.at_s, next(order), a) for a in arrivals]
    heapq.heapify(events)
    on_time = dict.fromkeys(policies, 0)
    total = dict.fromkeys(policies, 0)
    rejected = 0
    while events:
        now_s, number, event = heapq.heappop(events)
        core.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0), now_s)
        for replica in replicas:
            core.prefill[replica.replica_id].reported_at_s = now_s
        if isinstance(event, Arrival):
            total[event.tier] += 1
            job = JobId(f"job-{number}")
            objective = Objective(event.tier, event.ttft_s, None)
            decision = core.place(PlacementRequested(job, objective, False, event.tokens, 0), now_s)
            if not isinstance(decision, Placed):
                rejected += 1
                continue
            replica = fleet[decision.prefill_replica]
            due_s = NO_DEADLINE if event.ttft_s is None else now_s + event.ttft_s
            replica.waiting[job] = (event, due_s)
            ended: tuple[JobId, ...] = ()
        else:
            replica = fleet[event]  # type: ignore[index]
            for arrival, due_s in replica.running.values():
                on_time[arrival.tier] += now_s <= due_s
            ended = tuple(replica.running)
            replica.running = {}
        if not replica.running and replica.waiting:
            heapq.heappush(events, (replica.start_step(now_s), next(order), replica.replica_id))
        core.prefill_reported(replica.report(now_s, ended), now_s)
    return Result(on_time, total, rejected)
