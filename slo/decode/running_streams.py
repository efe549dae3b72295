"""The streams of a replica as they go on, if nobody joins them but whom a forecast lets in."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from slo.decode.predicted_peak import Holding


class RunningStreams:
    """What each stream holds, will emit at most, and will emit until its end is expected.

    The same as lists of `Holding`, `predicted_peak` and `Holding.after`, for as many as an engine can have.
    """

    def __init__(self, streams: Iterable[Holding]) -> None:
        rows = [(one.tokens, one.remaining, one.ends_in) for one in streams]
        self._tokens, self._remaining, self._ends_in = np.array(rows, np.int64).reshape(-1, 3).T

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._tokens)

    def add(self, stream: Holding) -> None:
        """Have one more run."""
        self._tokens = np.append(self._tokens, stream.tokens)
        self._remaining = np.append(self._remaining, stream.remaining)
        self._ends_in = np.append(self._ends_in, stream.ends_in)

    def peak_with(self, newcomer: Holding) -> int:
        """The most tokens that they and a newcomer hold at any time, see `predicted_peak`."""
        tokens, remaining = (
            np.append(self._tokens, newcomer.tokens),
            np.append(self._remaining, newcomer.remaining),
        )
        order = np.argsort(-remaining, kind="stable")
        held = np.cumsum(tokens[order]) + np.arange(1, len(order) + 1) * remaining[order]
        return int(held.max())

    def go_on(self, at_once: int) -> int:
        """Let so many steps pass that at least `at_once` of them end, or all; returns how many."""
        last = min(at_once, len(self)) - 1
        steps = max(1, int(np.partition(self._ends_in, last)[last]))
        left = self._ends_in > steps
        was_end = self._remaining[left] == self._ends_in[left]
        self._tokens, self._ends_in = self._tokens[left] + steps, self._ends_in[left] - steps
        self._remaining = np.where(was_end, self._ends_in, self._remaining[left])
        return steps
