"""The router's view of one prefill replica: what it has to do and how fast it does it.

Owns the bookkeeping of outstanding prefills; what the replica makes of them is predicted by
`router.fleet.queue_forecast`. All times are seconds on the router's monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from router.fleet.queue_forecast import OutstandingWork
from slo.model_digest import UNTOLD, ModelDigest
from slo.predict.prefill_time import PrefillPredictor
from slo.queue.prefill import Prefill
from slo.request import JobId, ReplicaId
from slo.tiers import Tier, weight_of


class PlacedJob(msgspec.Struct, frozen=True):
    """A prefill that a replica has been given and has not finished.

    Attributes:
        tokens: Prompt tokens, estimated until the replica knows them.
        deadline_s: When its prefill must end; infinite for none.
        placed_at_s: When the router learned of it.
        cached_tokens: Of the tokens, those that the replica's prefix cache is expected to hold.
        work_s: The replica's own prediction of its work; None before it has said so.
    """

    job_id: JobId
    tier: Tier
    tokens: int
    deadline_s: float
    placed_at_s: float
    cached_tokens: int = 0
    work_s: float | None = None


@dataclass(slots=True)
class _Queue:
    """What waits on a replica, and what ends with its running pass.

    Attributes:
        riders: In the running pass, the one that stands for it first.
        due: Those that wait and have a deadline.
        undue: Work of those that wait and have none, of which only the sum counts.
        undue_s: That sum.
    """

    riders: list[PlacedJob] = field(default_factory=list)
    due: dict[JobId, Prefill] = field(default_factory=dict)
    undue: dict[JobId, float] = field(default_factory=dict)
    undue_s: float = 0.0

    def add(self, job: PlacedJob, work_s: float, weights: dict[Tier, float]) -> None:
        """One more waits."""
        if job.deadline_s == math.inf:
            self.undue[job.job_id] = work_s
            self.undue_s += work_s
        else:
            weight = weight_of(weights, job.tier)
            self.due[job.job_id] = Prefill(job.job_id, weight, job.deadline_s, work_s, job.placed_at_s)

    def remove(self, job_id: JobId) -> bool:
        """Take one away; False when it does not wait."""
        if (work_s := self.undue.pop(job_id, None)) is None:
            return self.due.pop(job_id, None) is not None
        self.undue_s = self.undue_s - work_s if self.undue else 0.0
        return True


@dataclass(slots=True, eq=False)
class PrefillView:
    """One prefill replica, which runs one forward pass at a time.

    Attributes:
        confirmed: The jobs that its last report named; any other is still on its way there.
        placed_again: Jobs that were placed there once more while it had them. Until the end of the earlier
            attempt is told, nobody knows which of the two a report names: they are not `confirmed`.
        preemptible_in_s: How soon the running pass makes way for a prefill that would otherwise be late: by a
            stop, or by its end where more of its prompts lies behind it; None when it does not.
        draining: Whether it is being shut down; nothing is placed there any more.
        version: Grows with every change of its work.
        digest: Of the model that it serves.
        unlearned: See `PrefillReported`.
    """

    replica_id: ReplicaId
    predictor: PrefillPredictor
    reported_at_s: float
    weights: dict[Tier, float]
    jobs: dict[JobId, PlacedJob] = field(default_factory=dict)
    confirmed: set[JobId] = field(default_factory=set)
    placed_again: set[JobId] = field(default_factory=set)
    running: JobId | None = None
    running_since_s: float = 0.0
    preemptible_in_s: float | None = None
    kv_usage: float = 0.0
    draining: bool = False
    version: int = 0
    outstanding_tokens: int = 0
    digest: ModelDigest = UNTOLD
    unlearned: PrefillPredictor | None = None
    _queue: _Queue | None = None

    def add(self, job: PlacedJob) -> None:
        """Give it one more prefill."""
        had_it = job.job_id in self.confirmed or job.job_id in self.placed_again
        self.remove(job.job_id)
        if had_it:
            self.confirmed.discard(job.job_id)
            self.placed_again.add(job.job_id)
        self.jobs[job.job_id] = job
        self.outstanding_tokens += job.tokens
        self.version += 1
        if self._queue is not None:
            self._queue.add(job, self.work_s(job), self.weights)

    def remove(self, job_id: JobId) -> PlacedJob | None:
        """Take a prefill away; None when it does not have it."""
        job = self.jobs.pop(job_id, None)
        if job is None:
            return None
        self.placed_again.discard(job_id)
        self.outstanding_tokens -= job.tokens
        self.version += 1
        if job_id == self.running:
            self.running = None
        if self._queue is not None and not self._queue.remove(job_id):
            self._queue = None
        return job

    def earlier_ended(self, ended: Sequence[JobId]) -> set[JobId]:
        """Of the jobs that have ended here, those of which the latest attempt is still to come."""
        told = self.placed_again.intersection(ended)
        self.placed_again -= told
        return {job_id for job_id in told if ended.count(job_id) == 1}

    def replace(self, jobs: Iterable[PlacedJob], running: JobId | None, running_since_s: float) -> None:
        """Take the replica's own word for what it has to do."""
        self.jobs = {job.job_id: job for job in jobs}
        self.placed_again &= self.jobs.keys()
        self.running = running if running in self.jobs else None
        self.running_since_s = running_since_s
        self.outstanding_tokens = sum([job.tokens for job in self.jobs.values()])
        self.version += 1
        self._queue = None

    def work_s(self, job: PlacedJob) -> float:
        """Predicted seconds of a job's work: what it adds to passes that it shares."""
        if job.work_s is not None:
            return job.work_s
        return self.predictor.work_s(job.tokens - job.cached_tokens, job.cached_tokens)

    def backlog_s(self, now_s: float) -> float:
        """Predicted seconds until everything that it has been given is done."""
        queue = self._split()
        return self._busy_s(now_s) + sum([one.remaining_s for one in queue.due.values()]) + queue.undue_s

    def outstanding(self, now_s: float) -> OutstandingWork:
        """Its work as `router.fleet.queue_forecast` takes it."""
        queue = self._split()
        busy_s = self._busy_s(now_s)
        runner = None if self.running is None else self._runner(queue.riders, now_s, busy_s)
        stops_at_s = None
        if runner is not None and self.preemptible_in_s is not None and self.preemptible_in_s < busy_s:
            stops_at_s = now_s + self.preemptible_in_s
        waiting = [*queue.due.values()]
        return OutstandingWork(waiting, runner, now_s + busy_s, stops_at_s, queue.undue_s)

    def _busy_s(self, now_s: float) -> float:
        if self.running is None:
            return 0.0
        took_s = self.work_s(self.jobs[self.running])
        return max(0.0, self.running_since_s + took_s - now_s)

    def _split(self) -> _Queue:
        """Those that wait, and those that end with the running pass."""
        if self._queue is None:
            self._queue = queue = _Queue()
            for job in self.jobs.values():
                if job.job_id == self.running:
                    queue.riders.insert(0, job)
                elif self.running is not None and job.tokens == 0 and not (queue.due or queue.undue):
                    queue.riders.append(job)  # behind the first that waits stand members of suspended steps
                else:
                    queue.add(job, self.work_s(job), self.weights)
        return self._queue

    def _runner(self, riders: list[PlacedJob], now_s: float, busy_s: float) -> Prefill:
        """The running pass as one prefill; late if all in it are."""
        on_time = [job for job in riders if now_s + busy_s <= job.deadline_s]
        first = min(on_time or riders, key=lambda job: job.deadline_s)
        weight = sum(weight_of(self.weights, job.tier) for job in on_time)
        return Prefill(first.job_id, weight, first.deadline_s, busy_s, first.placed_at_s)
