"""Requests on a decode engine whose memory is short."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

from slo.tiers import Tier


@dataclass(frozen=True, slots=True)
class PressedRequest:
    """A request as it comes.

    Attributes:
        prompt: Tokens.
        answer: Tokens that it will have, which no server knows.
        most: Tokens that it may have.
        ttft_s: Its objective, seconds; None for none.
        has_first: Whether its first token came from the prefill tier, as it arrived here.
    """

    name: str
    tier: Tier
    at_s: float
    prompt: int
    answer: int
    most: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    has_first: bool = False


@dataclass(slots=True, eq=False)
class PressedStream:
    """One of them on the engine.

    Attributes:
        rank: Of its tier, 0 for the lowest.
        computed: Tokens whose KV the engine holds.
        swapped: Tokens whose KV is in host memory.
        preemptions: How often its memory was taken.
        started: Tokens that it had when it started, or started again.
        parked_s: Since when it is without memory that it had; None for a newcomer, and while it runs.
        token_s: When each token came.
    """

    asked: PressedRequest
    rank: int
    weight: float
    computed: int = 0
    swapped: int = 0
    preemptions: int = 0
    started: int = 0
    parked_s: float | None = None
    token_s: list[float] = field(default_factory=list)

    @property
    def emitted(self) -> int:
        """Tokens of its answer so far."""
        return len(self.token_s)

    @property
    def length(self) -> int:
        """Tokens of its sequence so far, the KV of all of which the next token needs."""
        return self.asked.prompt + self.emitted

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.token_s[0] - self.asked.at_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first."""
        return (self.token_s[-1] - self.token_s[0]) / max(1, self.emitted - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between its tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_s)]

    @property
    def is_met(self) -> bool:
        """Whether it met its objectives."""
        return self.ttft_s <= (self.asked.ttft_s or math.inf) and self.tpot_s <= (
            self.asked.tpot_s or math.inf
        )

    def credit_s(self, now_s: float) -> float:
        """By how much it is ahead of its TPOT objective; infinite without one."""
        if self.asked.tpot_s is None:
            return math.inf
        if not self.token_s:
            return 0.0
        return self.token_s[0] + (self.emitted - 1) * self.asked.tpot_s - now_s
