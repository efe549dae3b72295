"""The router's view of the replicas: what each one has to do and how fast it does it.

Owns the bookkeeping of outstanding prefills and the arithmetic on one replica's queue. Does not choose
between replicas (see `router.placement.policies`). All times are seconds on the router's monotonic clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from router.fleet.queue_forecast import Workload
from slo.queue.prefill import Prefill
from slo.queue.slack import NO_DEADLINE, SlackRank, sedf_rank

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slo.predict.prefill_time import PrefillPredictor
    from slo.request import JobId, ReplicaId
    from slo.tiers import Tier


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


class Fit(msgspec.Struct, frozen=True):
    """What placing a new prefill on a replica would lead to.

    Attributes:
        end_s: When the new prefill would end.
        lateness_s: Weighted seconds of lateness that it adds, its own and that of those behind it.
    """

    end_s: float
    lateness_s: float


@dataclass(slots=True, eq=False)
class PrefillReplica:
    """One prefill replica as its outstanding work.

    The replica runs one forward pass at a time. What it makes of its work is predicted by
    `router.fleet.queue_forecast` from `workload`. `fit` and `end_s` are the cheaper prediction of
    `LeastSlackLoss`: the waiting prefill that ranks first by slack (`slo.queue.slack.sedf_rank`) runs first
    and nobody is given up; the order is that of the last change.

    Attributes:
        confirmed: The jobs that its last report named; any other is still on its way there.
        preemptible_in_s: How soon the running pass would make way for a prefill that would otherwise be late;
            None when it would not.
        draining: Whether it is being shut down; nothing is placed there any more.
        version: Grows with every change of its work.
    """

    replica_id: ReplicaId
    predictor: PrefillPredictor
    reported_at_s: float
    weights: dict[Tier, float]
    jobs: dict[JobId, PlacedJob] = field(default_factory=dict)
    confirmed: set[JobId] = field(default_factory=set)
    running: JobId | None = None
    running_since_s: float = 0.0
    preemptible_in_s: float | None = None
    kv_usage: float = 0.0
    draining: bool = False
    version: int = 0
    outstanding_tokens: int = 0
    _changed_at_s: float | None = None
    _prefills: tuple[list[Prefill], list[PlacedJob]] | None = None
    _queue: list[PlacedJob] = field(default_factory=list)
    _ranks: list[SlackRank] = field(default_factory=list)
    _work_before_s: list[float] = field(default_factory=lambda: [0.0])
    _min_room_s: list[float] = field(default_factory=lambda: [math.inf])

    def add(self, job: PlacedJob, now_s: float) -> None:
        """Give it one more prefill."""
        self.jobs[job.job_id] = job
        self._changed(now_s)

    def remove(self, job_id: JobId, now_s: float) -> PlacedJob | None:
        """Take a prefill away; None when it does not have it."""
        job = self.jobs.pop(job_id, None)
        if job is not None:
            self._changed(now_s)
        return job

    def replace(
        self, jobs: Iterable[PlacedJob], running: JobId | None, running_since_s: float, now_s: float
    ) -> None:
        """Take the replica's own word for what it has to do."""
        self.jobs = {job.job_id: job for job in jobs}
        self.running = running if running in self.jobs else None
        self.running_since_s = running_since_s
        self._changed(now_s)

    def work_s(self, job: PlacedJob) -> float:
        """Predicted seconds of a job's work, alone."""
        if job.work_s is not None:
            return job.work_s
        return self.predictor.prefill_s(job.tokens - job.cached_tokens, job.cached_tokens)

    def backlog_s(self, now_s: float) -> float:
        """Predicted seconds until everything that it has been given is done."""
        waiting, _ = self._split()
        return self._busy_s(now_s) + sum(prefill.remaining_s for prefill in waiting)

    def free_at_s(self, now_s: float) -> float:
        """When the running pass ends."""
        return now_s + self._busy_s(now_s)

    def workload(self, now_s: float) -> Workload:
        """Its work as `router.fleet.queue_forecast` takes it."""
        waiting, riders = self._split()
        busy_s = self._busy_s(now_s)
        runner = None if self.running is None else self._runner(riders, now_s, busy_s)
        stops_at_s = None
        if runner is not None and self.preemptible_in_s is not None and self.preemptible_in_s < busy_s:
            stops_at_s = now_s + self.preemptible_in_s
        return Workload(waiting, runner, now_s + busy_s, stops_at_s)

    def end_s(self, tokens: int, deadline_s: float, now_s: float) -> float:
        """When a prefill of `tokens` due at `deadline_s` would end if it were added now."""
        self._reorder()
        position = self._position(tokens, deadline_s, now_s)
        work_s = self._work_before_s[position] + self.predictor.prefill_s(tokens)
        return self._free_at_s(work_s, deadline_s, now_s) + work_s

    def fit(
        self, tokens: int, deadline_s: float, weight: float, now_s: float, enough_s: float = math.inf
    ) -> Fit:
        """What happens if a prefill of `tokens` due at `deadline_s` is added now.

        Args:
            tokens: Its length.
            deadline_s: When it must end, infinite for never.
            weight: Worth of its own lateness.
            now_s: The time.
            enough_s: Lateness beyond which the caller does not care how much it is.
        """
        self._reorder()
        own_s = self.predictor.prefill_s(tokens)
        position = self._position(tokens, deadline_s, now_s)
        work_s = self._work_before_s[position] + own_s
        end_s = self._free_at_s(work_s, deadline_s, now_s) + work_s
        free_at_s = now_s + self._busy_s(now_s)
        lateness_s = weight * max(0.0, end_s - deadline_s) if deadline_s < NO_DEADLINE else 0.0
        if end_s < free_at_s + work_s:
            lateness_s += self._runner_lateness_s(free_at_s, work_s)
        if lateness_s <= enough_s and self._min_room_s[position] - free_at_s < own_s:
            lateness_s = self._with_harm_s(lateness_s, enough_s, position, free_at_s, own_s)
        return Fit(end_s, lateness_s)

    def _rank(self, job: PlacedJob, now_s: float) -> SlackRank:
        return sedf_rank(job.deadline_s, now_s, self.work_s(job), job.placed_at_s)

    def _position(self, tokens: int, deadline_s: float, now_s: float) -> int:
        rank = sedf_rank(deadline_s, now_s, self.predictor.prefill_s(tokens), now_s)
        return bisect_right(self._ranks, rank)

    def _busy_s(self, now_s: float) -> float:
        if self.running is None:
            return 0.0
        took_s = self.work_s(self.jobs[self.running])
        return max(0.0, self.running_since_s + took_s - now_s)

    def _free_at_s(self, work_s: float, deadline_s: float, now_s: float) -> float:
        """When the running pass ends, or makes way if `work_s` would otherwise end after `deadline_s`."""
        busy_s = self._busy_s(now_s)
        late = deadline_s < NO_DEADLINE and now_s + busy_s + work_s > deadline_s
        if (
            late
            and self.preemptible_in_s is not None
            and now_s + self.preemptible_in_s + work_s <= deadline_s
        ):
            return now_s + self.preemptible_in_s
        return now_s + busy_s

    def _runner_lateness_s(self, end_s: float, delay_s: float) -> float:
        """Weighted lateness that the running job gets if its pass, due to end at `end_s`, makes way."""
        assert self.running is not None
        runner = self.jobs[self.running]
        if runner.deadline_s == NO_DEADLINE:
            return 0.0
        room_s = max(0.0, runner.deadline_s - end_s)
        return self.weights[runner.tier] * max(0.0, delay_s - room_s)

    def _with_harm_s(
        self, lateness_s: float, enough_s: float, position: int, free_at_s: float, delay_s: float
    ) -> float:
        """`lateness_s` plus what is added to the jobs from `position` on if each ends `delay_s` later."""
        for index in range(position, len(self._queue)):
            job = self._queue[index]
            if lateness_s > enough_s:
                break
            if job.deadline_s == NO_DEADLINE:
                continue
            room_s = job.deadline_s - free_at_s - self._work_before_s[index + 1]
            if room_s < delay_s:
                lateness_s += self.weights[job.tier] * (delay_s - max(0.0, room_s))
        return lateness_s

    def _changed(self, now_s: float) -> None:
        if self.running not in self.jobs:
            self.running = None
        self.version += 1
        self.outstanding_tokens = sum([job.tokens for job in self.jobs.values()])
        self._changed_at_s = now_s
        self._prefills = None

    def _split(self) -> tuple[list[Prefill], list[PlacedJob]]:
        """Those that wait, and those that end with the running pass, the one that stands for it first."""
        if self._prefills is None:
            waiting: list[Prefill] = []
            riders: list[PlacedJob] = []
            for job in self.jobs.values():
                if job.job_id == self.running:
                    riders.insert(0, job)
                elif self.running is not None and job.tokens == 0:
                    riders.append(job)
                else:
                    waiting.append(
                        Prefill(
                            job.job_id,
                            self.weights[job.tier],
                            job.deadline_s,
                            self.work_s(job),
                            job.placed_at_s,
                        )
                    )
            self._prefills = waiting, riders
        return self._prefills

    def _runner(self, riders: list[PlacedJob], now_s: float, busy_s: float) -> Prefill:
        """The running pass as one prefill; late if all in it are."""
        on_time = [job for job in riders if now_s + busy_s <= job.deadline_s]
        first = min(on_time or riders, key=lambda job: job.deadline_s)
        weight = sum(self.weights[job.tier] for job in on_time)
        return Prefill(first.job_id, weight, first.deadline_s, busy_s, first.placed_at_s)

    def _reorder(self) -> None:
        """Bring the order by slack up to date with the last change."""
        if self._changed_at_s is None:
            return
        now_s, self._changed_at_s = self._changed_at_s, None
        ranked = sorted(
            ((self._rank(job, now_s), job) for job in self.jobs.values() if job.job_id != self.running),
            key=lambda pair: pair[0],
        )
        queue = [job for _, job in ranked]
        work_s = 0.0
        work_before_s = [0.0]
        for job in queue:
            work_s += self.work_s(job)
            work_before_s.append(work_s)
        min_room_s = [math.inf] * (len(queue) + 1)
        for index in range(len(queue) - 1, -1, -1):
            room_s = queue[index].deadline_s - work_before_s[index + 1]
            min_room_s[index] = min(min_room_s[index + 1], room_s)
        self._queue = queue
        self._ranks = [rank for rank, _ in ranked]
        self._work_before_s = work_before_s
        self._min_room_s = min_room_s
