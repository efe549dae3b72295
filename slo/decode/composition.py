"""Which streams a step leaves out so that the others keep their pace.

A TPOT objective is a mean: a stream that is ahead of it can wait a step, and so can one without an objective.
Owns whom a step leaves out, and for how long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from slo.decode.step_time import StepShape, StepTimes

ROWS: Final = (4, 8, 16, 32)
"""Steps in a row that a stream may be left out of: as few as make moving it out and back cheap."""
MOST_IN_A_ROW: Final = ROWS[-1]
MOVING: Final = 0.2
"""Part of what a row saves that moving streams may cost; where it costs more, a longer one is taken."""
MAX_GAP_S: Final = 1.0
"""No stream waits longer for its next token on account of others."""
WORTH: Final = 0.10
"""Part of the steps' time that leaving streams out has to save."""
MARGIN: Final = 0.9
"""Part of the tightest objective that steps take on average; the rest is for what predictions miss."""
CATCH_UP: Final = 20
"""A stream that is late wants each step to be shorter by this part of its lateness."""
CUSHION: Final = 3.0
"""A stream is in danger that is ahead by less than it loses in so many steps with everybody and one token's
objective together: an answer may end with any step."""

_STALL: Final = 0.5
"""Part of the tightest TPOT objective that computing a sequence again may add to a step."""
_LEAST_CHUNK: Final = 16


def chunk_within(tpot_s: float, token_s: float, most_tokens: int) -> int:
    """Tokens of a sequence that a step computes again beside streams.

    Args:
        tpot_s: The tightest of their objectives, seconds.
        token_s: What a token takes that is computed again, seconds.
        most_tokens: The engine's own bound.
    """
    return int(max(_LEAST_CHUNK, min(most_tokens, _STALL * tpot_s / token_s)))


class Paced(NamedTuple):
    """A stream as far as its pace is concerned.

    Attributes:
        request_id: The engine's name for it.
        context: Tokens that it attends to.
        tpot_s: Its objective; None for none.
        credit_s: By how much it is ahead of it; infinite without one.
        token_s: When it has got its latest token.
        rank: Of its tier.
    """

    request_id: str
    context: int
    tpot_s: float | None = None
    credit_s: float = float("inf")
    token_s: float = 0.0
    rank: int = 0


def tpot_in_reach(stream: Paced, times: StepTimes) -> float | None:
    """A stream's objective, if a step with it alone would meet that."""
    tpot_s = stream.tpot_s
    is_met = tpot_s is not None and times.predict_s(StepShape(1, stream.context)) <= tpot_s
    return tpot_s if is_met else None


def shape_of(streams: Sequence[Paced], prompt_tokens: int) -> StepShape:
    """The step that has these streams, and computes so many tokens besides."""
    return StepShape(len(streams), sum([one.context for one in streams]), prompt_tokens)


class _Need(NamedTuple):
    """What streams in danger need of a row.

    Attributes:
        streams: They.
        pace_s: What its steps may take on average.
        is_in_reach: Whether steps with nobody else would keep their objectives.
        yields_below: Streams of lower ranks are left out even if they are late by it.
    """

    streams: frozenset[str]
    pace_s: float
    is_in_reach: bool
    yields_below: int


class _Row(NamedTuple):
    """Steps that leave streams out, one after the other, and the one with everybody after them.

    Attributes:
        steps: Those that leave streams out.
        left_out: Whom.
        saves_s: By how much all of them together are shorter than with everybody.
        wanted_s: By how much they are meant to be.
        moves_s: What moving the streams costs, which `saves_s` has paid already.
        need: Whose.
    """

    steps: int
    left_out: frozenset[str]
    saves_s: float
    wanted_s: float
    moves_s: float
    need: _Need

    @property
    def is_cheap(self) -> bool:
        """Whether moving the streams is a small part of what is saved."""
        return bool(self.left_out) and self.moves_s <= MOVING * (self.saves_s + self.moves_s)

    @property
    def suffices(self) -> bool:
        """Whether it is cheap and keeps the pace."""
        return self.is_cheap and self.saves_s >= self.wanted_s

    @property
    def saves_per_step_s(self) -> float:
        """On average."""
        return self.saves_s / (self.steps + 1)

    def is_better_than(self, other: _Row) -> bool:
        """Whether it saves more, of two that do not suffice.

        Where nothing keeps the pace, nobody waits longer for it than makes moving them cheap.
        """
        saves_more = self.saves_per_step_s > other.saves_per_step_s
        return saves_more and (self.need.is_in_reach or not other.is_cheap)


