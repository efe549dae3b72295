"""How long a prefill takes, as a straight line through measurements.

Owns the model `seconds = a · tokens + c`, its fit and its quality. Does not measure anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class PrefillPredictor:
    """Predicted time of one prefill that runs alone.

    Attributes:
        per_token_s: Slope, seconds per prompt token.
        fixed_s: Intercept, seconds per forward pass.
        handoff_s: From the end of prefill to the first token: KV transfer and the first decode step.
    """

    per_token_s: float
    fixed_s: float
    handoff_s: float = 0.0

    def prefill_s(self, tokens: int) -> float:
        """Seconds to prefill `tokens` prompt tokens on an idle replica; 0 for no tokens."""
        return self.fixed_s + self.per_token_s * tokens if tokens > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured prefill: prompt tokens and seconds."""

    tokens: int
    measured_s: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A predictor fitted to samples, and how well it fits them.

    Attributes:
        predictor: The fitted line; its slope and intercept are never negative.
        r_squared: Coefficient of determination, 1 for a perfect fit.
        residuals_s: Measured minus predicted, in the order of the samples, seconds.
        mape: Mean absolute percentage error, as a fraction.
    """

    predictor: PrefillPredictor
    r_squared: float
    residuals_s: tuple[float, ...]
    mape: float


def fit(samples: Sequence[Sample], handoff_s: float = 0.0) -> Fit:
    """Ordinary least squares through `samples`, slope and intercept kept at or above zero.

    Raises:
        ValueError: with fewer than two different prompt lengths, or a time that is not positive.
    """
    if len({sample.tokens for sample in samples}) < 2:  # noqa: PLR2004 - a line needs two points
        msg = "a fit needs measurements of at least two different prompt lengths"
        raise ValueError(msg)
    if any(sample.measured_s <= 0 for sample in samples):
        msg = "every measured time must be positive"
        raise ValueError(msg)
    n = len(samples)
    mean_x = sum(s.tokens for s in samples) / n
    mean_y = sum(s.measured_s for s in samples) / n
    spread = sum((s.tokens - mean_x) ** 2 for s in samples)
    slope = sum((s.tokens - mean_x) * (s.measured_s - mean_y) for s in samples) / spread
    intercept = mean_y - slope * mean_x
    if slope < 0:
        slope, intercept = 0.0, mean_y
    elif intercept < 0:
        squares = sum(s.tokens**2 for s in samples)
        slope, intercept = sum(s.tokens * s.measured_s for s in samples) / squares, 0.0
    predictor = PrefillPredictor(slope, intercept, handoff_s)
    residuals = tuple(s.measured_s - (intercept + slope * s.tokens) for s in samples)
    total = sum((s.measured_s - mean_y) ** 2 for s in samples)
    unexplained = sum(r * r for r in residuals)
    return Fit(
        predictor=predictor,
        r_squared=1.0 - unexplained / total if total > 0 else 1.0,
        residuals_s=residuals,
        mape=sum(abs(r) / s.measured_s for r, s in zip(residuals, samples, strict=True)) / n,
    )
