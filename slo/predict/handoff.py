"""How long it takes from the end of a prefill to the first token: KV transfer, then the first decode step.

Owns the model of both and its fit, and that of the link that KV moves over. Does not measure or move
anything.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class HandoffModel:
    """Predicted time from the end of one prefill to its first token, when the decode replica is idle.

    Attributes:
        latency_s: Of a transfer, however small.
        per_token_s: Seconds per prompt token: its KV over the link, and its part of the first decode step.
        first_step_s: The first decode step behind a short prompt.
    """

    latency_s: float
    per_token_s: float
    first_step_s: float

    def handoff_s(self, tokens: int) -> float:
        """Seconds from the end of the prefill of a prompt of `tokens` to its first token."""
        return self.latency_s + self.per_token_s * tokens + self.first_step_s


@dataclass(frozen=True, slots=True)
class HandoffSample:
    """One measured handoff.

    Attributes:
        tokens: Length of the prompt.
        handoff_s: From the end of its prefill to its first token.
        step_s: A decode step behind this prompt.
    """

    tokens: int
    handoff_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class HandoffFit:
    """The two lines through measured handoffs; no coefficient is negative.

    Attributes:
        latency_s: Of a transfer, however small.
        transfer_per_token_s: Its seconds per prompt token.
        first_step_s: The first decode step behind a short prompt.
        step_per_token_s: Its seconds per prompt token.
    """

    latency_s: float
    transfer_per_token_s: float
    first_step_s: float
    step_per_token_s: float

    def model(self) -> HandoffModel:
        """Both lines as one."""
        return HandoffModel(
            self.latency_s, self.transfer_per_token_s + self.step_per_token_s, self.first_step_s
        )


def fit_handoff(samples: Sequence[HandoffSample]) -> HandoffFit:
    """Fit lines through the medians at each length by the median slope (Theil and Sen), robust to outliers.

    The transfer is what a handoff takes besides its decode step; both lines together give the handoff.

    Raises:
        ValueError: with fewer than two different prompt lengths.
    """
    by_tokens: dict[int, list[HandoffSample]] = defaultdict(list)
    for sample in samples:
        by_tokens[sample.tokens].append(sample)
    if len(by_tokens) < 2:  # noqa: PLR2004 - a line needs two points
        msg = "a fit needs handoffs of at least two different prompt lengths"
        raise ValueError(msg)
    steps = {n: statistics.median(it.step_s for it in group) for n, group in by_tokens.items()}
    handoffs = {n: statistics.median(it.handoff_s for it in group) for n, group in by_tokens.items()}
    whole_s, per_token_s = _line(handoffs)
    step_s, step_per_token_s = _line(steps)
    first_step_s, step_per_token_s = min(step_s, whole_s), min(step_per_token_s, per_token_s)
    return HandoffFit(whole_s - first_step_s, per_token_s - step_per_token_s, first_step_s, step_per_token_s)


def _line(points: dict[int, float]) -> tuple[float, float]:
    """(at zero, slope), neither negative."""
    slopes = [(points[b] - points[a]) / (b - a) for a, b in combinations(sorted(points), 2)]
    slope = max(0.0, statistics.median(slopes))
    return max(0.0, statistics.median(value - slope * n for n, value in points.items())), slope


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
