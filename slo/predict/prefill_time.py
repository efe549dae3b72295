"""How long a prefill takes: fixed, per token, and per pair of a query and a key that attention looks at.

Owns the model `seconds = c + a · tokens + b · pairs`, its fit and its quality. Does not measure anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from slo.predict.pass_shape import PassPart


def attention_pairs(tokens: float, context_tokens: float = 0) -> float:
    """Pairs of a query and a key that causal attention looks at, per head, half a pair per token left out.

    Args:
        tokens: Tokens to compute.
        context_tokens: Tokens before them whose KV is there: a cached prefix, or earlier chunks.
    """
    return tokens * (context_tokens + tokens / 2)


@dataclass(frozen=True, slots=True)
class PrefillPredictor:
    """Predicted time of one prefill that runs alone.

    Attributes:
        per_token_s: Seconds per token computed.
        fixed_s: Seconds per forward pass.
        handoff_s: From the end of prefill to the first token: the calls between the two replicas.
        per_pair_s: Seconds per pair of `attention_pairs`; makes a long prompt, or one behind a long context,
            more than proportionally long.
    """

    per_token_s: float
    fixed_s: float
    handoff_s: float = 0.0
    per_pair_s: float = 0.0

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        """Seconds to prefill `tokens` behind `context_tokens` on an idle replica; 0 for no tokens."""
        if tokens <= 0:
            return 0.0
        pairs = tokens * (context_tokens + tokens / 2)
        return self.fixed_s + self.per_token_s * tokens + self.per_pair_s * pairs

    def pass_s(self, tokens: int, pairs: float) -> float:
        """Seconds of a forward pass of `tokens` of several prefills with so many `attention_pairs` in all."""
        return self.fixed_s + self.per_token_s * tokens + self.per_pair_s * pairs if tokens > 0 else 0.0

    def part_s(self, part: PassPart, tokens: int, pairs: float) -> float:
        """Seconds of a part of such a pass; what is fixed is spread over it as the work of its tokens is."""
        return self.fraction(part, tokens, pairs) * self.pass_s(tokens, pairs)

    def fraction(self, part: PassPart, tokens: int, pairs: float) -> float:
        """The part of such a pass as a fraction of its time."""
        of_tokens_s, of_pairs_s = self.kinds_s(tokens, pairs)
        whole_s = of_tokens_s + of_pairs_s
        return (part.tokens * of_tokens_s + part.pairs * of_pairs_s) / whole_s if whole_s > 0 else part.tokens

    def kinds_s(self, tokens: int, pairs: float) -> tuple[float, float]:
        """Seconds of such a pass that go with its tokens, and with its attention."""
        return self.fixed_s + self.per_token_s * tokens, self.per_pair_s * pairs

    def times(self, factor: float) -> PrefillPredictor:
        """The predictor of a replica that takes `factor` times as long; the handoff stays as it is."""
        return replace(
            self,
            per_token_s=self.per_token_s * factor,
            fixed_s=self.fixed_s * factor,
            per_pair_s=self.per_pair_s * factor,
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured prefill: tokens computed, seconds, and the tokens before them whose KV was there."""

    tokens: int
    measured_s: float
    context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Fit:
    """A predictor fitted to samples, and how well it fits them.

    Attributes:
        predictor: The fitted model; none of its coefficients is negative.
        r_squared: Coefficient of determination, 1 for a perfect fit.
        residuals_s: Measured minus predicted, in the order of the samples, seconds.
        mape: Mean absolute percentage error, as a fraction.
    """

    predictor: PrefillPredictor
    r_squared: float
    residuals_s: tuple[float, ...]
    mape: float


def fit(samples: Sequence[Sample], handoff_s: float = 0.0, pair_work: float = 0.0) -> Fit:
    """Fit by least squares of the relative errors, with no negative coefficient.

    Args:
        samples: What was measured.
        handoff_s: See `PrefillPredictor`.
        pair_work: The work of a pair over that of a token. A pair takes no less of the time of a token, since
            no device computes attention faster than a product of matrices. In short prompts attention does
            not show, and what they say of it is noise.

    Errors are relative because a tenth of a short prefill matters as much to its deadline as a tenth of a
    long one. Of repeated measurements the median is fitted, which one outlier does not move; the quality is
    that over all.

    Raises:
        ValueError: with fewer than two different prompt lengths, or a time that is not positive.
    """
    if len({sample.tokens for sample in samples}) < 2:  # noqa: PLR2004 - a line needs two points
        raise ValueError("a fit needs measurements of at least two different prompt lengths")
    if any(sample.measured_s <= 0 for sample in samples):
        raise ValueError("every measured time must be positive")
    typical = _medians(samples)
    weights = np.array([1 / sample.measured_s for sample in typical])
    wanted = np.array([_features(sample) for sample in typical])
    wanted[:, 1] += pair_work * wanted[:, 0]  # so that what is fitted to pairs is what they take beyond it
    coefficients = _non_negative(wanted * weights[:, None], np.ones(len(typical)))
    coefficients[0] += pair_work * coefficients[1]
    measured = np.array([sample.measured_s for sample in samples])
    features = np.array([_features(sample) for sample in samples])
    per_pair_s, per_token_s, fixed_s = (float(value) for value in coefficients)
    residuals = measured - features @ coefficients
    total = float(np.sum((measured - measured.mean()) ** 2))
    return Fit(
        predictor=PrefillPredictor(per_token_s, fixed_s, handoff_s, per_pair_s),
        r_squared=1.0 - float(residuals @ residuals) / total if total > 0 else 1.0,
        residuals_s=tuple(float(value) for value in residuals),
        mape=float(np.mean(np.abs(residuals) / measured)),
    )


def _medians(samples: Sequence[Sample]) -> list[Sample]:
    """One sample for each prompt length and context."""
    times: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        times.setdefault((sample.tokens, sample.context_tokens), []).append(sample.measured_s)
    return [
        Sample(tokens, float(np.median(times_s)), context) for (tokens, context), times_s in times.items()
    ]


def _features(sample: Sample) -> tuple[float, float, float]:
    return attention_pairs(sample.tokens, sample.context_tokens), float(sample.tokens), 1.0


def _non_negative(features: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The non-negative coefficients with the least squared error: the best over all sets of active ones.

    With fewer different rows than coefficients the curve is not determined; then only as many coefficients
    as rows are used, those for long prompts left out first.
    """
    scale = np.linalg.norm(features, axis=0)
    scaled = features / scale
    count = features.shape[1]
    rank = min(count, len(np.unique(np.round(scaled, 12), axis=0)))
    active = range(count - rank, count) if rank < count else range(count)
    best, min_error = np.zeros(count), float("inf")
    for size in range(1, rank + 1):
        for chosen in combinations(active, size):
            part, *_ = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)
            if np.any(part < 0):
                continue
            error = float(np.sum((scaled[:, chosen] @ part - target) ** 2))
            if error < min_error * (1 - 1e-12):
                best, min_error = np.zeros(count), error
                best[list(chosen)] = part / scale[list(chosen)]
    return best
