"""What a decode replica tells of its memory; what the router makes of it is `slo.decode.outlook`'s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from slo.decode.output_length import FIRST_GUESS
from slo.decode.predicted_peak import Holding
from slo.request import JobId
from slo.tiers import Tier

HOLD_S: Final = 5.0
"""A request whose memory is predicted to come within this time is sent, and waits there."""


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """A decode replica's memory and who has it.

    Attributes:
        pool_tokens: All of it.
        shared_tokens: What streams share, and so hold less than the sum of their holdings.
        reserve_tokens: What is kept for the top tier, beyond what that holds.
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
