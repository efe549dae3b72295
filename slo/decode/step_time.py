"""How long a step of a decode engine takes, learned from its steps.

A step takes a fixed time, a time for each stream in it, one for the context that they attend to, one for the
tokens of prompts that are computed among them, and one for each stream that was not in the step before, or is
no longer there: the engine keeps its batch from step to step. Owns these five numbers.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

_UNITS: Final = (1.0, 16.0, 4096.0, 128.0, 8.0)
"""Sizes of the five quantities that make them alike."""
_KEEP: Final = 0.998
"""What a step counts, of the one after it: about 500 of them count."""
_RIDGE: Final = 1e-3
_SOLVE_EVERY: Final = 16
_FEW: Final = 8
_HICCUP: Final = 4.0
"""Steps that took so many times what was predicted were held up by something else, and count as this."""
_SINGULAR: Final = 1e-15
_TYPICAL_S: Final = 0.01
"""A step that takes so long has the weight 1."""
_SHORTEST_S: Final = 1e-6
_FOLLOWS: Final = 1 / 8
"""Part of what a step was off by, as a logarithm, that counts for all steps at once."""
_AT_MOST: Final = 0.3
"""As far as this it does; a single step may be held up."""


class StepShape(NamedTuple):
    """What is in a step.

    Attributes:
        streams: That emit a token.
        context: Tokens that they attend to, all together.
        prompt_tokens: Tokens of prompts, or of sequences that are computed again.
        moved: Streams that the batch gains and loses with this step.
    """

    streams: int
    context: int
    prompt_tokens: int = 0
    moved: int = 0


class StepTimes:
    """Least squares of relative errors, of the steps of one engine, the recent ones weighing most.

    Relative, so that a few steps that something else has held up, as an engine's first ones, do not decide on
    what the many take; and so that short steps are as well predicted as long ones. Relative to the geometric
    mean of what a step took and what was predicted: to what it took alone, long ones would count too little
    and all predictions be low; to what was predicted, they would count too much while that is wrong.

    A machine that others share is slower for some seconds and quicker for others: all five are scaled by what
    the latest steps without prompts were off by.

    Attributes:
        fixed_s: Of any step.
        stream_s: For each stream.
        context_s: For each token of context.
        prompt_token_s: For each token of a prompt; until one was measured, as long as a stream's token.
        moved_s: For each stream that the batch gains or loses.
    """

    def __init__(self) -> None:
        self.fixed_s = self.stream_s = self.context_s = self._prompt_s = self.moved_s = 0.0
        self._products = [[0.0] * len(_UNITS) for _ in _UNITS]
        self._times = [0.0] * len(_UNITS)
        self._steps = 0
        self._learned = (0.0,) * len(_UNITS)
        """The five numbers, as if the machine were always as quick."""
        self._drift = 0.0
        """How many times as long as these say the latest steps took, as a logarithm."""

    @property
    def is_known(self) -> bool:
        """Whether enough steps were measured."""
        return self._steps >= _FEW

    @property
    def prompt_token_s(self) -> float:  # noqa: D102 - see Attributes
        return self._prompt_s or self.stream_s

    def predict_s(self, shape: StepShape) -> float:
        """Seconds that such a step takes; 0 while nothing is known."""
        decoding_s = self.stream_s * shape.streams + self.context_s * shape.context
        return (
            self.fixed_s + decoding_s + self.prompt_token_s * shape.prompt_tokens + self.moved_s * shape.moved
        )

    def own_s(self, context: int) -> float:
        """What a stream that attends to so many tokens adds to each step that it is in."""
        return self.stream_s + self.context_s * context

    def at_best_s(self, shape: StepShape) -> float:
        """The same on a machine that is no slower than usual; 0 until enough steps were measured."""
        return self.predict_s(shape) * math.exp(min(0.0, -self._drift)) if self.is_known else 0.0

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step has ended."""
        expected_s = max(self.predict_s(shape) if self.is_known else seconds, _SHORTEST_S)
        seconds = min(seconds, _HICCUP * expected_s)
        if not shape.prompt_tokens:
            off = math.log(max(seconds, _SHORTEST_S) / expected_s)
            self._drift += _FOLLOWS * min(max(off, -_AT_MOST), _AT_MOST)
        scale = math.exp(self._drift)
        seconds, expected_s = seconds / scale, expected_s / scale
        weight = _TYPICAL_S / math.sqrt(max(seconds, _SHORTEST_S) * expected_s)
        row = [weight, *[weight * value / unit for value, unit in zip(shape, _UNITS[1:], strict=True)]]
        for i in range(len(_UNITS)):
            x, products = row[i], self._products[i]
            self._times[i] = _KEEP * self._times[i] + x * weight * seconds
            for j in range(len(_UNITS)):
                products[j] = _KEEP * products[j] + x * row[j]
        self._steps += 1
        if self._steps <= 2 * _FEW or self._steps % _SOLVE_EVERY == 0:
            self._learn()
        self.fixed_s, self.stream_s, self.context_s, self._prompt_s, self.moved_s = (
            scale * value for value in self._learned
        )

    def _learn(self) -> None:
        """Solve for what is not negative; what was not seen of late stays near what it was."""
        prior = [value * unit for value, unit in zip(self._learned, _UNITS, strict=True)]
        kept = [*range(len(_UNITS))]
        solved = [0.0] * len(_UNITS)
        while kept:
            rows = [[self._products[i][j] + (_RIDGE if i == j else 0.0) for j in kept] for i in kept]
            found = _solve(rows, [self._times[i] + _RIDGE * prior[i] for i in kept])
            if min(found) >= 0:
                for index, value in zip(kept, found, strict=True):
                    solved[index] = value
                break
            kept.pop(found.index(min(found)))
        self._learned = tuple(value / unit for value, unit in zip(solved, _UNITS, strict=True))


def _solve(rows: list[list[float]], wanted: list[float]) -> list[float]:
    """Gaussian elimination of a small positive definite system."""
    size = len(wanted)
    rows = [[*row, value] for row, value in zip(rows, wanted, strict=True)]
    for i in range(size):
        pivot = rows[i][i] if abs(rows[i][i]) > _SINGULAR else _SINGULAR
        for j in range(i + 1, size):
            part = rows[j][i] / pivot
            for k in range(i, size + 1):
                rows[j][k] -= part * rows[i][k]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - rest) / (rows[i][i] if abs(rows[i][i]) > _SINGULAR else _SINGULAR)
    return found
