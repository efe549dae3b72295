"""Prefills that found their replica idle, and whether anything held them up there before they ended.

Owns which of them is on each replica and who came after it. A replica may stop it for another, or run others
in the same pass: that shows by what the replica reports to run, and by who has ended before it or with it.
Pure, like `router.core`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from slo.reports import OutstandingJob, PrefillReported
from slo.request import JobId, ReplicaId


@dataclass(slots=True)
class _Lone:
    """A prefill that found its replica idle.

    Attributes:
        end_s: When it was predicted to end.
        later: Who came to the replica after it, and when.
        is_named: Whether a report has named it, so that whoever ends from then on was there beside it.
    """

    job_id: JobId
    end_s: float
    later: dict[JobId, float] = field(default_factory=dict)
    is_named: bool = False

    def is_held_up(self, event: PrefillReported) -> bool:
        """Whether a report shows that others ran before it or with it."""
        ended = [one for one in event.ended if self.is_named or one == self.job_id or one in self.later]
        if self.job_id not in ended:
            return bool(ended) or self._is_passed(event.jobs, event.running)
        place = ended.index(self.job_id)
        # Who came before it was to end, and ended in the same report, may have shared its pass.
        return place > 0 or any(self.later.get(one, -math.inf) < self.end_s for one in ended[1:])

    def _is_passed(self, jobs: tuple[OutstandingJob, ...], running: JobId | None) -> bool:
        """Whether another runs while it has work to do, or shares its pass."""
        left = {job.job_id: job.tokens for job in jobs}
        if running == self.job_id:
            return 0 in left.values()
        return running is not None and left.get(self.job_id, 0) > 0


class LonePrefills:
    """The latest prefill of each replica that found it idle, until its end is known."""

    def __init__(self) -> None:
        self._on: dict[ReplicaId, _Lone] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._on)

    def found_idle(self, job_id: JobId, where: ReplicaId, end_s: float) -> None:
        """A prefill was placed on a replica that has nothing to do, and is predicted to end then."""
        self._on[where] = _Lone(job_id, end_s)

    def followed(self, job_id: JobId, where: ReplicaId, now_s: float) -> None:
        """Another prefill was placed on a replica."""
        if (lone := self._on.get(where)) is not None:
            lone.later[job_id] = now_s

    def reported(self, event: PrefillReported, now_s: float) -> JobId | None:
        """A replica has reported its work; returns the prefill that was held up there, if it shows that."""
        if (lone := self._on.get(event.replica_id)) is None:
            return None
        if lone.is_held_up(event):
            del self._on[event.replica_id]
            return lone.job_id
        if lone.job_id in event.ended:
            del self._on[event.replica_id]
            return None
        others = [job.job_id for job in event.jobs if job.job_id != lone.job_id]
        if len(others) < len(event.jobs):
            lone.is_named = True
            for job_id in others:
                lone.later.setdefault(job_id, now_s)
        return None

    def over(self, job_id: JobId) -> None:
        """A request is over, or its prefill goes on elsewhere."""
        for where, lone in self._on.items():
            if lone.job_id == job_id:
                del self._on[where]
                return
