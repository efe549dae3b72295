"""The streams of a replica as they go on, if nobody joins them but whom a forecast lets in.

They never change: whoever joins, or time that passes, makes others of them, so that one forecast can be asked
for many newcomers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from slo.decode.predicted_peak import Holding

_Ints: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.int64]]"


class RunningStreams:
    """What each stream holds and will emit.

    The same as lists of `Holding` and `predicted_peak`, for as many as an engine can have.
    """

    __slots__ = ("_behind", "_held", "_peaks", "_rows")

    def __init__(self, rows: _Ints) -> None:
        """`rows` are the negated `remaining`, in ascending order, and the tokens."""
        self._rows = rows
        self._held: _Ints | None = None
        self._peaks = self._behind = rows[0]

    @classmethod
    def of(cls, streams: Iterable[Holding]) -> RunningStreams:
        """Those streams, in any order."""
        rows = _rows(streams)
        return cls(rows[:, rows[0].argsort(kind="stable")])

    def __len__(self) -> int:
        """How many have not ended."""
        return self._rows.shape[1]

    def joined_by(self, streams: Sequence[Holding]) -> RunningStreams:
        """They and some more."""
        rows = np.concatenate((self._rows, _rows(streams)), axis=1)
        return RunningStreams(rows[:, rows[0].argsort(kind="stable")])

    def fitting(self, waiting: Sequence[Holding], limit: float) -> int:
        """How many of those that wait, the first ones, can join them together without a higher peak.

        Nobody lowers the peak by joining, so that one who does not fit keeps out all behind.
        """
        order, tokens = np.concatenate((self._rows, _rows(waiting)), axis=1)
        numbers = np.arange(1, len(waiting) + 1)
        turns = np.concatenate((np.zeros(len(self), np.int64), numbers))
        by_end = order.argsort(kind="stable")
        # In a row for each number of them: who is there, of all in the order of `predicted_peak`.
        there = turns[by_end] <= numbers[:, np.newaxis]
        held = (there * tokens[by_end]).cumsum(axis=1) - there.cumsum(axis=1) * order[by_end]
        return int((held.max(axis=1) <= limit).sum())

    def peak_with(self, newcomer: Holding) -> int:
        """The most tokens that they and a newcomer hold at any time, see `predicted_peak`.

        It comes to what it was at the ends after the newcomer's, and at those before it one more is there.
        """
        tokens, remaining = newcomer.tokens, newcomer.remaining
        if self._held is None:
            self._look()
            assert self._held is not None
        place = int(self._rows[0].searchsorted(-remaining))
        held = int(self._held[place]) + tokens + (place + 1) * remaining
        return max(int(self._peaks[place]), held, tokens + int(self._behind[place]))

    def after(self, at_once: int) -> tuple[int, RunningStreams]:
        """What they are after so many steps that at least `at_once` of them end, or all; and these steps."""
        ends = self._rows[0]
        steps = max(1, -int(ends[-min(at_once, len(self))]))
        return steps, RunningStreams(self._rows[:, ends < -steps] + steps)

    def _look(self) -> None:
        """Work out what every newcomer is held against."""
        order, tokens = self._rows
        count = len(self)
        self._held = np.zeros(count + 1, np.int64)
        np.cumsum(tokens, out=self._held[1:])
        self._peaks, self._behind = np.zeros((2, count + 1), np.int64)
        peaks = self._held[1:] - np.arange(1, count + 1) * order
        np.maximum.accumulate(peaks, out=self._peaks[1:])
        self._behind[:count] = np.maximum.accumulate((peaks - order)[::-1])[::-1]


def _rows(streams: Iterable[Holding]) -> _Ints:
    rows = [(-one.remaining, one.tokens) for one in streams]
    return np.array(rows, np.int64).reshape(-1, 2).T
