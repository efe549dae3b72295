"""What a request says: random tokens, so that nothing comes from a prefix cache but what a trace shares.

Every run has a salt of its own: the same stream of lengths, offered again, says something else. Within a run
equal block hashes give equal tokens.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.workload.arrivals import Arrival


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of one run.

    Attributes:
        vocabulary: Token ids to draw from; leave out the model's special tokens.
        salt: Makes the tokens of this run.
    """

    vocabulary: range
    salt: str = field(default_factory=lambda: secrets.token_hex(8))

    def of(self, arrival: Arrival) -> list[int]:
        """Token ids of a request, `arrival.tokens` of them."""
        prompt: list[int] = []
        for block in arrival.blocks:
            if len(prompt) >= arrival.tokens:
                break
            prompt += self._draw(f"block {block}", arrival.block_tokens)
        rest = arrival.tokens - len(prompt)
        if rest > 0:
            prompt += self._draw(f"request {arrival.number}", rest)
        return prompt[: arrival.tokens]

    def _draw(self, of: str, count: int) -> list[int]:
        rng = random.Random(f"{self.salt} {of}")  # noqa: S311 - a workload, not a secret
        return rng.choices(self.vocabulary, k=count)
