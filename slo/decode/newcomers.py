"""Whether running streams bear one more.

Owns when a newcomer would slow them down too much, and when it starts all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from slo.decode.composition import CUSHION, MARGIN, MOST_IN_A_ROW, Paced, shape_of, tpot_in_reach
from slo.decode.restore import STARVES_AFTER_S
from slo.decode.step_time import StepTimes

LEAST_PART: Final = 0.2
"""A newcomer is not admitted if streams without an objective would be in fewer steps than this part."""


class Starting(NamedTuple):
    """A request that waits to start.

    Attributes:
        stream: It, as if it ran.
        since_s: Since when it waits.
        to_come: Tokens that it is expected to emit.
        has_first: Whether it has its first token.
        first_due_s: When that is due; None without an objective for it.
        prompt_tokens: That steps have yet to compute.
        prompt_steps: In how many.
        is_top: Whether it is of the top tier.
    """

    stream: Paced
    since_s: float
    to_come: int
    has_first: bool = False
    first_due_s: float | None = None
    prompt_tokens: int = 0
    prompt_steps: int = 0
    is_top: bool = False


class Newcomers:
    """Those of one engine.

    Args:
        times: How long its steps take.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times

    def bears(
        self, streams: Sequence[Paced], newcomer: Starting, now_s: float, prompt_tokens: int = 0
    ) -> bool:
        """Whether streams bear a newcomer, it has waited for long enough, or it loses its own objective.

        They do as long as the tightest objective that can be met stays in reach: steps of that pace have room
        for each stream as often as its own objective wants it, and for those without one as often as nobody
        is left out. Objectives of lower tiers do not count; to one of the top tier their streams yield, and
        it waits for its first token alone.

        Args:
            streams: Those beside which it starts.
            newcomer: It.
            now_s: Now.
            prompt_tokens: What else the next step computes.
        """
        if (newcomer.is_top and newcomer.has_first) or now_s - newcomer.since_s > STARVES_AFTER_S:
            return True  # its client waits for the next token, or it has for long
        beside = [one for one in streams if one.rank >= newcomer.stream.rank]
        if not newcomer.is_top:
            beside += [one._replace(tpot_s=None) for one in streams if one.rank < newcomer.stream.rank]
        if self._has_room(beside, newcomer.stream):
            return True
        # Steps until then may have everybody.
        step_s = self._times.predict_s(shape_of([*streams, newcomer.stream], prompt_tokens))
        if newcomer.has_first:
            return _loses_pace(newcomer, step_s)
        return newcomer.first_due_s is not None and self._loses_first(
            newcomer, step_s, newcomer.first_due_s - now_s
        )

    def _has_room(self, streams: Sequence[Paced], newcomer: Paced) -> bool:
        tightest_s = self._tightest(streams) if self._times.is_known else None
        if tightest_s is None:
            return True
        step_s = MARGIN * tightest_s
        needed_s = self._times.fixed_s
        for one in (*streams, newcomer):
            part = 0.0 if one.tpot_s is None else min(1.0, step_s / one.tpot_s)
            needed_s += max(part, LEAST_PART) * self._times.own_s(one.context)
            if part < 1:
                needed_s += 2 * self._times.moved_s / (MOST_IN_A_ROW + 1)
        return needed_s <= step_s

    def _loses_first(self, newcomer: Starting, step_s: float, left_s: float) -> bool:
        """Whether one that waits a few steps more has its first token too late."""
        prompt_s = newcomer.prompt_tokens * self._times.prompt_token_s
        needs_s = max(1, newcomer.prompt_steps) * step_s + prompt_s
        return 0 < left_s <= needs_s + CUSHION * step_s

    def _tightest(self, streams: Sequence[Paced]) -> float | None:
        """The tightest objective that a step with its stream alone would meet."""
        in_reach = [tpot_in_reach(one, self._times) for one in streams]
        return min([tpot_s for tpot_s in in_reach if tpot_s is not None], default=None)


def _loses_pace(newcomer: Starting, step_s: float) -> bool:
    """Whether one that waits a few steps more ends too late for its pace."""
    stream = newcomer.stream
    if stream.tpot_s is None:
        return False
    gains_s = newcomer.to_come * (stream.tpot_s - min(step_s, MARGIN * stream.tpot_s))
    return 0 < stream.credit_s + gains_s <= CUSHION * step_s
