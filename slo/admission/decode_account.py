"""What each class takes of decode, and what all ask for.

Owns the account of streams by class, of how many come and how long they stay. Refuses nobody
(`slo.admission.controller`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from slo.autoscaling.need import DecodeDemand
from slo.queue.decay import ExponentialDecay
from slo.request import JobId
from slo.tiers import SYSTEM, Tier, TierPolicy

_MEMORY_S: Final = 60.0
"""What arrived this long ago counts 1/e of what arrives now: streams stay longer than prefills."""
_LEARNING_RATE: Final = 0.05
_MOST_LACKING: Final = 10_000
"""Requests of a class that are known to have lacked decode."""
_STAY_S: Final = 60.0
"""How long the streams of a class are taken to stay of which none has ended."""


class DecodeTake(NamedTuple):
    """What a request takes of decode while it is there.

    Attributes:
        streams: How many answers are generated.
        tokens: Whose KV it holds, in the mean over its time there.
    """

    streams: float = 1.0
    tokens: float = 0.0

    def plus(self, other: DecodeTake, times: float = 1.0) -> DecodeTake:
        """Both together, the other one so many times."""
        return DecodeTake(self.streams + times * other.streams, self.tokens + times * other.tokens)


_NOTHING: Final = DecodeTake(0.0, 0.0)
ONE_STREAM: Final = DecodeTake()
"""Of a request of which no more is known."""


@dataclass(slots=True)
class _Present:
    """A request that was admitted and has not ended; `since_s` is None until decode has it."""

    tier: Tier
    take: DecodeTake
    likeness: Hashable
    since_s: float | None = None


class _Lacking:
    """Requests of one class that were refused for want of decode, and what they would take together."""

    def __init__(self) -> None:
        self.take = _NOTHING
        self._by_likeness: dict[Hashable, tuple[float, DecodeTake]] = {}
        """When each was refused last, in that order, and what it would have taken."""

    def add(self, likeness: Hashable, take: DecodeTake, now_s: float) -> None:
        """One is refused."""
        self.remove(likeness)
        self._by_likeness[likeness] = now_s, take
        self.take = self.take.plus(take)
        if len(self._by_likeness) > _MOST_LACKING:
            self.remove(next(iter(self._by_likeness)))

    def remove(self, likeness: Hashable) -> None:
        """One does not count any more; what is not there is ignored."""
        if (gone := self._by_likeness.pop(likeness, None)) is not None:
            self.take = self.take.plus(gone[1], -1.0) if self._by_likeness else _NOTHING

    def forget_until(self, time_s: float) -> None:
        """Those that were refused by then do not count any more."""
        while self._by_likeness:
            likeness, (refused_s, _) = next(iter(self._by_likeness.items()))
            if refused_s > time_s:
                return
            self.remove(likeness)


class DecodeAccount:
    """What a class takes counts from its admission on: all that wait for prefill will decode one day.

    Against its share counts what decodes at one time: of what waits for prefill no more than will be there
    together.

    Args:
        tiers: The share of each class.
    """

    def __init__(self, tiers: Mapping[Tier, TierPolicy]) -> None:
        self._shares = {tier: policy.share for tier, policy in tiers.items()}
        self._present: dict[JobId, _Present] = {}
        self._taken = dict.fromkeys(tiers, _NOTHING)
        self._decoding = dict.fromkeys(tiers, _NOTHING)
        self._is_crowded = False
        self._of_each = _NOTHING
        """Of decode: a stream's part, and a token's; one of them is 0."""
        self._replicas = 0
        self._arrived = dict.fromkeys(tiers, _NOTHING)
        self._lacking = {tier: _Lacking() for tier in tiers}
        self._decay = ExponentialDecay(_MEMORY_S)
        self._stays_s = dict.fromkeys(tiers, 0.0)
        self._now_s = -math.inf
        """The latest time that was heard: the end of a prefill is told without one."""

    def arrived(self, tier: Tier, take: DecodeTake, now_s: float, likeness: Hashable = None) -> None:
        """A request asks for so much, whether or not it will get it.

        One of the same likeness that has lacked decode is taken to be this one, which comes again.
        """
        self._now_s = now_s
        self._lacking[tier].remove(likeness)
        if (factor := self._decay.rescale(now_s)) < 1:
            self._arrived = {one: _NOTHING.plus(grown, factor) for one, grown in self._arrived.items()}
        self._arrived[tier] = self._arrived[tier].plus(take, self._decay.grown(now_s))

    def admitted(self, job_id: JobId, tier: Tier, take: DecodeTake, likeness: Hashable = None) -> None:
        """A request will come to decode once it is prefilled; nothing of the server's own counts."""
        if tier != SYSTEM:
            self._present[job_id] = _Present(tier, take, likeness)
            self._taken[tier] = self._taken[tier].plus(take)

    def decodes(self, job_id: JobId) -> None:
        """A request is not prefill's any more; one that decodes, or is not known, is ignored."""
        if (request := self._present.get(job_id)) is not None and request.since_s is None:
            request.since_s = self._now_s
            self._decoding[request.tier] = self._decoding[request.tier].plus(request.take)

    def ended(self, job_id: JobId, now_s: float) -> None:
        """A request has ended; one that is not known is ignored."""
        self._now_s = now_s
        request = self._removed(job_id)
        if request is not None and request.since_s is not None:
            stayed_s, known_s = now_s - request.since_s, self._stays_s[request.tier]
            learned_s = known_s + _LEARNING_RATE * (stayed_s - known_s) if known_s else stayed_s
            self._stays_s[request.tier] = learned_s

    def lacked(self, job_id: JobId, now_s: float) -> None:
        """A request is refused for want of memory; it is `withdrawn`, too, after that."""
        if (request := self._present.get(job_id)) is not None:
            self.turned_away(request.tier, request.take, now_s, request.likeness)

    def turned_away(self, tier: Tier, take: DecodeTake, now_s: float, likeness: Hashable = None) -> None:
        """A request is refused as decode has no more for it, or for its class; it was not `admitted`."""
        self._lacking[tier].add(likeness, take, now_s)

    def withdrawn(self, job_id: JobId) -> None:
        """A request does not come to decode after all."""
        self._removed(job_id)

    def sees(self, demand: DecodeDemand) -> None:
        """So much of decode is in use: by streams where pace is what is short, by tokens where memory is.

        Streams that are not known here, as from before a restart, are taken to be like those that are.
        """
        self._is_crowded, self._replicas = demand.is_crowded, demand.replicas
        decoding = _NOTHING
        for take in self._decoding.values():
            decoding = decoding.plus(take)
        of_stream = demand.load / max(decoding.streams, demand.requests, 1.0)
        if demand.memory > demand.pace and decoding.tokens > 0:
            self._of_each = DecodeTake(0.0, of_stream * decoding.streams / decoding.tokens)
        else:
            self._of_each = DecodeTake(of_stream, 0.0)

    def is_above_share(self, tier: Tier) -> bool:
        """Whether a class takes its share of decode or more, while that is what requests wait for."""
        if not self._is_crowded:
            return False
        part = self._part(self._taken[tier])
        if self._stays_s[tier]:
            decoding = self._part(self._decoding[tier])
            part = max(decoding, min(part, self._part(self._together(tier, self._now_s))))
        return part >= self._shares[tier]

    def replicas_asked(self, now_s: float) -> float:
        """What of decode would be in use were nobody refused, in replicas.

        Of each class it is what that takes at least: as long as none has ended, nobody knows how long they
        stay.
        """
        asked = [
            max(self._part(taken), self._part(self._together(tier, now_s)))
            for tier, taken in self._taken.items()
        ]
        return self._replicas * math.fsum(asked)

    def replicas_refused(self, now_s: float) -> float:
        """What would still be there had it not been refused for want of decode, in replicas.

        Each counts for as long as it would have stayed. So, once there is room again, no less of it goes in a
        second than more is let in: nothing counts here and as what is in use.
        """
        lacking = _NOTHING
        for tier, ours in self._lacking.items():
            ours.forget_until(now_s - (self._stays_s[tier] or _STAY_S))
            lacking = lacking.plus(ours.take)
        return self._replicas * self._part(lacking)

    def _together(self, tier: Tier, now_s: float) -> DecodeTake:
        """What would be there of a class at one time were none of it refused.

        By Little's law: how much comes in a second, times how long it stays.
        """
        per_s = self._decay.kept(now_s) / _MEMORY_S
        return _NOTHING.plus(self._arrived[tier], per_s * self._stays_s[tier])

    def _part(self, take: DecodeTake) -> float:
        return take.streams * self._of_each.streams + take.tokens * self._of_each.tokens

    def _removed(self, job_id: JobId) -> _Present | None:
        if (request := self._present.pop(job_id, None)) is not None:
            self._taken[request.tier] = self._taken[request.tier].plus(request.take, -1.0)
            if request.since_s is not None:
                self._decoding[request.tier] = self._decoding[request.tier].plus(request.take, -1.0)
        return request
