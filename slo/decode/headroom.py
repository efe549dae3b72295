"""What a decode replica tells of its memory, and what the router makes of it: who fits, and when.

The rule is the scheduler's own (`slo.decode.predicted_peak`), with what has been sent there and has not
reached the engine yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from slo.decode.output_length import FIRST_GUESS
from slo.decode.predicted_peak import USABLE, Holding, not_below, predicted_peak, shared_from
from slo.decode.running_streams import RunningStreams
from slo.request import JobId
from slo.tiers import Tier

HOLD_S: Final = 5.0
"""A request whose memory is predicted to come within this time is sent, and waits there."""
FAR_S: Final = 60.0
"""Nothing is predicted for later than this."""
_LOOKS: Final = 64
"""Of more streams, several end between two looks at the memory."""
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
        factor: What the scheduler multiplies such expectations by, to use the memory well.
    """

    pool_tokens: int
    shared_tokens: int
    reserve_tokens: int
    step_s: float
    streams: Mapping[JobId, Holding] = field(default_factory=dict)
    answers: Mapping[Tier, int] = field(default_factory=dict)
    factor: float = 1.0

    def newcomer(self, tier: Tier, rank: int, tokens: int, answers: int, most: int) -> Holding:
        """A request of so many tokens, whose answers have at most `most` together; 0 leaves that open."""
        expected = answers * self.answers.get(tier, FIRST_GUESS)
        remaining = round(self.factor * expected)
        if most:
            expected, remaining = min(expected, most), min(remaining, most)
        return Holding(tokens, remaining, rank, lasts=expected)

    def limit_tokens(self, rank: int, *, is_top: bool, prefix_tokens: int = 0) -> float:
        """What the peak of a tier and those above it may come to, what they share counted once.

        `prefix_tokens` are what those that are to come share with the streams.
        """
        shared_tokens = shared_from(rank, self.streams.values(), self.shared_tokens + prefix_tokens)
        return USABLE * self.pool_tokens - (0 if is_top else self.reserve_tokens) + shared_tokens

    def fits(
        self, newcomer: Holding, sent: Collection[Holding], *, is_top: bool, prefix_tokens: int = 0
    ) -> bool:
        """Whether there is room for a newcomer now; tiers below its own yield.

        Args:
            newcomer: What it will hold.
            sent: Those on their way to the engine.
            is_top: Whether it is of the top tier, which what is kept for it does not keep out.
            prefix_tokens: What it and those on their way share with the streams.
        """
        held = not_below(newcomer.rank, [*self.streams.values(), *sent])
        limit = self.limit_tokens(newcomer.rank, is_top=is_top, prefix_tokens=prefix_tokens)
        return self._fits_now(newcomer, held, limit)

    def wait_s(
        self,
        newcomer: Holding,
        sent: Collection[Holding],
        *,
        is_top: bool,
        age_s: float = 0.0,
        prefix_tokens: int = 0,
    ) -> float:
        """Seconds until there is room for a newcomer, at most `FAR_S`, if nobody else comes; see `fits`.

        What is told here was so `age_s` ago: the streams have gone on meanwhile.
        """
        held = not_below(newcomer.rank, [*self.streams.values(), *sent])
        all_end = all(one.ends_in == 0 for one in held)
        limit = self.limit_tokens(newcomer.rank, is_top=is_top, prefix_tokens=prefix_tokens)
        if all_end or self._fits_now(newcomer, held, limit):
            return 0.0
        # Those that wait go before it; while they do, they do not come any nearer to their ends.
        running = RunningStreams([one for one in held if not one.waits])
        waiting = deque([*[one for one in held if one.waits], newcomer])
        step_s, steps = max(LEAST_STEP_S, self.step_s), 0
        at_once = max(1, len(running) // _LOOKS)
        while steps * step_s < FAR_S:
            while waiting and (not len(running) or running.peak_with(waiting[0]) <= limit):
                running.add(waiting.popleft())
            if not waiting:
                return max(0.0, steps * step_s - age_s)
            steps += running.go_on(at_once)
        return FAR_S

    @staticmethod
    def _fits_now(newcomer: Holding, held: Sequence[Holding], limit: float) -> bool:
        return not held or predicted_peak([*held, newcomer]) <= limit
