"""Prefills that nothing is in the way of on their replica, and whether anything held them up there after all.

Owns which of them is on each replica, who came after it, and what it is taken to compute. It found the
replica idle, or what runs there is to be stopped for it. A replica may stop it for another, run others in the
same pass, or not stop for it: that shows by what the replica reports to run, and by who has ended before it
or with it. What it has to compute is a guess until the replica has told. Pure, like `router.core`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from slo.predict.prefill_time import PrefillPredictor
from slo.reports import PrefillReported
from slo.request import JobId, ReplicaId


@dataclass(frozen=True, slots=True)
class ExpectedStop:
    """What is to be stopped for a prefill.

    Attributes:
        job_id: Whose pass it is.
        start_by_s: When the prefill has started if that was stopped for it at once.
    """

    job_id: JobId
    start_by_s: float


@dataclass(frozen=True, slots=True)
class Guess:
    """What a prefill is taken to compute, until its replica has told.

    Attributes:
        predictor: Of its replica.
        tokens: Of its prompt.
        cached_tokens: Of these, those that its replica is expected to have cached.
        text: Whose text the prompt is, and its bytes, while its tokens are estimated from these; else None.
        is_hit_told: Whether the replica has said what it had cached.
    """

    predictor: PrefillPredictor
    tokens: int
    cached_tokens: int = 0
    text: tuple[str, int] | None = None
    is_hit_told: bool = False

    @property
    def seconds(self) -> float:
        """Predicted of it."""
        computed_tokens = max(1, self.tokens - self.cached_tokens)
        return self.predictor.prefill_s(computed_tokens, self.cached_tokens)

    @property
    def is_sure(self) -> bool:
        """Whether nothing of it is a guess any more."""
        return self.text is None and (self.is_hit_told or not self.cached_tokens)

    def told(self, job_id: JobId, event: PrefillReported) -> Guess:
        """The same with what a report tells of it."""
        known = self
        for tenant, size_bytes, tokens in event.learned:
            if known.text == (tenant, size_bytes) and tokens > 0:
                known = replace(known, tokens=tokens, text=None)
        for started, cached_tokens in event.hits:
            if started == job_id and not known.is_hit_told:
                known = replace(known, cached_tokens=cached_tokens, is_hit_told=True)
        return known


@dataclass(slots=True)
class _Lone:
    """A prefill that nothing is in the way of.

    Attributes:
        end_s: When it was predicted to end.
        stop: What is to be stopped for it; None when its replica is idle.
        guess: What it is taken to compute; None where nothing of that is told.
        later: Who came to the replica after it, and when.
        is_named: Whether a report has named it, so that whoever ends from then on was there beside it.
    """

    job_id: JobId
    end_s: float
    stop: ExpectedStop | None = None
    guess: Guess | None = None
    later: dict[JobId, float] = field(default_factory=dict)
    is_named: bool = False

    @property
    def is_sure(self) -> bool:
        """Whether it is known what it had to compute."""
        return self.guess is None or self.guess.is_sure

    def correct(self, event: PrefillReported) -> float:
        """Take a report's word for what it computes; returns by how much longer that is predicted to take."""
        if (before := self.guess) is None:
            return 0.0
        self.guess = before.told(self.job_id, event)
        by_s = self.guess.seconds - before.seconds
        self.end_s += by_s
        return by_s

    def is_held_up(self, event: PrefillReported, now_s: float) -> bool:
        """Whether a report shows that others ran before it or with it."""
        ended = [one for one in event.ended if self.is_named or one == self.job_id or one in self.later]
        if self.job_id not in ended:
            return bool(ended) or self._is_passed(event, now_s)
        place = ended.index(self.job_id)
        # Who came before it was to end, and ended in the same report, may have shared its pass.
        return place > 0 or any(self.later.get(one, -math.inf) < self.end_s for one in ended[1:])

    def _is_passed(self, event: PrefillReported, now_s: float) -> bool:
        """Whether another runs while it has work to do, other than what stops for it, or shares its pass."""
        left, running = {job.job_id: job.tokens for job in event.jobs}, event.running
        if running == self.job_id:
            return 0 in left.values() or self._is_late(now_s - event.running_for_s)
        if running is None or left.get(self.job_id, 0) == 0:
            return False
        return self.stop is None or running != self.stop.job_id or self._is_late(now_s)

    def _is_late(self, at_s: float) -> bool:
        """Whether it starts later than it would if what runs was stopped for it at once."""
        return self.stop is not None and at_s > self.stop.start_by_s


class LonePrefills:
    """The latest prefill of each replica that nothing was in the way of, until its end is known."""

    def __init__(self) -> None:
        self._on: dict[ReplicaId, _Lone] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._on)

    def goes_first(
        self,
        job_id: JobId,
        where: ReplicaId,
        end_s: float,
        stop: ExpectedStop | None = None,
        guess: Guess | None = None,
    ) -> JobId | None:
        """A prefill was placed where nothing is in its way, and is predicted to end then.

        Returns:
            The one of which that was expected before, and whose end is not known: it is stopped or overtaken
            for it, or has not come to the replica in all the time that the router waits for that.
        """
        before = self._on.get(where)
        self._on[where] = _Lone(job_id, end_s, stop, guess)
        return None if before is None else before.job_id

    def has_stop(self, where: ReplicaId) -> bool:
        """Whether something is to be stopped on a replica for a prefill of which the end is not known yet."""
        lone = self._on.get(where)
        return lone is not None and lone.stop is not None

    def followed(self, job_id: JobId, where: ReplicaId, now_s: float) -> None:
        """Another prefill was placed on a replica."""
        if (lone := self._on.get(where)) is not None:
            lone.later[job_id] = now_s

    def corrected(self, event: PrefillReported) -> tuple[JobId, float] | None:
        """The prefill that a report may tell more of, and the seconds that it takes longer by that."""
        if (lone := self._on.get(event.replica_id)) is None:
            return None
        return lone.job_id, lone.correct(event)

    def reported(self, event: PrefillReported, now_s: float) -> JobId | None:
        """A replica has reported its work.

        Returns:
            The prefill that was held up there, if the report shows that, or that has ended before anybody has
            told what it had to compute; else None.
        """
        if (lone := self._on.get(event.replica_id)) is None:
            return None
        if lone.is_held_up(event, now_s):
            del self._on[event.replica_id]
            return lone.job_id
        if lone.job_id in event.ended:
            del self._on[event.replica_id]
            return None if lone.is_sure else lone.job_id
        others = [job.job_id for job in event.jobs if job.job_id != lone.job_id]
        if len(others) < len(event.jobs):
            lone.is_named = True
            for job_id in others:
                lone.later.setdefault(job_id, now_s)
        return None

    def over(self, job_id: JobId) -> bool:
        """A request is over, or its prefill goes on elsewhere.

        Returns:
            Whether it is known what it had to compute, as it is of those that were here and are not any more.
        """
        for where, lone in self._on.items():
            if lone.job_id == job_id:
                del self._on[where]
                return lone.is_sure
        return True
