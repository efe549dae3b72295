"""What follows a prefill: its first token's way to decode, and the transfer of its KV cache.

Nobody's first token waits for the transfer. Owns the model of both and its fit, and that of the link that KV
moves over. Does not measure or move anything.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

HANDOFF_STEPS: Final = 6
"""Tokens that decode generates for a measured handoff: the model has to have room for them, too."""


@dataclass(frozen=True, slots=True)
class HandoffSample:
    """One measured handoff.

    Attributes:
        tokens: Length of the prompt.
        handoff_s: From the end of its prefill to its first token: the calls between the two replicas.
        transfer_s: From then to the first token of decode's own, less a usual decode step.
    """

    tokens: int
    handoff_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True)
class TransferFit:
    """The line through measured transfers.

    Attributes:
        latency_s: Of a transfer, however small; not negative.
        per_token_s: Its seconds per prompt token; not negative.
    """

    latency_s: float
    per_token_s: float

    def transfer_s(self, tokens: int) -> float:
        """Seconds until the KV of a prompt is on an idle decode replica."""
        return self.latency_s + self.per_token_s * tokens


def usual_handoff_s(samples: Sequence[HandoffSample]) -> float:
    """The median of what a first token takes; it does not depend on the prompt."""
    return statistics.median(max(0.0, sample.handoff_s) for sample in samples)


def fit_transfer(samples: Sequence[HandoffSample]) -> TransferFit:
    """Fit a line through the medians at each length by the median slope (Theil and Sen), robust to outliers.

    Raises:
        ValueError: with fewer than two different prompt lengths.
    """
    by_tokens: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        by_tokens[sample.tokens].append(sample.transfer_s)
    if len(by_tokens) < 2:  # noqa: PLR2004 - a line needs two points
        raise ValueError("a fit needs handoffs of at least two different prompt lengths")
    points = {tokens: statistics.median(times_s) for tokens, times_s in by_tokens.items()}
    slopes = [(points[b] - points[a]) / (b - a) for a, b in combinations(sorted(points), 2)]
    slope = max(0.0, statistics.median(slopes))
    return TransferFit(max(0.0, statistics.median(value - slope * n for n, value in points.items())), slope)


@dataclass(frozen=True, slots=True)
class Link:
    """What moves KV cache into one decode replica.

    Attributes:
        bytes_ps: Bytes per second, infinite for no limit.
        latency_s: From the last byte sent to the receiver's notice; those of several transfers overlap.
    """

    bytes_ps: float = 25e9
    latency_s: float = 0.002

    def alone_s(self, size_bytes: float) -> float:
        """Seconds of a transfer that waits for no other."""
        return size_bytes / self.bytes_ps + self.latency_s


INSTANT_LINK = Link(float("inf"), 0.0)
"""Takes no time."""
