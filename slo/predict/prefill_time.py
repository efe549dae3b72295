"""How long a prefill takes: fixed, per token, and per pair of a query and a key that attention looks at.

Owns the model `seconds = max(f, c + a · tokens + b · pairs)`, its fit and its quality. Does not measure
anything. The floor f is an accelerator's: the host launches a short pass no faster than its operators let it,
and the device reads all weights in any case, while the work of its tokens hides behind that (the roofline
model of Williams et al., 2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import numpy as np

from slo.predict.pass_shape import PassPart

SHARED_TOKENS: Final = 2048
"""Prompts share a pass up to so many tokens, if nothing else is configured (`preemption.join_tokens`)."""
_MOST_PAIR_WORK: Final = 4.0


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
        floor_s: Seconds that no forward pass takes less.
    """

    per_token_s: float
    fixed_s: float
    handoff_s: float = 0.0
    per_pair_s: float = 0.0
    floor_s: float = 0.0

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        """Seconds to prefill `tokens` behind `context_tokens` on an idle replica; 0 for no tokens."""
        if tokens <= 0:
            return 0.0
        pairs = tokens * (context_tokens + tokens / 2)
        return max(self.floor_s, self.fixed_s + self.per_token_s * tokens + self.per_pair_s * pairs)

    def idle_s(self, tokens: int, context_tokens: int = 0) -> float:
        """Of `prefill_s`, what is no work of these tokens: prefills that share passes take it only once.

        That is what lies between the floor and their line, or, where a pass of `SHARED_TOKENS` still takes
        the floor, between it and their part of it.
        """
        if self.floor_s <= 0 or tokens <= 0:
            return 0.0
        pairs = tokens * (context_tokens + tokens / 2)
        line_s = self.fixed_s + self.per_token_s * tokens + self.per_pair_s * pairs
        work_s = max(line_s, self.floor_s * min(1.0, tokens / SHARED_TOKENS))
        alone_s = max(self.floor_s, line_s)
        return self.prefill_s(tokens, context_tokens) * (alone_s - work_s) / alone_s

    def work_s(self, tokens: int, context_tokens: int = 0) -> float:
        """What a prefill adds to passes that others share with it."""
        return self.prefill_s(tokens, context_tokens) - self.idle_s(tokens, context_tokens)

    def pass_s(self, tokens: int, pairs: float) -> float:
        """Seconds of a forward pass of `tokens` of several prefills with so many `attention_pairs` in all."""
        if tokens <= 0:
            return 0.0
        return max(self.floor_s, self.fixed_s + self.per_token_s * tokens + self.per_pair_s * pairs)

    def part_s(self, part: PassPart, tokens: int, pairs: float) -> float:
        """Seconds of a part of such a pass; what is fixed is spread over it as the work of its tokens is."""
        return self.fraction(part, tokens, pairs) * self.pass_s(tokens, pairs)

    def fraction(self, part: PassPart, tokens: int, pairs: float) -> float:
        """The part of such a pass as a fraction of its time."""
        of_tokens_s, of_pairs_s = self.kinds_s(tokens, pairs)
        whole_s = of_tokens_s + of_pairs_s
        return (part.tokens * of_tokens_s + part.pairs * of_pairs_s) / whole_s if whole_s > 0 else part.tokens

    def kinds_s(self, tokens: int, pairs: float) -> tuple[float, float]:
        """Seconds of such a pass that go with its tokens, up to the floor, and with its attention."""
        of_pairs_s = self.per_pair_s * pairs
        return max(self.floor_s - of_pairs_s, self.fixed_s + self.per_token_s * tokens), of_pairs_s

    @property
    def least_s(self) -> float:
        """What a pass takes however little is in it."""
        return max(self.floor_s, self.fixed_s)

    def encode(self) -> list[float]:
        """As it travels with a request to the engine, without the handoff, which is nothing to it."""
        return [self.per_token_s, self.fixed_s, self.per_pair_s, self.floor_s]

    @staticmethod
    def decode(encoded: Sequence[float]) -> PrefillPredictor:
        """What was encoded."""
        per_token_s, fixed_s, per_pair_s, floor_s = encoded
        return PrefillPredictor(per_token_s, fixed_s, 0.0, per_pair_s, floor_s)

    def times(self, factor: float) -> PrefillPredictor:
        """The predictor of a replica that takes `factor` times as long; the handoff stays as it is."""
        return replace(
            self,
            per_token_s=self.per_token_s * factor,
            fixed_s=self.fixed_s * factor,
            per_pair_s=self.per_pair_s * factor,
            floor_s=self.floor_s * factor,
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
        mape: Mean absolute percentage error, as a fraction.
    """

    predictor: PrefillPredictor
    r_squared: float
    mape: float


def fit(
    samples: Sequence[Sample], handoff_s: float = 0.0, pair_work: float = 0.0, *, has_floor: bool = False
) -> Fit:
    """Fit by least squares of the relative errors, with no negative coefficient.

    Args:
        samples: What was measured.
        handoff_s: See `PrefillPredictor`.
        pair_work: The work of a pair over that of a token. A pair takes no less of the time of a token, since
            no device computes attention faster than a product of matrices. In short prompts attention does
            not show, and what they say of it is noise.
        has_floor: Whether they are of an accelerator, where the shortest may all take the same time. Nothing
            is said of the work of a token then but by longer ones: the longest counts as one.

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
    fitted = _roofline(typical, pair_work) if has_floor else _curve(typical, pair_work)
    predictor = replace(fitted, handoff_s=handoff_s)
    measured = np.array([sample.measured_s for sample in samples])
    predicted = [predictor.prefill_s(sample.tokens, sample.context_tokens) for sample in samples]
    residuals = measured - np.array(predicted)
    total = float(np.sum((measured - measured.mean()) ** 2))
    return Fit(
        predictor=predictor,
        r_squared=1.0 - float(residuals @ residuals) / total if total > 0 else 1.0,
        mape=float(np.mean(np.abs(residuals) / measured)),
    )


def _curve(samples: Sequence[Sample], pair_work: float) -> PrefillPredictor:
    weights = np.array([1 / sample.measured_s for sample in samples])
    wanted = np.array([_features(sample) for sample in samples])
    wanted[:, 1] += pair_work * wanted[:, 0]  # so that what is fitted to pairs is what they take beyond it
    coefficients = _non_negative(wanted * weights[:, None], np.ones(len(samples)))
    coefficients[0] += pair_work * coefficients[1]
    per_pair_s, per_token_s, fixed_s = (float(value) for value in coefficients)
    return PrefillPredictor(per_token_s, fixed_s, per_pair_s=per_pair_s)


def _roofline(samples: Sequence[Sample], pair_work: float) -> PrefillPredictor:
    """The floor under the shortest of them and the line through the others that together fit best.

    The line has nothing fixed: where all take the same time, that would explain it, and whatever the noise
    leaves for a token would be promised to prompts that are longer than all samples. Nor is it bent further
    than by `_MOST_PAIR_WORK` times the work of a pair, which would have them take far too long.
    """
    ordered = sorted(samples, key=lambda one: one.tokens + pair_work * _features(one)[0])
    best, least = PrefillPredictor(0.0, 0.0), math.inf
    for short in range(len(ordered)):
        line = _line(ordered[short:], pair_work)
        inverse = np.array([1 / sample.measured_s for sample in ordered[:short]])
        floor_s = float(inverse.sum() / (inverse**2).sum()) if short else 0.0
        found = replace(line, floor_s=floor_s)
        off = [1 - found.prefill_s(one.tokens, one.context_tokens) / one.measured_s for one in ordered]
        if (error := sum(each**2 for each in off)) < least:
            best, least = found, error
    return best


def _line(samples: Sequence[Sample], pair_work: float) -> PrefillPredictor:
    """The line through samples and through nothing."""
    pairs, tokens, _ = np.array([_features(sample) for sample in samples]).T
    columns = [tokens, pairs]
    if pair_work > 0:  # sums of these two with positive weights have a pair's work within the bounds
        columns = [tokens + factor * pair_work * pairs for factor in (1.0, _MOST_PAIR_WORK)]
    count = min(len(samples), len(columns))
    weights = np.array([1 / sample.measured_s for sample in samples])
    found = np.zeros(len(columns))
    found[:count] = _non_negative(np.column_stack(columns[:count]) * weights[:, None], np.ones(len(samples)))
    of_token, of_pair = map(float, found)
    if pair_work > 0:
        of_token, of_pair = of_token + of_pair, pair_work * (of_token + _MOST_PAIR_WORK * of_pair)
    return PrefillPredictor(of_token, 0.0, per_pair_s=of_pair)


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
