"""The streams of a replica as they go on, if nobody joins them but whom a forecast lets in.

They never change: whoever joins, or time that passes, makes others of them, so that one forecast can be asked
for many newcomers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np

from slo.decode.predicted_peak import Holding

_Ints: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.int64]]"


class RunningStreams:
    """What each stream holds, will emit at most, and will emit until its end is expected.

    The same as lists of `Holding`, `predicted_peak` and `Holding.after`, for as many as an engine can have.
    """

    __slots__ = ("_behind", "_held", "_peaks", "_rows")

    def __init__(self, rows: _Ints) -> None:
        """`rows` are the negated `remaining`, in ascending order, the tokens and `ends_in`."""
        self._rows = rows
        self._held: _Ints | None = None
        self._peaks = self._behind = rows[0]

    @classmethod
    def of(cls, streams: Iterable[Holding]) -> RunningStreams:
        """Those streams, in any order."""
        rows = sorted([(-one.remaining, one.tokens, one.ends_in) for one in streams])
        return cls(np.array(rows, np.int64).reshape(-1, 3).T)

    def __len__(self) -> int:
        """How many have not ended."""
        return self._rows.shape[1]

    def with_one(self, stream: Holding) -> RunningStreams:
        """They and one more."""
        rows, place = self._rows, int(self._rows[0].searchsorted(-stream.remaining))
        one = np.array([[-stream.remaining], [stream.tokens], [stream.ends_in]], np.int64)
        return RunningStreams(np.concatenate((rows[:, :place], one, rows[:, place:]), axis=1))

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
        ends_in = self._rows[2]
        last = min(at_once, len(self)) - 1
        steps = max(1, int(np.partition(ends_in, last)[last]))
        rows = self._rows[:, ends_in > steps]
        was_end = rows[0] == -rows[2]
        rows[1] += steps
        rows[2] -= steps
        rows[0] += steps * was_end
        return steps, RunningStreams(rows[:, rows[0].argsort(kind="stable")])

    def _look(self) -> None:
        """Work out what every newcomer is held against."""
        order, tokens, _ = self._rows
        count = len(self)
        self._held = np.zeros(count + 1, np.int64)
        np.cumsum(tokens, out=self._held[1:])
        self._peaks, self._behind = np.zeros((2, count + 1), np.int64)
        peaks = self._held[1:] - np.arange(1, count + 1) * order
        np.maximum.accumulate(peaks, out=self._peaks[1:])
        self._behind[:count] = np.maximum.accumulate((peaks - order)[::-1])[::-1]
