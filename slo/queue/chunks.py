"""How much of a prompt one step takes, so that the step can be stopped soon enough.

A stop waits for the next boundary. The longest stretch between two of them grows with the tokens of the step,
and behind a long context it is attention, which grows with the context as well. Owns the rule that cuts
chunks shorter the longer the context is. What a device can fill sets the longest chunk:
`slo.queue.batching.STEP_TOKENS`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from slo.predict.pass_shape import PassPart
from slo.predict.prefill_time import PrefillPredictor

GRAIN_TOKENS: Final = 128
"""A chunk is a multiple of this, and never less: kernels work on tiles of rows, and the weights of every
layer are read for each chunk."""


@dataclass(frozen=True, slots=True)
class StopBound:
    """How long a step may go on before it can stop.

    Attributes:
        within_s: Seconds of the longest stretch between two boundaries.
        stretches: Those of which one is the longest (`slo.predict.pass_shape.PassShape.stretches`).
    """

    within_s: float
    stretches: tuple[PassPart, ...]

    def is_kept(self, tokens: int, pairs: float, predictor: PrefillPredictor) -> bool:
        """Whether a step of so many tokens and `attention_pairs` can be stopped in time."""
        return longest_s(self.stretches, tokens, pairs, predictor) <= self.within_s

    def chunk_tokens(self, context_tokens: float, predictor: PrefillPredictor) -> float:
        """The most tokens behind a context whose step can be stopped in time; infinite for any number."""
        room = [self._room(part, context_tokens, predictor) for part in self.stretches]
        most = min(room, default=math.inf)
        return most if most == math.inf else max(1, most // GRAIN_TOKENS) * GRAIN_TOKENS

    def _room(self, part: PassPart, context_tokens: float, predictor: PrefillPredictor) -> float:
        """The tokens t with a·t² + b·t = c, which a stretch computes in `within_s`."""
        a = part.pairs * predictor.per_pair_s / 2
        b = part.tokens * predictor.per_token_s + 2 * a * context_tokens
        c = self.within_s - part.tokens * predictor.fixed_s
        if c <= 0 or part.tokens * predictor.floor_s > self.within_s:
            return 0.0
        if b <= 0 or c == math.inf:
            return math.sqrt(c / a) if a > 0 else math.inf
        return 2 * c / (b + math.sqrt(b * b + 4 * a * c))

    def encode(self) -> list[Any]:
        """As it travels with a request."""
        return [self.within_s, *(number for part in self.stretches for number in part)]

    @staticmethod
    def of(encoded: Sequence[float]) -> StopBound:
        """What was encoded."""
        within_s, *numbers = encoded
        return StopBound(within_s, tuple(map(PassPart, numbers[::2], numbers[1::2])))


def longest_s(stretches: Sequence[PassPart], tokens: int, pairs: float, predictor: PrefillPredictor) -> float:
    """Seconds of the longest of these stretches of a step."""
    return max([predictor.part_s(part, tokens, pairs) for part in stretches], default=0.0)
