"""What a decode replica tells of its memory, and what the router makes of it: who fits, and when.

The rule is the scheduler's own (`slo.decode.predicted_peak`), with what has been sent there and has not
reached the engine yet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from slo.decode.output_length import FIRST_GUESS
from slo.decode.predicted_peak import USABLE, Holding, not_below, predicted_peak
from slo.request import JobId
from slo.tiers import Tier

HOLD_S: Final = 5.0
"""A request whose memory is predicted to come within this time is sent, and waits there."""
LEAST_STEP_S: Final = 0.001
"""What a step takes at least, also while no step was measured."""


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

    def limit_tokens(self, *, is_top: bool) -> float:
        """What the peak may come to, shared tokens counted once."""
        return USABLE * self.pool_tokens - (0 if is_top else self.reserve_tokens) + self.shared_tokens

    def fits(self, newcomer: Holding, sent: Collection[Holding], *, is_top: bool) -> bool:
        """Whether there is room for a newcomer now; tiers below its own yield.

        Args:
            newcomer: What it will hold.
            sent: Those on their way to the engine.
            is_top: Whether it is of the top tier, which what is kept for it does not keep out.
        """
        held = not_below(newcomer.rank, [*self.streams.values(), *sent])
        return self._fits_after(0, newcomer, held, is_top=is_top)

    def wait_s(self, newcomer: Holding, sent: Collection[Holding], *, is_top: bool) -> float:
        """Seconds until there is room for a newcomer, if nobody else comes; see `fits`."""
        held = not_below(newcomer.rank, [*self.streams.values(), *sent])
        # Streams grow until they end: it may fit now and not later, so that now is looked at by itself.
        if self._fits_after(0, newcomer, held, is_top=is_top):
            return 0.0
        ends = sorted({0, *[stream.remaining for stream in held]})
        first = bisect_left(
            ends, 1, key=lambda step: int(self._fits_after(step, newcomer, held, is_top=is_top))
        )
        return ends[min(first, len(ends) - 1)] * max(LEAST_STEP_S, self.step_s)

    def _fits_after(self, steps: int, newcomer: Holding, held: Sequence[Holding], *, is_top: bool) -> bool:
        left = [
            Holding(stream.tokens + steps, stream.remaining - steps, stream.rank)
            for stream in held
            if steps == 0 or stream.remaining > steps
        ]
        if not left:
            return True
        return predicted_peak([*left, newcomer]) <= self.limit_tokens(is_top=is_top)
