"""A predictor that is wrong by a factor of its own for each prompt, as predictors are on real machines.

Owns the noise's form. A prompt is known by its length: two of the same length are mistaken alike, and what is
left of a prompt is mistaken as the whole was.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, fields

from slo.predict.prefill_time import PrefillPredictor


@dataclass(frozen=True, slots=True)
class PredictionNoise:
    """Predicted over true time: log-normal.

    Attributes:
        sigma: Standard deviation of its logarithm.
        bias: Its median; below 1 predicts too little.
        seed: Chooses whose prediction is off how far.
    """

    sigma: float
    bias: float = 1.0
    seed: int = 0

    def factor(self, prompt_tokens: int) -> float:
        """Of a prompt of so many tokens in all."""
        rng = random.Random(f"{self.seed} {prompt_tokens}")  # noqa: S311 - reproducible, not secret
        return self.bias * math.exp(rng.gauss(0.0, self.sigma))


@dataclass(frozen=True, slots=True)
class NoisyPredictor(PrefillPredictor):
    """Predicts with noise."""

    noise: PredictionNoise = PredictionNoise(0.0)
    _known: dict[int, float] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, predictor: PrefillPredictor, noise: PredictionNoise) -> NoisyPredictor:
        """The same with noise."""
        exact = {part.name: getattr(predictor, part.name) for part in fields(PrefillPredictor)}
        return cls(**exact, noise=noise)

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        """As `PrefillPredictor.prefill_s`, by the error of the whole prompt."""
        exact_s = PrefillPredictor.prefill_s(self, tokens, context_tokens)
        return self._factor(tokens + context_tokens) * exact_s

    def pass_s(self, tokens: int, pairs: float) -> float:
        """As `PrefillPredictor.pass_s`; a pass of one prompt is mistaken as that prompt."""
        exact_s = PrefillPredictor.pass_s(self, tokens, pairs)
        return self._factor(round(pairs / tokens + tokens / 2)) * exact_s if tokens > 0 else exact_s

    def _factor(self, prompt_tokens: int) -> float:
        if (known := self._known.get(prompt_tokens)) is None:
            known = self._known[prompt_tokens] = self.noise.factor(prompt_tokens)
        return known
