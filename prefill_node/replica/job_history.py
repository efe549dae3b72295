"""What the jobs of a prefill replica did in its last minutes, for people who look at it afterwards.

Pure: what happened comes in with its time, and goes out in seconds before the moment of asking, as clocks of
hosts need not agree.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from prefill_node.replica.governing.ledger import Accepted
from slo.queue.slack import NO_DEADLINE
from slo.request import JobId
from slo.tiers import Tier

MOST_ENDED: Final = 4096
"""Ended jobs that are remembered."""


class JobState(enum.StrEnum):
    """What a job is doing."""

    WAITING = "waiting"
    RUNNING = "running"
    SUSPENDED = "suspended"


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time in one state; the rest is said of suspensions.

    Attributes:
        start_s: Seconds before the moment of asking, as all times here: negative.
        preempted_by: The job that it made way for, empty for none.
        reason: A value of `slo.preemption.types.PreemptReason`.
        checkpoint_bytes: What each rank keeps beside KV blocks.
    """

    state: JobState
    start_s: float
    end_s: float
    preempted_by: str = ""
    reason: str = ""
    checkpoint_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PastJob:
    """A job of the last minutes.

    Attributes:
        due_s: When its prefill is due, which may lie ahead; None for never.
        ended_s: 0 when it has not ended.
        stretches: In order of time, without gaps, from its arrival to its end.
    """

    job_id: JobId
    tier: Tier
    tokens: int
    arrived_s: float
    due_s: float | None
    ended_s: float
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class ReplicaPast:
    """The jobs of a replica that were there at some time since `since_s`, in the order of their arrival."""

    since_s: float
    jobs: tuple[PastJob, ...]


@dataclass(slots=True)
class _Known:
    job: Accepted
    changes: list[Stretch]
    ended_s: float = math.inf


@dataclass(slots=True)
class JobHistory:
    """Remembers all jobs that have not ended, and the latest that have."""

    _present: dict[str, _Known] = field(default_factory=dict)
    _ended: deque[_Known] = field(default_factory=lambda: deque(maxlen=MOST_ENDED))
    _complete_since_s: float = -math.inf

    def arrived(self, job: Accepted) -> None:
        """A job was accepted."""
        self._present[job.job_id] = _Known(job, [_begun(JobState.WAITING, job.arrived_s)])

    def started(self, job_id: str, at_s: float) -> None:
        """Its first step was issued, also when it starts over, or one that was stopped was issued again."""
        self._change(job_id, _begun(JobState.RUNNING, at_s))

    def dropped(self, job_id: str, at_s: float) -> None:
        """It has lost its memory, and waits to start over."""
        self._change(job_id, _begun(JobState.WAITING, at_s))

    def stopped(
        self, job_id: str, at_s: float, preempted_by: str, reason: str, checkpoint_bytes: int
    ) -> None:
        """Its step was stopped."""
        stop = Stretch(JobState.SUSPENDED, at_s, math.inf, preempted_by, reason, checkpoint_bytes)
        self._change(job_id, stop)

    def ended(self, job_id: str, at_s: float) -> None:
        """It has ended, however."""
        if (known := self._present.pop(job_id, None)) is None:
            return
        known.ended_s = at_s
        if len(self._ended) == MOST_ENDED:
            self._complete_since_s = self._ended[0].ended_s
        self._ended.append(known)

    def recent(self, last_s: float, now_s: float) -> ReplicaPast:
        """The jobs that were there in the last `last_s` seconds, as far back as is remembered."""
        since_s = max(now_s - last_s, self._complete_since_s)
        known = (each for each in (*self._ended, *self._present.values()) if each.ended_s >= since_s)
        jobs = [_past(each, now_s) for each in known]
        return ReplicaPast(since_s - now_s, tuple(sorted(jobs, key=lambda job: job.arrived_s)))

    def _change(self, job_id: str, begun: Stretch) -> None:
        if (known := self._present.get(job_id)) is not None:
            known.changes.append(begun)


def _begun(state: JobState, at_s: float) -> Stretch:
    return Stretch(state, at_s, math.inf)


def _past(known: _Known, now_s: float) -> PastJob:
    end_s = min(known.ended_s, now_s)
    job, ends = known.job, _begun(JobState.WAITING, end_s)
    return PastJob(
        job.job_id,
        job.tier,
        job.tokens,
        job.arrived_s - now_s,
        None if job.deadline_s == NO_DEADLINE else job.deadline_s - now_s,
        end_s - now_s,
        tuple(
            replace(begun, start_s=begun.start_s - now_s, end_s=then.start_s - now_s)
            for begun, then in pairwise([*known.changes, ends])
        ),
    )
