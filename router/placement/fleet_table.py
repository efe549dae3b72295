"""The plans of all replicas side by side, so that one more prefill is tried on all of them at once.

Owns the arrays and their upkeep: a replica's row is laid out anew when its work has changed. What the numbers
mean is `router.fleet.queue_forecast`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from router.fleet.prefill_replica import PrefillView
from router.fleet.queue_forecast import plan
from router.placement.policies import NewPrefill

Floats: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"
Flags: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]"

_MIN_PLACES: Final = 8
_UNUSED: Final = 4
"""Of rows that are so many times as long as the longest plan the rest is given back."""
_FRESH_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Trial:
    """One prefill tried on every replica, by the replica's row.

    Attributes:
        own_s: Its work there.
        is_free: Whether it would be on time and all that are on time would remain so.
        end_s: When it would then end; otherwise, when it would end behind all that wait and have a deadline:
            those without one run after it, however late it is.
        shortfall_s: Seconds that are missing where it is not free; infinite where it would be late even ahead
            of all others.
        backlog_s: Work outstanding there, without it.
    """

    own_s: Floats
    is_free: Flags
    end_s: Floats
    shortfall_s: Floats
    backlog_s: Floats


class FleetTable:
    """The plans of a changing set of replicas, a row of each array for each replica."""

    def __init__(self) -> None:
        self._replicas: list[PrefillView] = []
        self._resize(0, _MIN_PLACES)

    def _resize(self, rows: int, places: int) -> None:
        self._versions = [-1] * rows
        self._planned_s = [-math.inf] * rows
        self._deadlines = np.full((rows, places), np.inf)
        self._work_before = np.zeros((rows, places + 1))
        self._start_by = np.full((rows, places + 1), np.inf)
        self._start_behind_by = np.full((rows, places + 1), np.inf)
        self._runner_place = np.zeros(rows, dtype=np.int64)
        self._runner_start_by = np.full(rows, np.inf)
        self._waits_for_end = np.ones(rows, dtype=np.bool_)
        self._free_at = np.full(rows, -np.inf)
        self._preemptible_in = np.full(rows, np.inf)
        self._total = np.zeros(rows)
        self._due = np.zeros(rows)
        self._coefficients = np.zeros((rows, 4))
        self.value = np.zeros(rows)
        self._index = np.arange(rows)
        self._kept = np.zeros(rows, dtype=np.int64)
        self._most = 0
        self._places = places

    def update(self, replicas: Sequence[PrefillView], now_s: float) -> None:
        """Lay out what has changed since the last call; row i is replica i."""
        if len(replicas) != len(self._replicas) or any(
            mine is not theirs for mine, theirs in zip(self._replicas, replicas, strict=True)
        ):
            self._replicas = list(replicas)
            self._resize(len(replicas), self._places)
        has_changed = False
        for row, replica in enumerate(replicas):
            if self._versions[row] != replica.version:
                self._lay_out(row, replica, now_s)
                has_changed = True
        if has_changed:
            self._most = int(self._kept.max())
            if self._places > max(_MIN_PLACES, _UNUSED * self._most):
                self._shrink(max(_MIN_PLACES, 2 * self._most))

    def _shrink(self, places: int) -> None:
        """Give back what no plan reaches."""
        self._places = places
        self._deadlines = self._deadlines[:, :places].copy()
        self._work_before = self._work_before[:, : places + 1].copy()
        self._start_by = self._start_by[:, : places + 1].copy()
        self._start_behind_by = self._start_behind_by[:, : places + 1].copy()

    def refresh(self, row: int, now_s: float) -> None:
        """Plan a replica anew if its plan is old: what it has on time may be late by now."""
        if now_s - self._planned_s[row] > _FRESH_S:
            self._lay_out(row, self._replicas[row], now_s)

    def _lay_out(self, row: int, replica: PrefillView, now_s: float) -> None:
        work = replica.outstanding(now_s)
        laid = plan(work)
        kept = len(laid.deadlines_s)
        if kept > self._places:
            self._resize(len(self._replicas), 2 * kept)
            self.update(self._replicas, now_s)
            return
        self._versions[row] = replica.version
        self._planned_s[row] = now_s
        self._kept[row] = kept
        self._most = max(self._most, kept)
        self._deadlines[row, :kept] = laid.deadlines_s
        self._deadlines[row, kept:] = np.inf
        for array, values, rest in (
            (self._work_before, laid.work_before_s, laid.work_before_s[-1]),
            (self._start_by, laid.start_by_s, np.inf),
            (self._start_behind_by, laid.start_behind_by_s, np.inf),
        ):
            array[row, : kept + 1] = values
            array[row, kept + 1 :] = rest
        self._runner_place[row] = laid.runner_place
        self._runner_start_by[row] = laid.runner_start_by_s
        self._waits_for_end[row] = laid.waits_for_end
        self._free_at[row] = -np.inf if work.runner is None else work.free_at_s
        self._preemptible_in[row] = np.inf if replica.preemptible_in_s is None else replica.preemptible_in_s
        self._total[row] = laid.total_s
        self._due[row] = laid.due_s
        self.value[row] = laid.value
        predictor = replica.predictor
        self._coefficients[row] = (
            predictor.fixed_s,
            predictor.per_token_s,
            predictor.per_pair_s,
            predictor.floor_s,
        )

    def own_s(self, prefill: NewPrefill) -> Floats:
        """Work of a prefill on each replica, a cached prefix credited."""
        fixed, per_token, per_pair, floor = self._coefficients.T
        tokens = prefill.tokens
        own = np.maximum(floor, fixed + per_token * tokens + per_pair * (tokens * tokens / 2))
        if prefill.cached_tokens:
            for row, replica in enumerate(self._replicas):
                if cached := prefill.cached_tokens.get(replica.replica_id):
                    own[row] = replica.predictor.prefill_s(tokens - cached, cached)
        return own

    def trial(self, prefill: NewPrefill, now_s: float) -> Trial:
        """Try a prefill on every replica, in the order of deadlines and with all else as planned."""
        own = self.own_s(prefill)
        due_s = prefill.deadline_s
        free_at = np.maximum(self._free_at, now_s)
        stops_at = np.minimum(now_s + self._preemptible_in, free_at)
        backlog = free_at - now_s + self._total
        if due_s == math.inf:
            nobody = np.ones(len(own), dtype=np.bool_)
            return Trial(own, nobody, now_s + backlog + own, np.zeros(len(own)), backlog)
        index, place = self._index, (self._deadlines[:, : self._most] <= due_s).sum(axis=1)
        work = self._work_before[index, place] + own
        before, behind = self._start_by, self._start_behind_by
        slack_behind = behind[index, place] - free_at
        end_waiting = free_at + work
        shortfall_waiting = np.maximum(
            end_waiting - due_s, own - np.minimum(before[index, place] - free_at, slack_behind)
        )
        holds = self._waits_for_end & (np.minimum(before[:, 0], behind[:, 0]) >= free_at)
        end_stopping = np.where(place <= self._runner_place, stops_at, free_at) + work
        slack_stopping = np.minimum(before[index, place] - stops_at, slack_behind)
        slack_stopping = np.minimum(slack_stopping, self._runner_start_by - free_at)
        shortfall_stopping = np.maximum(end_stopping - due_s, own - slack_stopping)
        holds_stopping = (before[:, 0] >= stops_at) & (behind[:, 0] >= free_at)
        waits = holds & (shortfall_waiting <= 0)
        stops = holds_stopping & (shortfall_stopping <= 0)
        end_late = free_at + self._due + own
        end = np.where(waits, end_waiting, np.where(stops, end_stopping, end_late))
        shortfall = np.where(
            stops_at + own <= due_s, np.minimum(shortfall_waiting, shortfall_stopping), np.inf
        )
        return Trial(own, waits | stops, end, shortfall, backlog)
