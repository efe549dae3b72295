"""The placement that does the fleet the least harm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from router.fleet.prefill_replica import PrefillView
from router.fleet.queue_forecast import prospect
from router.messages import PlacementReason
from router.placement.fleet_table import FleetTable, Trial
from router.placement.policies import Choice, NewPrefill, queued

CANDIDATES: Final = 8
CANDIDATES_OF_MANY: Final = 4
MANY: Final = 32
"""Replicas that are predicted in full where the prefill is free nowhere; fewer of more than `MANY`."""
OWN_WORK: Final = 2.0
"""Where the prefill is free, a second of its own work counts like this many seconds until its end: work that
a cached prefix saves is time for later requests."""


class LeastHarm:
    """Takes the replica where the total weight of what is on time, with the request added, grows the most.

    Each replica is predicted by its own rules (`router.fleet.queue_forecast`). In order: the largest gain in
    weight on time, the earliest end, the shortest backlog.

    Exact: where the request and all that are on time without it fit one after the other by deadline, it is
    free, and its gain is its whole weight, more than which no placement can gain. This is tried on all
    replicas at once (`router.placement.fleet_table`).

    Bounded: where it is free nowhere, the replicas with the smallest shortfall, at most `CANDIDATES`
    (`CANDIDATES_OF_MANY` in a large fleet), are predicted in full, although on another one a request of less
    weight might have become late. A request that is late on all of them goes where it ends first: behind all
    that have a deadline, before those without one.
    """

    def __init__(self) -> None:
        self._rows = FleetTable()

    def choose(self, prefill: NewPrefill, replicas: Sequence[PrefillView], now_s: float) -> Choice:
        """See `router.placement.policies.PlacementPolicy`."""
        rows = self._rows
        rows.update(replicas, now_s)
        trial = rows.trial(prefill, now_s)
        if trial.is_free.any():
            score = np.where(trial.is_free, trial.end_s + OWN_WORK * trial.own_s, math.inf)
            row = _argmin(score, trial.backlog_s)
            reason = PlacementReason.ONLY_REPLICA if len(replicas) == 1 else PlacementReason.NOBODY_LATE
            end_s = float(trial.end_s[row])
            return Choice(replicas[row], end_s - float(trial.own_s[row]), end_s, reason)
        return self._least_harm(prefill, replicas, trial, now_s)

    def _least_harm(
        self, prefill: NewPrefill, replicas: Sequence[PrefillView], trial: Trial, now_s: float
    ) -> Choice:
        """Of the replicas with the smallest shortfall, the one with the largest gain."""
        feasible = np.nonzero(trial.shortfall_s < math.inf)[0]
        count = CANDIDATES if len(replicas) <= MANY else CANDIDATES_OF_MANY
        if len(feasible) > count:
            nearest = np.argpartition(trial.shortfall_s[feasible], count)[:count]
            feasible = feasible[nearest]
        best_key: tuple[float, float, float] | None = None
        choice: Choice | None = None
        reason = PlacementReason.ONLY_REPLICA if len(replicas) == 1 else PlacementReason.LEAST_HARM
        for row in sorted(map(int, feasible)):
            self._rows.refresh(row, now_s)
            new = queued(prefill, float(trial.own_s[row]), now_s)
            found = prospect(replicas[row].outstanding(now_s), new, float(self._rows.value[row]))
            key = (-found.gain, found.end_s, float(trial.backlog_s[row]))
            if found.is_on_time and (best_key is None or key < best_key):
                best_key = key
                choice = Choice(replicas[row], found.start_s, found.end_s, reason)
        if choice is not None:
            return choice
        row = _argmin(trial.end_s, trial.backlog_s)
        end_s = float(trial.end_s[row])
        start_s = end_s - float(trial.own_s[row])
        return Choice(replicas[row], start_s, end_s, reason)


def _argmin(first: np.ndarray, second: np.ndarray) -> int:
    """The row with the smallest `first`, of equals the smallest `second`, of those the first row."""
    equal = np.nonzero(first == first.min())[0]
    return int(equal[np.argmin(second[equal])])
