"""How many tokens a prompt has, before anybody has tokenised it.

Owns the bytes-per-token ratio, learned from requests whose length became known, and its error; of one tenant
a ratio for each size of a prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

MIN_BYTES_PER_TOKEN: Final = 0.5
MAX_BYTES_PER_TOKEN: Final = 16.0
"""No text of any language is outside; a ratio that is (of a truncated prompt, say) is clamped."""


@dataclass(slots=True)
class PromptLengthEstimator:
    """Estimates prompt tokens from bytes with a ratio that follows the traffic.

    The ratio is an exponentially weighted mean of log(bytes / tokens), so that a few odd prompts (base64,
    another language) pull it by no more than their share.

    Attributes:
        learning_rate: Weight of one new observation.
        error: Exponentially weighted mean of |estimate - actual| / actual, as a fraction; None before
            the first observation.
        counts: What the ratio it began with counts as, and all since, in observations: while that is little,
            a new one weighs more.
    """

    bytes_per_token: float = 4.0
    learning_rate: float = 0.05
    error: float | None = None
    counts: float = 20.0

    def tokens(self, prompt_bytes: int) -> int:
        """The estimated length in tokens; at least 1 for any prompt."""
        return max(1, round(prompt_bytes / self.bytes_per_token))

    def observe(self, prompt_bytes: int, tokens: int) -> float:
        """Learn from a prompt whose length is now known.

        Returns:
            The error of the estimate that would have been made, (estimate - actual) / actual.

        Raises:
            ValueError: when either argument is not positive.
        """
        if prompt_bytes <= 0 or tokens <= 0:
            msg = f"an observation needs positive sizes, not {prompt_bytes} bytes and {tokens} tokens"
            raise ValueError(msg)
        relative_error = (self.tokens(prompt_bytes) - tokens) / tokens
        self.counts += 1.0
        rate = max(self.learning_rate, 1.0 / self.counts)
        ratio = min(max(prompt_bytes / tokens, MIN_BYTES_PER_TOKEN), MAX_BYTES_PER_TOKEN)
        self.bytes_per_token = math.exp((1 - rate) * math.log(self.bytes_per_token) + rate * math.log(ratio))
        magnitude = abs(relative_error)
        self.error = magnitude if self.error is None else (1 - rate) * self.error + rate * magnitude
        return relative_error


class PromptLengths:
    """Prompts of one tenant: each is estimated by those that are about as long.

    A chat template adds to each prompt tokens that its text has no bytes for, so that short prompts have many
    tokens for each byte, and say little of long ones. Where none was as long, the nearest in length tell
    until some are.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, PromptLengthEstimator] = {}

    def of(self, prompt_bytes: int) -> PromptLengthEstimator:
        """What estimates prompts of that size."""
        size = _size_class(prompt_bytes)
        if size not in self._by_size and self._by_size:
            size = min(self._by_size, key=lambda known: abs(known - size))
        return self._by_size.get(size) or PromptLengthEstimator()

    def observe(self, prompt_bytes: int, tokens: int) -> float:
        """See `PromptLengthEstimator.observe`."""
        size = _size_class(prompt_bytes)
        if size not in self._by_size:
            nearest = self.of(prompt_bytes)
            self._by_size[size] = replace(nearest, error=None, counts=1.0) if self._by_size else nearest
        return self._by_size[size].observe(prompt_bytes, tokens)


def _size_class(prompt_bytes: int) -> int:
    """Sizes of one class differ by less than a factor of four."""
    return prompt_bytes.bit_length() // 2
