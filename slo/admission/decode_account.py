"""What each class takes of decode.

Owns the account of streams by class. Refuses nobody (`slo.admission.controller`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from slo.autoscaling.need import DecodeDemand
from slo.request import JobId
from slo.tiers import SYSTEM, Tier, TierPolicy


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
    """A request that was admitted and has not ended."""

    tier: Tier
    take: DecodeTake
    decodes: bool = False


class DecodeAccount:
    """What a class takes counts from its admission on: all that wait for prefill will decode one day.

    Args:
        tiers: The share of each class.
    """

    def __init__(self, tiers: Mapping[Tier, TierPolicy]) -> None:
        self._shares = {tier: policy.share for tier, policy in tiers.items()}
        self._present: dict[JobId, _Present] = {}
        self._taken = dict.fromkeys(tiers, _NOTHING)
        self._decoding = _NOTHING
        self._is_crowded = False
        self._of_each = _NOTHING
        """Of decode: a stream's part, and a token's; one of them is 0."""

    def admitted(self, job_id: JobId, tier: Tier, take: DecodeTake) -> None:
        """A request will come to decode once it is prefilled; nothing of the server's own counts."""
        if tier != SYSTEM:
            self._present[job_id] = _Present(tier, take)
            self._taken[tier] = self._taken[tier].plus(take)

    def decodes(self, job_id: JobId) -> None:
        """A request is not prefill's any more; one that decodes, or is not known, is ignored."""
        if (request := self._present.get(job_id)) is not None and not request.decodes:
            request.decodes = True
            self._decoding = self._decoding.plus(request.take)

    def ended(self, job_id: JobId) -> None:
        """A request has ended, or does not come to decode after all; one that is not known is ignored."""
        if (request := self._present.pop(job_id, None)) is None:
            return
        self._taken[request.tier] = self._taken[request.tier].plus(request.take, -1.0)
        if request.decodes:
            self._decoding = self._decoding.plus(request.take, -1.0)

    def sees(self, demand: DecodeDemand) -> None:
        """So much of decode is in use: by streams where pace is what is short, by tokens where memory is.

        Streams that are not known here, as from before a restart, are taken to be like those that are.
        """
        decoding, self._is_crowded = self._decoding, demand.is_crowded
        of_stream = demand.load / max(decoding.streams, demand.requests, 1.0)
        if demand.memory > demand.pace and decoding.tokens > 0:
            self._of_each = DecodeTake(0.0, of_stream * decoding.streams / decoding.tokens)
        else:
            self._of_each = DecodeTake(of_stream, 0.0)

    def is_above_share(self, tier: Tier) -> bool:
        """Whether a class takes its share of decode or more, while that is what requests wait for."""
        taken, each = self._taken[tier], self._of_each
        part = taken.streams * each.streams + taken.tokens * each.tokens
        return self._is_crowded and part >= self._shares[tier]
