"""The router's view of the replicas: what each one has to do and how fast it does it.

Owns the bookkeeping of outstanding prefills and the arithmetic on one replica's queue. Does not choose
between replicas (see `router.placement`). All times are seconds on the router's monotonic clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slo.slack import NO_DEADLINE, SlackRank, sedf_rank

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slo.predictor import PrefillPredictor
    from slo.request import JobId, ReplicaId
    from slo.tiers import Tier


@dataclass(frozen=True, slots=True)
class PlacedJob:
    """A prefill that a replica has been given and has not finished.

    Attributes:
        tokens: Prompt tokens, estimated until the replica knows them.
        deadline_s: When its prefill must end; infinite for none.
        placed_at_s: When the router learned of it.
    """

    job_id: JobId
    tier: Tier
    tokens: int
    deadline_s: float
    placed_at_s: float


@dataclass(frozen=True, slots=True)
class Fit:
    """What placing a new prefill on a replica would lead to.

    Attributes:
        end_s: When the new prefill would end.
        lateness_s: Weighted seconds of lateness that it adds, its own and that of those behind it.
    """

    end_s: float
    lateness_s: float


@dataclass(slots=True)
class PrefillReplica:
    """One prefill replica as its outstanding work, kept in the order in which it will run.

    The replica runs one forward pass at a time, and is taken to run the waiting prefill that ranks first by
    slack (`slo.slack.sedf_rank`). So does its scheduler as long as everybody can be met; when not, it gives
    some up (`slo.on_time`), which is not predicted here. The order is that of the last change. `confirmed`
    are the jobs that its last report named; any other is still on its way there. `yields_in_s` is how soon
    the running pass would make way for a prefill that would otherwise be late; None when it would not.
    """

    replica_id: ReplicaId
    predictor: PrefillPredictor
    reported_at_s: float
    weights: dict[Tier, float]
    jobs: dict[JobId, PlacedJob] = field(default_factory=dict)
    confirmed: set[JobId] = field(default_factory=set)
    running: JobId | None = None
    running_since_s: float = 0.0
    yields_in_s: float | None = None
    kv_usage: float = 0.0
    _queue: list[PlacedJob] = field(default_factory=list)
    _ranks: list[SlackRank] = field(default_factory=list)
    _work_before_s: list[float] = field(default_factory=lambda: [0.0])
    _least_room_s: list[float] = field(default_factory=lambda: [math.inf])

    def add(self, job: PlacedJob, now_s: float) -> None:
        """Give it one more prefill."""
        self.jobs[job.job_id] = job
        self._reorder(now_s)

    def remove(self, job_id: JobId, now_s: float) -> PlacedJob | None:
        """Take a prefill away; None when it does not have it."""
        job = self.jobs.pop(job_id, None)
        if job is not None:
            self._reorder(now_s)
        return job

    def replace(
        self, jobs: Iterable[PlacedJob], running: JobId | None, running_since_s: float, now_s: float
    ) -> None:
        """Take the replica's own word for what it has to do."""
        self.jobs = {job.job_id: job for job in jobs}
        self.running = running if running in self.jobs else None
        self.running_since_s = running_since_s
        self._reorder(now_s)

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens that it has been given and has not finished."""
        return sum(job.tokens for job in self.jobs.values())

    def backlog_s(self, now_s: float) -> float:
        """Predicted seconds until everything that it has been given is done."""
        return self._busy_s(now_s) + self._work_before_s[-1]

    def end_s(self, tokens: int, deadline_s: float, now_s: float) -> float:
        """When a prefill of `tokens` due at `deadline_s` would end if it were added now."""
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
        own_s = self.predictor.prefill_s(tokens)
        position = self._position(tokens, deadline_s, now_s)
        work_s = self._work_before_s[position] + own_s
        end_s = self._free_at_s(work_s, deadline_s, now_s) + work_s
        free_at_s = now_s + self._busy_s(now_s)
        lateness_s = weight * max(0.0, end_s - deadline_s) if deadline_s < NO_DEADLINE else 0.0
        if end_s < free_at_s + work_s:
            lateness_s += self._runner_lateness_s(free_at_s, work_s)
        if lateness_s <= enough_s and self._least_room_s[position] - free_at_s < own_s:
            lateness_s = self._with_harm_s(lateness_s, enough_s, position, free_at_s, own_s)
        return Fit(end_s, lateness_s)

    def _rank(self, job: PlacedJob, now_s: float) -> SlackRank:
        return sedf_rank(job.deadline_s, now_s, self.predictor.prefill_s(job.tokens), job.placed_at_s)

    def _position(self, tokens: int, deadline_s: float, now_s: float) -> int:
        rank = sedf_rank(deadline_s, now_s, self.predictor.prefill_s(tokens), now_s)
        return bisect_right(self._ranks, rank)

    def _busy_s(self, now_s: float) -> float:
        if self.running is None:
            return 0.0
        took_s = self.predictor.prefill_s(self.jobs[self.running].tokens)
        return max(0.0, self.running_since_s + took_s - now_s)

    def _free_at_s(self, work_s: float, deadline_s: float, now_s: float) -> float:
        """When the running pass ends, or makes way if `work_s` would otherwise end after `deadline_s`."""
        busy_s = self._busy_s(now_s)
        late = deadline_s < NO_DEADLINE and now_s + busy_s + work_s > deadline_s
        if late and self.yields_in_s is not None and now_s + self.yields_in_s + work_s <= deadline_s:
            return now_s + self.yields_in_s
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

    def _reorder(self, now_s: float) -> None:
        if self.running not in self.jobs:
            self.running = None
        ranked = sorted(
            ((self._rank(job, now_s), job) for job in self.jobs.values() if job.job_id != self.running),
            key=lambda pair: pair[0],
        )
        queue = [job for _, job in ranked]
        work_s = 0.0
        work_before_s = [0.0]
        for job in queue:
            work_s += self.predictor.prefill_s(job.tokens)
            work_before_s.append(work_s)
        least_room_s = [math.inf] * (len(queue) + 1)
        for index in range(len(queue) - 1, -1, -1):
            room_s = queue[index].deadline_s - work_before_s[index + 1]
            least_room_s[index] = min(least_room_s[index + 1], room_s)
        self._queue = queue
        self._ranks = [rank for rank, _ in ranked]
        self._work_before_s = work_before_s
        self._least_room_s = least_room_s


@dataclass(slots=True)
class DecodeReplica:
    """One decode replica: how full it is.

    Attributes:
        kv_usage: Fraction of its KV blocks in use, as last reported.
        placed_since_report: Requests sent to it that its report does not show yet.
    """

    replica_id: ReplicaId
    kv_usage: float
    running: int
    reported_at_s: float
    placed_since_report: int = 0
