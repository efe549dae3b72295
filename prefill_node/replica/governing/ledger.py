"""What a prefill replica has to do, as it reports it to the router: accepted, or waiting for a place.

Pure: events in, snapshots out, no clock. The engine's own queue lives in another process; this is the
replica process's account of it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from slo.predict.prefill_time import PrefillPredictor
from slo.request import JobId
from slo.tiers import Tier

_REMEMBER_ABANDONED = 4096


class Accepted(msgspec.Struct, frozen=True):
    """A prefill that is accepted, or will be once it has a place; the deadline is infinite for none.

    Attributes:
        cached_tokens: Prompt tokens that the prefix cache is expected to hold.
    """

    job_id: JobId
    tier: Tier
    tokens: int
    deadline_s: float
    arrived_s: float
    cached_tokens: int = 0

    def left(self, computed_tokens: int) -> tuple[int, int]:
        """(tokens still to compute, tokens before them), when so many are known to be computed."""
        done = computed_tokens or min(self.cached_tokens, self.tokens - 1)
        return max(0, self.tokens - done), done


@dataclass(slots=True)
class PrefillLedger:
    """Accepted prefills, and those whose clients left before they were done.

    Attributes:
        without_place: Those that wait for a place; they are accepted when they have one.
    """

    predictor: PrefillPredictor
    accepted: dict[JobId, Accepted] = field(default_factory=dict)
    without_place: dict[JobId, Accepted] = field(default_factory=dict)
    abandoned: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _ended: list[JobId] = field(default_factory=list)

    def came(self, job: Accepted) -> None:
        """A prefill waits for a place."""
        self.without_place[job.job_id] = job

    def stopped_waiting(self, job_id: JobId) -> None:
        """A prefill does not wait for a place any more, and has none; one that has is left alone."""
        if self.without_place.pop(job_id, None) is not None:
            self._ended.append(job_id)

    def arrived(self, job: Accepted) -> None:
        """A prefill was accepted."""
        self.without_place.pop(job.job_id, None)
        self.accepted[job.job_id] = job
        self.abandoned.pop(job.job_id, None)

    def ended(self, job_id: JobId, *, abandoned: bool = False) -> None:
        """A prefill ended, however; repeated calls do nothing."""
        if self.accepted.pop(job_id, None) is None:
            return
        self._ended.append(job_id)
        if abandoned:
            self.abandoned[job_id] = None
            while len(self.abandoned) > _REMEMBER_ABANDONED:
                self.abandoned.popitem(last=False)

    def take_ended(self) -> tuple[JobId, ...]:
        """The jobs that ended since the last call."""
        ended, self._ended = tuple(self._ended), []
        return ended
