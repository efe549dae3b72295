"""How long a decode step takes, and how much a decode replica holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """How long one decode step takes, and how much a replica holds.

    Attributes:
        weights_s: Reading the weights once; a step takes at least that.
        request_s: Computing one token of one request; a large batch takes longer than reading the weights.
        kv_token_s: Reading the KV of one token of context.
        fixed_s: Host time per step.
        kv_tokens: Tokens that its KV memory holds.
        max_batch: Most requests in a step.
    """

    weights_s: float
    request_s: float
    kv_token_s: float
    fixed_s: float
    kv_tokens: int
    max_batch: int = 256

    def step_s(self, batch: int, context_tokens: int) -> float:
        """Seconds of a step of `batch` requests that have `context_tokens` of KV together."""
        return self.fixed_s + max(self.weights_s, batch * self.request_s) + context_tokens * self.kv_token_s

    def steps_s(self, steps: int, batch: int, context_tokens: int) -> float:
        """Seconds of `steps` steps on end of one batch; its context grows by `batch` tokens a step."""
        growth_s = self.kv_token_s * batch * steps * (steps - 1) / 2
        return steps * self.step_s(batch, context_tokens) + growth_s

    def steps_within(self, elapsed_s: float, batch: int, context_tokens: int) -> int:
        """How many steps of one batch are begun, and so ended, by the first end of a step at `elapsed_s`."""
        if elapsed_s <= 0:
            return 0
        first_s = self.step_s(batch, context_tokens)
        half_s = self.kv_token_s * batch / 2
        linear_s = first_s - half_s
        if half_s * elapsed_s > 1e-9 * linear_s**2:
            steps = (math.sqrt(linear_s**2 + 4 * half_s * elapsed_s) - linear_s) / (2 * half_s)
        else:
            steps = elapsed_s / first_s
        count = max(1, math.ceil(steps) - 1)
        while self.steps_s(count, batch, context_tokens) < elapsed_s:
            count += 1
        return count


INSTANT_DECODE = DecodeModel(0.0, 0.0, 0.0, 0.0, UNLIMITED, UNLIMITED)
"""Takes no time and holds everything."""
