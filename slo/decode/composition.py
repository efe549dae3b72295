"""Which streams a step leaves out so that the others keep their pace.

A TPOT objective is a mean: a stream that is ahead of it can wait a step, and so can one without an objective.
Owns whom a step leaves out, for how long, and when a newcomer would slow the others down too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from slo.decode.step_time import StepShape, StepTimes

MOST_IN_A_ROW: Final = 4
"""Steps in a row that a stream may be left out of."""
MAX_GAP_S: Final = 1.0
"""No stream waits longer for its next token on account of others."""
WORTH: Final = 0.10
"""Part of a step's time that leaving streams out has to save."""
MARGIN: Final = 0.9
"""Part of the tightest objective that a step with a newcomer may take."""


class Paced(NamedTuple):
    """A stream as far as its pace is concerned.

    Attributes:
        request_id: The engine's name for it.
        context: Tokens that it attends to.
        tpot_s: Its objective; None for none.
        credit_s: By how much it is ahead of it; infinite without one.
        token_s: When it has got its latest token.
    """

    request_id: str
    context: int
    tpot_s: float | None = None
    credit_s: float = float("inf")
    token_s: float = 0.0


class Composer:
    """Composes the steps of one engine.

    Args:
        times: How long its steps take.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._members: frozenset[str] = frozenset()
        self._left_out: frozenset[str] = frozenset()
        self._steps = 0

    def leaves_out(self, streams: Sequence[Paced], now_s: float, prompt_tokens: int = 0) -> frozenset[str]:
        """Whom the next step leaves out; the same for four steps, then nobody for one.

        Args:
            streams: Those that could emit a token.
            now_s: Now.
            prompt_tokens: What else the step computes.
        """
        members = frozenset([stream.request_id for stream in streams])
        if self._steps and members == self._members and self._steps < MOST_IN_A_ROW:
            self._steps += 1
            # A gap may have become too long.
            full_s = self._times.predict_s(_shape(streams, prompt_tokens))
            late = [one.request_id for one in streams if not _may_wait(one, now_s, full_s)]
            self._left_out = self._left_out.difference(late)
            return self._left_out
        rested = self._steps == 0 or not self._left_out
        self._members = members
        self._left_out = self._choose(streams, now_s, prompt_tokens) if rested else frozenset()
        self._steps = 1 if self._left_out else 0
        return self._left_out

    def admits(self, streams: Sequence[Paced], newcomer_context: int) -> bool:
        """Whether one more stream leaves the tightest objective that can be met in reach."""
        if not self._times.is_known:
            return True
        tightest = self._tightest(streams)
        if tightest is None:
            return True
        shape = _shape(streams, 0)
        with_it = StepShape(shape.streams + 1, shape.context + newcomer_context)
        return self._times.predict_s(with_it) <= MARGIN * tightest

    def _tightest(self, streams: Sequence[Paced]) -> float | None:
        """The tightest objective that a step with its stream alone would meet."""
        return min(
            [
                one.tpot_s
                for one in streams
                if one.tpot_s is not None and self._times.predict_s(StepShape(1, one.context)) <= one.tpot_s
            ],
            default=None,
        )

    def _choose(self, streams: Sequence[Paced], now_s: float, prompt_tokens: int) -> frozenset[str]:
        full = _shape(streams, prompt_tokens)
        full_s = self._times.predict_s(full)
        if not self._times.is_known:
            return frozenset()
        # In danger is whose next token would be late after a step with all.
        in_danger = [one for one in streams if one.tpot_s is not None and one.credit_s + one.tpot_s < full_s]
        target_s = self._tightest(in_danger)
        if target_s is None or full_s <= target_s:
            return frozenset()
        tight = {one.request_id for one in in_danger}
        others = [one for one in streams if one.request_id not in tight and _may_wait(one, now_s, full_s)]
        others.sort(key=lambda one: -one.context)
        shape, chosen = full, []
        for one in others:
            if self._times.predict_s(shape) <= target_s:
                break
            chosen.append(one.request_id)
            shape = shape.without(one.context)
        saved = full_s - self._times.predict_s(shape)
        return frozenset(chosen) if saved >= WORTH * full_s else frozenset()


def _may_wait(stream: Paced, now_s: float, full_s: float) -> bool:
    """Whether a stream can do without a token in the next step, and get one in a full step after it."""
    if now_s + 2 * full_s - stream.token_s > MAX_GAP_S:
        return False
    return stream.tpot_s is None or stream.credit_s > 2 * full_s


def _shape(streams: Sequence[Paced], prompt_tokens: int) -> StepShape:
    return StepShape(len(streams), sum([one.context for one in streams]), prompt_tokens)