class Composer:
    """Composes the steps of one engine.

    Rows of steps that leave the same streams out alternate with a step with everybody; all of them together
    take as long as the tightest objective of those in danger allows. An engine keeps its batch from step to
    step, and moving a stream out of it and back can cost more than a few steps without it save; so rows get
    longer the dearer that is, and where only a longer one keeps the pace. A stream that is late already wants
    a quicker pace than its objective, by one part in `CATCH_UP` of its lateness, where steps can be so short:
    answers are short, and at its objective it would stay late. One that is too late for that wants no more
    than its objective.

    Streams that have time are left out first. Where that does not do, those of the highest rank in danger
    keep their pace, and streams of lower ranks that have no time are left out too, the latest first: so fewer
    of them are late.

    Args:
        times: How long its steps take.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._row: _Row | None = None
        self._left_out: frozenset[str] = frozenset()
        self._steps = 0
        """With somebody left out, since the latest with everybody."""

    def leaves_out(self, streams: Sequence[Paced], now_s: float, prompt_tokens: int = 0) -> frozenset[str]:
        """Whom the next step leaves out; once chosen, they are for the rest of the row.

        Args:
            streams: Those that could emit a token.
            now_s: Now.
            prompt_tokens: What else the step computes.
        """
        full_s = self._times.predict_s(shape_of(streams, prompt_tokens))
        row = self._row
        runs = [one for one in streams if one.request_id not in self._left_out]
        if row is not None and self._steps < row.steps and _helps(runs, row.need, full_s):
            below = row.need.yields_below
            kept = [one.request_id for one in streams if _may_wait(one, now_s, 2 * full_s, below)]
            self._left_out = self._left_out.intersection(kept)
        elif row is not None or not self._times.is_known:
            self._left_out = frozenset()
        else:
            self._row = self._choose(streams, now_s, full_s)
            self._left_out = self._row.left_out if self._row else frozenset()
        if not self._left_out:
            self._row, self._steps = None, 0
        else:
            self._steps += 1
        return self._left_out

    def _wanted_s(self, in_danger: Sequence[Paced]) -> float | None:
        """What a step may take on average so that all of these are in time; None where none can be."""
        shortest_s = self._times.predict_s(shape_of(in_danger, 0))
        wanted: list[float] = []
        for one in in_danger:
            if (tpot_s := tpot_in_reach(one, self._times)) is not None:
                quicker_s = MARGIN * tpot_s + min(0.0, one.credit_s) / CATCH_UP
                wanted.append(quicker_s if quicker_s >= shortest_s else MARGIN * tpot_s)
        return min(wanted, default=None)

    def _choose(self, streams: Sequence[Paced], now_s: float, full_s: float) -> _Row | None:
        """The shortest row that does, or else the one that saves most; None where none is worth it."""
        best: _Row | None = None
        for need in self._needs(streams, full_s):
            for row in self._rows(streams, need, now_s, full_s):
                if best is None or row.suffices or row.is_better_than(best):
                    best = row
                if row.suffices:
                    break
            if best and best.suffices:
                break
        return best if best and best.saves_per_step_s >= WORTH * full_s else None

    def _needs(self, streams: Sequence[Paced], full_s: float) -> Iterator[_Need]:
        """What all in danger need, for whom those with time wait; then what the highest rank of them does."""
        in_danger = [one for one in streams if _is_in_danger(one, full_s)]
        in_reach = [one.rank for one in in_danger if tpot_in_reach(one, self._times) is not None]
        if not in_reach:
            return
        yields_below = min([one.rank for one in streams])
        for rank in dict.fromkeys((yields_below, max(in_reach))):
            tight = [one for one in in_danger if one.rank >= rank]
            if (pace_s := self._wanted_s(tight)) is not None and pace_s < full_s:
                alone_s = self._times.predict_s(shape_of(tight, 0))
                names = frozenset([one.request_id for one in tight])
                yield _Need(names, pace_s, alone_s * MARGIN <= pace_s, rank)

    def _rows(self, streams: Sequence[Paced], need: _Need, now_s: float, full_s: float) -> Iterator[_Row]:
        """Rows of all lengths."""
        others = [one for one in streams if one.request_id not in need.streams]
        others.sort(key=lambda one: (one.rank, -one.context))
        for steps in ROWS:
            for_s = (steps + 1) * full_s
            others = [one for one in others if _bears_gap(one, now_s, for_s)]
            have_time, late = [], []
            for one in others:
                if _has_time(one, for_s):
                    have_time.append(one)
                elif one.rank < need.yields_below:
                    late.append(one)
            late.sort(key=lambda one: (one.rank, one.credit_s))
            yield self._planned(steps, [*have_time, *late], full_s, need)

    def _planned(self, steps: int, others: Sequence[Paced], full_s: float, need: _Need) -> _Row:
        """A row of so many steps: the fewest of the `others` left out with which it keeps the pace."""
        wanted_s = (steps + 1) * max(full_s - need.pace_s, WORTH * full_s)
        saved_s, chosen = 0.0, []
        for one in others:
            if saved_s >= wanted_s:
                break
            saves_s = steps * self._times.own_s(one.context) - 2 * self._times.moved_s
            if saves_s > 0:
                chosen.append(one.request_id)
                saved_s += saves_s
        moves_s = 2 * self._times.moved_s * len(chosen)
        return _Row(steps, frozenset(chosen), saved_s, wanted_s, moves_s, need)


def _is_in_danger(stream: Paced, full_s: float) -> bool:
    """Whether a stream would soon be late, if it is not already, were all steps with everybody."""
    if stream.tpot_s is None:
        return False
    loses_s = full_s - MARGIN * stream.tpot_s
    return stream.credit_s < (CUSHION * loses_s + stream.tpot_s if loses_s > 0 else loses_s)


def _helps(runs: Sequence[Paced], need: _Need, full_s: float) -> bool:
    """Whether steps with everybody would be too long for those that run, one whom a row is for among them."""
    if need.streams.isdisjoint([one.request_id for one in runs]):
        return False
    paces_s = [MARGIN * one.tpot_s for one in runs if one.tpot_s is not None]
    return min([need.pace_s, *paces_s]) < full_s


def _has_time(stream: Paced, for_s: float) -> bool:
    """Whether a stream is in time behind a wait of so long."""
    return stream.tpot_s is None or stream.credit_s > for_s


def _bears_gap(stream: Paced, now_s: float, for_s: float) -> bool:
    """Whether a stream's next token comes soon enough behind a wait of so long."""
    return now_s + for_s - stream.token_s <= MAX_GAP_S


def _may_wait(stream: Paced, now_s: float, for_s: float, yields_below: int) -> bool:
    """Whether a stream can do without a token for so long, or has to."""
    return _bears_gap(stream, now_s, for_s) and (stream.rank < yields_below or _has_time(stream, for_s))
