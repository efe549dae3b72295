"""Which waiting prefills can all be met together.

Owns the choice of the tardy set when not everybody can be on time. The order of the queue
(`slo.queue.order`) and the preemption that follows from it (`slo.preemption.feasible_set_policy`) are built
on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

from slo.queue.arrival_forecast import Expected
from slo.queue.class_targets import ClassPrices
from slo.queue.prefill import Prefill

PREEMPTED_FACTOR: Final = 2.0
"""How much more value a prefill has once it has been stopped: when it becomes tardy the work done on it was
wasted, and it occupies memory until it is finished all the same."""

_Row: TypeAlias = "tuple[float, float, int, float, Prefill]"
"""Seconds until it is due, its arrival, its position, its work, itself; sorts by deadline, then arrival."""


def value(prefill: Prefill, prices: ClassPrices | None = None) -> float:
    """The value of having a prefill on time: its weight at its class's price, more once it was preempted."""
    weight = prefill.weight if prices is None else prefill.weight * prices.price(prefill.tier)
    return weight * PREEMPTED_FACTOR if prefill.preemptions else weight


class FeasibleSet(NamedTuple):
    """A partition of waiting prefills.

    Attributes:
        feasible: Those that all end in time when run one after the other in this order, by deadline.
        tardy: Those that could be on time alone, but not together with `feasible`; by deadline.
        rest: Those that are infeasible even alone, and those without a deadline, in the order given.
    """

    feasible: list[Prefill]
    tardy: list[Prefill]
    rest: list[Prefill]


def feasible_set(
    prefills: Sequence[Prefill],
    start_s: float,
    expected: Expected | None = None,
    prices: ClassPrices | None = None,
) -> FeasibleSet:
    """Choose whom to keep on time, so that the tardy set has little value.

    Time is kept free for what is expected to arrive with more value per second of work than the least dense
    of the feasible set; if nothing is, the present alone counts. Without `prices` all
    requests are alike but for their weights. Prompts that share passes take what one takes at least only
    once: of the time until each deadline that much is gone, and each has its own work.
    """
    rows: list[_Row] = []
    rest: list[Prefill] = []
    most_idle_s = 0.0
    for index, prefill in enumerate(prefills):
        due_s, alone_s, idle_s = prefill.deadline_s - start_s, prefill.remaining_s, prefill.idle_s
        if alone_s <= due_s < math.inf:
            rows.append((due_s, prefill.arrived_s, index, alone_s - idle_s, prefill))
            most_idle_s = max(most_idle_s, idle_s)
        else:
            rest.append(prefill)
    if not rows:
        return FeasibleSet([], [], rest)
    rows.sort()
    if most_idle_s > 0:
        rows = _less_idle(rows)
    if expected is not None and expected.pressure == 0:
        expected = None
    if expected is None and _all_fit(rows):
        return FeasibleSet([row[-1] for row in rows], [], rest)
    deadlines, _, _, works, candidates = zip(*rows, strict=True)
    search = _TardySetSearch(works, deadlines, [value(prefill, prices) for prefill in candidates], expected)
    if expected is not None and search.all_fit():
        return FeasibleSet([*candidates], [], rest)
    tardy = search.tardy()
    return FeasibleSet(
        [prefill for position, prefill in enumerate(candidates) if position not in tardy],
        [candidates[position] for position in sorted(tardy)],
        rest,
    )


def _less_idle(rows: Sequence[_Row]) -> list[_Row]:
    """The rows with what is left of the time until each deadline when a pass has taken its least."""
    idle_s, left = 0.0, []
    for due_s, arrived_s, index, work_s, prefill in rows:
        idle_s = max(idle_s, prefill.idle_s)
        left.append((due_s - idle_s, arrived_s, index, work_s, prefill))
    return left


def _all_fit(rows: Sequence[_Row]) -> bool:
    """Whether all are in time, one after the other; each of them is when it runs alone."""
    if len(rows) == 1:
        return True
    end_s = 0.0
    for due_s, _, _, work_s, _ in rows:
        end_s += work_s
        if end_s > due_s:
            return False
    return True


