"""The placement that does the fleet the least harm."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from router.fleet.queue_forecast import prospect
from router.messages import PlacementReason
from router.placement.fleet_table import FleetRows
from router.placement.policies import Choice, queued

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.fleet.prefill_replica import PrefillView
    from router.placement.fleet_table import Trial
    from router.placement.policies import NewPrefill

CANDIDATES: Final = 8
CANDIDATES_OF_MANY: Final = 4
MANY: Final = 32
"""Replicas that are predicted in full when the prefill is free nowhere, and how many of more than so many."""
OWN_WORK: Final = 2.0
"""Of the prefill's own work, what counts like seconds until its end where it is free: work that a cached
prefix saves is time for those to come."""


class LeastHarm:
    """Takes the replica where the most is on time, by worth, with the request added.

    Each replica is predicted by its own rules (`router.fleet.queue_forecast`). In order: the largest gain in
    the worth of what is on time, the earliest end, the least backlog.

    Exact: where the request and everybody who is on time without it fit one after the other by deadline, it
    is free, and its gain is all of its worth, which is the most that any placement can gain. This is tried
    on all replicas at once (`router.placement.fleet_table`).

    Bounded: where it is free nowhere, the replicas that are the least time short, at most `CANDIDATES`
    (`CANDIDATES_OF_MANY` in a large fleet), are predicted in full; one farther off may give up somebody
    worth less. If it gains nothing on any of them it is late wherever it goes, and the least backlog takes
    it.
    """

    def __init__(self) -> None:
        self._rows = FleetRows()

    def choose(self, prefill: NewPrefill, replicas: Sequence[PrefillView], now_s: float) -> Choice:
        """See `router.placement.policies.PlacementPolicy`."""
        rows = self._rows
        rows.update(replicas, now_s)
        trial = rows.trial(prefill, now_s)
        if trial.is_free.any():
            score = np.where(trial.is_free, trial.end_s + OWN_WORK * trial.own_s, math.inf)
            row = _least(score, trial.backlog_s)
            only = PlacementReason.ONLY_REPLICA if len(replicas) == 1 else PlacementReason.NOBODY_LATE
            end_s = float(trial.end_s[row])
            return Choice(replicas[row], end_s - float(trial.own_s[row]), end_s, is_on_time=True, reason=only)
        return self._least_harm(prefill, replicas, trial, now_s)

    def _least_harm(
        self, prefill: NewPrefill, replicas: Sequence[PrefillView], trial: Trial, now_s: float
    ) -> Choice:
        """Of the replicas that are the least time short, the one with the largest gain."""
        hopeful = np.nonzero(trial.short_s < math.inf)[0]
        most = CANDIDATES if len(replicas) <= MANY else CANDIDATES_OF_MANY
        if len(hopeful) > most:
            nearest = np.argpartition(trial.short_s[hopeful], most)[:most]
            hopeful = hopeful[nearest]
        best: tuple[float, float, float] | None = None
        choice: Choice | None = None
        only = PlacementReason.ONLY_REPLICA if len(replicas) == 1 else PlacementReason.LEAST_HARM
        for row in sorted(map(int, hopeful)):
            self._rows.refresh(row, now_s)
            new = queued(prefill, float(trial.own_s[row]), now_s)
            found = prospect(replicas[row].outstanding(now_s), new, float(self._rows.value[row]))
            key = (-found.gain, found.end_s, float(trial.backlog_s[row]))
            if found.is_on_time and (best is None or key < best):
                best = key
                choice = Choice(replicas[row], found.start_s, found.end_s, found.is_on_time, only)
        if choice is not None:
            return choice
        row = _least(trial.backlog_s + trial.own_s, trial.backlog_s)
        end_s = now_s + float(trial.backlog_s[row] + trial.own_s[row])
        start_s = end_s - float(trial.own_s[row])
        return Choice(replicas[row], start_s, end_s, is_on_time=False, reason=only)


def _least(first: np.ndarray, second: np.ndarray) -> int:
    """The row with the least of `first`, of equals the least of `second`, of those the first row."""
    equal = np.nonzero(first == first.min())[0]
    return int(equal[np.argmin(second[equal])])
