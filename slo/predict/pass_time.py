"""What forward passes take on a replica, learned from those that it has measured.

Owns the correction of the fixed and of the linear part of a prediction, apart from each other: what a warm-up
takes for fixed has more in it than a pass has. Where no pass takes less than a floor, it is the floor and the
line above it. The model of a pass is `slo.predict.prefill_time`'s.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from slo.predict.prefill_time import PrefillPredictor
from slo.predict.speed_change import SpeedChange

REMEMBERED: Final = 64
"""Latest passes that count."""
_EACH_UNTIL: Final = 16
_EVERY: Final = 8
_ROUNDS: Final = 6
_LEAST_S: Final = 1e-6
_LEAST_SPREAD: Final = 0.02
_SIGMAS: Final = 2.0
_MAD_TO_SIGMA: Final = 1.4826
_ANCHOR: Final = 0.3
"""What a measurement of the warm-up counts, of a pass: passes of one length change little for others."""
_CHANGED: Final = 6
"""So many passes in a row say that a replica has become slower or quicker."""
_TOGETHER: Final = 0.25
"""How much it counts, of a pass that is all fixed, that both parts are off by the same factor: in long passes
the fixed part does not show."""
_UNSEEN: Final = (0.5, 4.0)
"""How far the line may come from the warm-up's while no pass shows it. Short ones alone would lead it astray:
a machine that becomes slower little by little changes what is fixed, and one that is quick again all."""


class LearnedPasses:
    """The passes of one replica.

    Args:
        prior: What holds before the first pass; of its linear part the shape is kept.
        anchors: Prompt lengths that it was measured at.

    Attributes:
        predictor: What holds now.
    """

    def __init__(self, prior: PrefillPredictor, anchors: Sequence[int]) -> None:
        self.predictor = prior
        self._prior = prior
        self._linear = replace(prior, floor_s=0.0) if prior.floor_s > 0 else replace(prior, fixed_s=0.0)
        self._lengths = tuple(anchors)
        self._anchors = self._at_lengths(1.0)
        self._passes: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self._speed = SpeedChange(_CHANGED, REMEMBERED)
        self._seen = 0

    def add(self, tokens: int, pairs: float, seconds: float) -> None:
        """A pass was measured."""
        if tokens <= 0 or seconds < _LEAST_S:
            return
        line_s = self._linear.pass_s(tokens, pairs)
        self._passes.append((line_s, seconds))
        self._seen += 1
        predicted_s = max(_LEAST_S, self.predictor.pass_s(tokens, pairs))
        changed = self._speed.observe(line_s, seconds / predicted_s)
        if changed is not None:
            self._forget_others(changed)
        if changed is not None or self._seen <= _EACH_UNTIL or self._seen % _EVERY == 0:
            self._learn()

    def _forget_others(self, factor: float) -> None:
        """All takes so many times as long; of what passes before the latest ones said, the shape stays."""
        self._anchors = self._at_lengths(factor)
        self._passes = deque([*self._passes][-_CHANGED:], maxlen=REMEMBERED)
        self._seen = _CHANGED

    def _at_lengths(self, factor: float) -> list[tuple[float, float]]:
        """What prompts of the lengths of the warm-up would take, if all took so many times as long."""
        return [
            (self._linear.prefill_s(tokens), factor * self.predictor.prefill_s(tokens))
            for tokens in self._lengths
        ]

    def _learn(self) -> None:
        """Least squares of relative errors; passes that were held up count the less the more they were."""
        points = np.array([point for point in (*self._anchors, *self._passes) if point[1] >= _LEAST_S])
        first = len(points) - len(self._passes)
        features = self._parts(points[:, 0]) / points[:, 1:]
        known = np.full(first, _ANCHOR)
        weights = np.append(known, np.ones(len(self._passes)))
        least_s, scale = self._least_s, 1.0
        is_seen = any(line_s >= self._least_s for line_s, _ in self._passes)
        bounds = (0.0, math.inf) if is_seen else _UNSEEN
        for _ in range(_ROUNDS):
            least_s, scale = self._solved(features, weights, bounds)
            errors = np.abs(1.0 - features[first:] @ (least_s, scale))
            reach = _SIGMAS * max(_LEAST_SPREAD, _MAD_TO_SIGMA * float(np.median(errors)))
            weights = np.append(known, np.minimum(1.0, reach / np.maximum(errors, reach / 10)))
        has_floor = self._prior.floor_s > 0
        self.predictor = replace(
            self._prior,
            fixed_s=scale * self._prior.fixed_s if has_floor else least_s,
            per_token_s=scale * self._prior.per_token_s,
            per_pair_s=scale * self._prior.per_pair_s,
            floor_s=least_s if has_floor else 0.0,
        )

    @property
    def _least_s(self) -> float:
        """What is corrected beside the line: the floor, or what is fixed."""
        return self._prior.floor_s or self._prior.fixed_s

    def _parts(self, line_s: np.ndarray) -> np.ndarray:
        """Which part a pass has of the least time and of the line: of a floor all or nothing, else both.

        Args:
            line_s: What each would take by the line before the first pass, seconds; shape (passes,).
        """
        if self._prior.floor_s <= 0:
            return np.column_stack([np.ones(len(line_s)), line_s])
        # By what holds now: the line may have turned out to be steeper than the warm-up let it seem.
        scale = self.predictor.per_token_s / self._prior.per_token_s if self._prior.per_token_s > 0 else 1.0
        is_short = line_s * scale < self.predictor.floor_s
        return np.column_stack([is_short, np.where(is_short, 0.0, line_s)])

    def _solved(
        self, features: np.ndarray, weights: np.ndarray, bounds: tuple[float, float]
    ) -> tuple[float, float]:
        """Both coefficients, neither negative, and that of the line within its bounds."""
        root = np.sqrt(weights)
        rows, wanted = features * root[:, None], root
        if (least_s := self._least_s) > 0:
            off = float(np.median(1.0 / (features @ (least_s, 1.0))))
            together = _TOGETHER / off * np.array([[1.0 / least_s, -1.0]])
            rows, wanted = np.concatenate([rows, together]), np.append(wanted, 0.0)
        (least_s, scale), *_ = np.linalg.lstsq(rows, wanted, rcond=None)
        lowest, highest = bounds
        if least_s < 0:
            line = features[:, 1]
            scale = (weights * line).sum() / (weights * line**2).sum()
            return 0.0, float(min(max(scale, lowest), highest))
        if lowest <= scale <= highest:
            return float(least_s), float(scale)
        scale = min(max(scale, lowest), highest)
        fixed, rest = features[:, 0], 1.0 - features[:, 1] * scale
        return max(0.0, float((weights * fixed * rest).sum() / (weights * fixed**2).sum())), float(scale)