class _TardySetSearch:
    """Finds a tardy set without which all others end by their deadlines when run one after the other.

    The tardy set of the least weight is NP-hard to find (knapsack is the case of one common deadline), so
    this is a heuristic: the better of two sweeps in the manner of Moore and Hodgson (Management Science 15,
    1968), then taking back what still fits. The first sweep removes the most work per weight, which is right
    when much is late, the second the least weight, which is right when little is. With equal weights each of
    them is Moore and Hodgson's algorithm, and the number on time the largest possible. When time is kept free
    for what will arrive, which goes by value per work, the first sweep alone is run.

    Args:
        works: Seconds of work, in order of the deadlines; each could be met alone.
        deadlines: Seconds from the start, ascending.
        weights: Value of each on time.
    """

    def __init__(
        self,
        works: Sequence[float],
        deadlines: Sequence[float],
        weights: Sequence[float],
        expected: Expected | None,
    ) -> None:
        self._works = works
        self._deadlines = deadlines
        self._weights = weights
        self._value = [
            weight / work if work > 0 else math.inf for work, weight in zip(works, weights, strict=True)
        ]
        self._reserved = [0.0] * len(works)
        self._near_s = 0.0
        """Of the time until a deadline, but the nearest, the fraction that is kept free for those to come."""
        if expected is not None:
            self._reserved = expected.reserved_for(self._value)
            self._near_s = expected.near_s
        self._is_all_free = max(self._reserved) == 0.0

    def all_fit(self) -> bool:
        """Whether the tardy set is empty: the least dense so far has the most time kept free before it."""
        end_s = most = 0.0
        near_s = self._near_s
        for work_s, due_s, reserved in zip(self._works, self._deadlines, self._reserved, strict=True):
            end_s += work_s
            most = max(most, reserved)
            if end_s > due_s - most * max(0.0, due_s - near_s):
                return False
        return True

    def tardy(self) -> set[int]:
        """The positions of the tardy set."""
        works, weights = self._works, self._weights
        is_all_free = self._is_all_free
        by_work = sorted(range(len(works)), key=works.__getitem__, reverse=True)
        tardy = self._sweep(sorted(by_work, key=self._value.__getitem__))
        if is_all_free:
            other = self._sweep(sorted(by_work, key=weights.__getitem__))
            tardy = min(tardy, other, key=lambda some: sum([weights[position] for position in some]))
        return self._take_back(tardy)

    def _sweep(self, worst_first: list[int]) -> list[int]:
        """Go along the deadlines; while the work so far ends late, move the worst of it to the tardy set."""
        works, is_all_free = self._works, self._is_all_free
        rank = [0] * len(works)
        for place, position in enumerate(worst_first):
            rank[position] = place
        tardy: list[int] = []
        candidates: list[int] = []
        end_s = 0.0
        for work_s, due_s, place in zip(works, self._deadlines, rank, strict=True):
            heappush(candidates, place)
            end_s += work_s
            while candidates:
                worst = worst_first[candidates[0]]
                if end_s <= (due_s if is_all_free else self._usable_s(due_s, worst)):
                    break
                heappop(candidates)
                tardy.append(worst)
                end_s -= works[worst]
        return tardy

    def _usable_s(self, due_s: float, position: int) -> float:
        """Of the time until `due_s`, what is not kept free for those denser than the one at `position`."""
        return due_s - self._reserved[position] * max(0.0, due_s - self._near_s)

    def _take_back(self, tardy: list[int]) -> set[int]:
        """The tardy set without those that fit after all, taken out by descending weight."""
        works, weights = self._works, self._weights
        remains = set(tardy)
        usable_s = self._deadlines
        if not self._is_all_free:
            usable_s = [*map(self._usable_s, self._deadlines, range(len(works)))]
        starts, room = self._gaps(remains, usable_s)
        for position in sorted(tardy, key=lambda position: (-weights[position], works[position])):
            work_s = works[position]
            if work_s <= room[position] and starts[position] + work_s <= usable_s[position]:
                remains.remove(position)
                starts, room = self._gaps(remains, usable_s)
        return remains

    def _gaps(self, tardy: set[int], usable_s: Sequence[float]) -> tuple[list[float], list[float]]:
        """By position: when a tardy one would start there, and how long the feasible ones behind can wait."""
        feasible_works = [*self._works]
        for position in tardy:
            feasible_works[position] = 0.0
        ends = [*accumulate(feasible_works)]
        min_s = math.inf
        room: list[float] = []
        for position in range(len(feasible_works) - 1, -1, -1):
            is_feasible = feasible_works[position] > 0 or position not in tardy
            spare_s = usable_s[position] - ends[position]
            if is_feasible and spare_s < min_s:
                min_s = spare_s
            room.append(min_s)
        room.reverse()
        return ends, room
