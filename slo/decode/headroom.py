"""What a decode replica tells of its memory; what the router makes of it is `slo.decode.outlook`'s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import msgspec

from slo.decode.output_length import FIRST_GUESS
from slo.decode.predicted_peak import Holding
from slo.request import JobId
from slo.tiers import Tier

HOLD_S: Final = 5.0
"""A request whose memory is predicted to come within this time is sent, and waits there."""

_STREAMS: Final = msgspec.msgpack.Decoder(dict[JobId, Holding])


class ToldStreams(Mapping[JobId, Holding]):  # noqa: PLW1641 - a mapping has no hash
    """Streams by job, written once for all reports that tell of them, and read when the first is asked for.

    There may be thousands, and an engine tells of them less often than its replica reports. Nobody reads them
    to find that nothing has changed.
    """

    def __init__(self, written: bytes) -> None:
        self._written = written

    @classmethod
    def of(cls, streams: Mapping[JobId, Holding]) -> ToldStreams:
        """Those streams."""
        return cls(msgspec.msgpack.encode(dict(streams)))

    def __reduce__(self) -> tuple[Any, ...]:
        """See `pickle`."""
        return ToldStreams, (self._written,)

    def __eq__(self, other: object) -> bool:
        """Whether they are the same streams, and in the same order if both were told."""
        if isinstance(other, ToldStreams):
            return self._written == other._written
        return super().__eq__(other)

    def __getitem__(self, job: JobId) -> Holding:
        """What one of them holds."""
        return self._read[job]

    def __iter__(self) -> Iterator[JobId]:
        """Their jobs."""
        return iter(self._read)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._read)

    @cached_property
    def _read(self) -> dict[JobId, Holding]:
        return _STREAMS.decode(self._written)


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """A decode replica's memory and who has it.

    Attributes:
        pool_tokens: All of it.
        shared_tokens: What streams share, and so hold less than the sum of their holdings.
        reserve_tokens: What is left unused for the top tier.
        step_s: What a step takes.
        streams: Those in the engine by job; those without one have names of their own.
        answers: Tokens that an answer is expected to have, by tier.
    """

    pool_tokens: int
    shared_tokens: int
    reserve_tokens: int
    step_s: float
    streams: Mapping[JobId, Holding] = field(default_factory=dict)
    answers: Mapping[Tier, int] = field(default_factory=dict)

    def newcomer(self, tier: Tier, rank: int, tokens: int, answers: int, most: int) -> Holding:
        """A request of so many tokens, whose answers have at most `most` together; 0 leaves that open."""
        expected = answers * self.answers.get(tier, FIRST_GUESS)
        return Holding(tokens, min(expected, most) if most else expected, rank)
