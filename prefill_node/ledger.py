"""What a prefill replica has accepted and not finished, as it reports it to the router.

Pure: events in, snapshots out, no clock. The engine's own queue lives in another process; this is the
replica process's account of it, which also guesses which prefill is running by the rule the engine's
scheduler follows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slo.slack import NO_DEADLINE, SlackRank, sedf_rank

if TYPE_CHECKING:
    from slo.predictor import PrefillPredictor
    from slo.request import JobId
    from slo.tiers import Tier


@dataclass(frozen=True, slots=True)
class Accepted:
    """A prefill that the replica has accepted; the deadline is infinite for none."""

    job_id: JobId
    tier: Tier
    tokens: int
    deadline_s: float
    arrived_s: float


@dataclass(slots=True)
class PrefillLedger:
    """Accepted prefills, which of them is probably running and since when."""

    predictor: PrefillPredictor
    accepted: dict[JobId, Accepted] = field(default_factory=dict)
    running: JobId | None = None
    running_since_s: float = 0.0
    _ended: list[JobId] = field(default_factory=list)

    def arrived(self, job: Accepted, now_s: float) -> None:
        """A prefill was accepted."""
        self.accepted[job.job_id] = job
        if self.running is None:
            self._start_next(now_s)

    def ended(self, job_id: JobId, now_s: float) -> None:
        """A prefill ended, however; repeated calls do nothing."""
        if self.accepted.pop(job_id, None) is None:
            return
        self._ended.append(job_id)
        if self.running == job_id or self.running not in self.accepted:
            self._start_next(now_s)

    def take_ended(self) -> tuple[JobId, ...]:
        """The jobs that ended since the last call."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def _start_next(self, now_s: float) -> None:
        self.running = min(
            self.accepted,
            key=lambda job_id: self._rank(self.accepted[job_id], now_s),
            default=None,
        )
        self.running_since_s = now_s

    def _rank(self, job: Accepted, now_s: float) -> SlackRank:
        remaining_s = 0.0 if job.deadline_s == NO_DEADLINE else self.predictor.prefill_s(job.tokens)
        return sedf_rank(job.deadline_s, now_s, remaining_s, job.arrived_s)
