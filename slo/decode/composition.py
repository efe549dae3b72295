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
"""Part of the tightest objective that steps take on average; the rest is for what predictions miss."""
CUSHION: Final = 3.0
"""A stream is in danger that is ahead by less than it loses in so many steps with everybody."""


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

    Up to `MOST_IN_A_ROW` steps that leave streams out follow each other, and then one with everybody; all of
    them together take as long as the tightest objective of those in danger allows.

    Args:
        times: How long its steps take.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._left_out: frozenset[str] = frozenset()
        self._steps = 0
        """With somebody left out, since the latest with everybody."""

    def leaves_out(self, streams: Sequence[Paced], now_s: float, prompt_tokens: int = 0) -> frozenset[str]:
        """Whom the next step leaves out; once chosen, they are for four steps.

        Args:
            streams: Those that could emit a token.
            now_s: Now.
            prompt_tokens: What else the step computes.
        """
        if 0 < self._steps < MOST_IN_A_ROW:
            full_s = self._times.predict_s(_shape(streams, prompt_tokens))
            kept = [one.request_id for one in streams if _may_wait(one, now_s, full_s)]
            self._left_out = self._left_out.intersection(kept)
        elif self._steps or not self._times.is_known:
            self._left_out = frozenset()
        else:
            self._left_out = self._choose(streams, now_s, prompt_tokens)
        self._steps = self._steps + 1 if self._left_out else 0
        return self._left_out

    def admits(
        self, streams: Sequence[Paced], newcomer_context: int, newcomer_tpot_s: float | None = None
    ) -> bool:
        """Whether one more stream leaves the tightest objective that can be met in reach.

        It does as long as steps of that pace have room for each stream as often as its own objective wants
        it, and for those without one as often as nobody is left out.
        """
        if not self._times.is_known:
            return True
        tightest_s = self._tightest(streams)
        if tightest_s is None:
            return True
        step_s = MARGIN * tightest_s
        everybody = [(one.context, one.tpot_s) for one in streams]
        everybody.append((newcomer_context, newcomer_tpot_s))
        needed_s = self._times.fixed_s
        for context, tpot_s in everybody:
            part = 0.0 if tpot_s is None else min(1.0, step_s / tpot_s)
            own_s = self._times.stream_s + self._times.context_s * context
            needed_s += max(part, 1 / (MOST_IN_A_ROW + 1)) * own_s
        return needed_s <= step_s

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
        in_danger = [one for one in streams if _is_in_danger(one, full_s)]
        tightest_s = self._tightest(in_danger)
        if tightest_s is None:
            return frozenset()
        # What is left for each step that leaves streams out, once the one with everybody has taken its time.
        target_s = ((MOST_IN_A_ROW + 1) * MARGIN * tightest_s - full_s) / MOST_IN_A_ROW
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


def _is_in_danger(stream: Paced, full_s: float) -> bool:
    """Whether a stream would soon be late, if it is not already, were all steps with everybody."""
    if stream.tpot_s is None:
        return False
    loses_s = full_s - stream.tpot_s
    return stream.credit_s < (CUSHION * loses_s if loses_s > 0 else loses_s)


def _may_wait(stream: Paced, now_s: float, full_s: float) -> bool:
    """Whether a stream can do without a token in the next step, and get one in a full step after it."""
    if now_s + 2 * full_s - stream.token_s > MAX_GAP_S:
        return False
    return stream.tpot_s is None or stream.credit_s > 2 * full_s


def _shape(streams: Sequence[Paced], prompt_tokens: int) -> StepShape:
    return StepShape(len(streams), sum([one.context for one in streams]), prompt_tokens)
