"""The order in which waiting prefills get the replica.

Owns the order alone: who shares a forward pass is `slo.batching`, who stops a running one `slo.preemption`.
"""

from __future__ import annotations

import enum
import math
import operator
from heapq import heappop, heappush
from itertools import accumulate
from typing import TYPE_CHECKING, Final, assert_never

from slo.slack import sedf_rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slo.preemption_terms import Prefill

STOPPED_WORTH: Final = 2.0
"""How much more a prefill is worth to `QueueOrder.ON_TIME_SET` once it has been stopped: what was spent on
it is lost if it is given up, and it goes on occupying memory until it is finished all the same."""


class QueueOrder(enum.StrEnum):
    """Which waiting prefill goes first.

    `SEDF`: the earliest deadline that can still be met (`slo.slack.sedf_rank`).

    `ON_TIME_SET`: the earliest deadline among those that can all be met together. When not all can, the
    least worth per second of work is given up, so that one request that is late anyway does not make all
    behind it late too, as it does in any order by deadline alone.
    """

    SEDF = "sedf"
    ON_TIME_SET = "on_time_set"


def order(
    kind: QueueOrder,
    prefills: Sequence[Prefill],
    now_s: float,
    free_at_s: float | None = None,
    max_suspended_s: float = math.inf,
) -> list[Prefill]:
    """Sort waiting prefills, the one to run next first.

    Whatever the kind, those lead that have been suspended for as long as they may be, and of those that are
    late anyway and of those without a deadline the ones that have been stopped go first: they hold memory,
    and one of the places of suspended steps, until they end.

    Args:
        kind: The rule.
        prefills: In any order.
        now_s: The time.
        free_at_s: When the first of them can start, if not now.
        max_suspended_s: Total suspension at which a prefill has waited long enough.
    """
    start_s = now_s if free_at_s is None else free_at_s
    overdue: list[Prefill] = []
    if max_suspended_s < math.inf:
        overdue = [prefill for prefill in prefills if prefill.suspended_s >= max_suspended_s]
    if overdue:
        overdue.sort(key=lambda prefill: prefill.arrived_s)
        start_s += sum(prefill.remaining_s for prefill in overdue)
        prefills = [prefill for prefill in prefills if prefill.suspended_s < max_suspended_s]
    match kind:
        case QueueOrder.SEDF:
            return overdue + _by_rank(prefills, start_s)
        case QueueOrder.ON_TIME_SET:
            return overdue + _on_time_first(prefills, start_s)
        case _:
            assert_never(kind)


def _by_rank(prefills: Sequence[Prefill], start_s: float) -> list[Prefill]:
    def key(prefill: Prefill) -> tuple[int, bool, float, float]:
        group, distance, arrived_s = sedf_rank(
            prefill.deadline_s, start_s, prefill.remaining_s, prefill.arrived_s
        )
        return group, group > 0 and prefill.preemptions == 0, distance, arrived_s

    return sorted(prefills, key=key)


def _on_time_first(prefills: Sequence[Prefill], start_s: float) -> list[Prefill]:
    """Those that are kept on time, those given up for them, those that are late or have no deadline."""
    rows: list[tuple[float, float, int, float, float, Prefill]] = []
    rest: list[Prefill] = []
    for index, prefill in enumerate(prefills):
        due_s, work_s = prefill.deadline_s - start_s, prefill.remaining_s
        if work_s <= due_s < math.inf:
            weight = prefill.weight * STOPPED_WORTH if prefill.preemptions else prefill.weight
            rows.append((due_s, prefill.arrived_s, index, work_s, weight, prefill))
        else:
            rest.append(prefill)
    if not rows:
        return _by_rank(rest, start_s)
    rows.sort()
    deadlines, _, _, works, weights, hopeful = zip(*rows, strict=True)
    given_up = _give_up(works, deadlines, weights)
    kept = [prefill for position, prefill in enumerate(hopeful) if position not in given_up]
    return kept + [hopeful[position] for position in sorted(given_up)] + _by_rank(rest, start_s)


def _give_up(works: Sequence[float], deadlines: Sequence[float], weights: Sequence[float]) -> set[int]:
    """The positions to give up so that all others end by their deadlines when run one after the other.

    To lose the least weight is NP-hard (knapsack is the case of one common deadline), so this is a heuristic:
    the better of two sweeps in the manner of Moore and Hodgson (Management Science 15, 1968), then taking
    back what still fits. The first sweep gives up the most work per weight, which is right when much is late,
    the second the least weight, which is right when little is. With equal weights each of them is Moore and
    Hodgson's algorithm, and the number on time the largest possible.

    Args:
        works: Seconds of work, in order of the deadlines; each could be met alone.
        deadlines: Seconds from the start, ascending.
        weights: Worth of each on time.
    """
    if all(map(operator.le, accumulate(works), deadlines)):
        return set()
    by_work = sorted(range(len(works)), key=works.__getitem__, reverse=True)
    worth = [weight / work if work > 0 else math.inf for work, weight in zip(works, weights, strict=True)]
    given_up = _sweep(works, deadlines, sorted(by_work, key=worth.__getitem__))
    other = _sweep(works, deadlines, sorted(by_work, key=weights.__getitem__))
    if sum([weights[position] for position in other]) < sum([weights[position] for position in given_up]):
        given_up = other
    return _take_back(works, deadlines, weights, given_up)


def _sweep(works: Sequence[float], deadlines: Sequence[float], worst_first: list[int]) -> list[int]:
    """Run along the deadlines; while the work so far ends late, give up the worst of it."""
    rank = [0] * len(works)
    for place, position in enumerate(worst_first):
        rank[position] = place
    given_up: list[int] = []
    candidates: list[int] = []
    end_s = 0.0
    for work_s, due_s, place in zip(works, deadlines, rank, strict=True):
        heappush(candidates, place)
        end_s += work_s
        while end_s > due_s and candidates:
            worst = worst_first[heappop(candidates)]
            given_up.append(worst)
            end_s -= works[worst]
    return given_up


def _take_back(
    works: Sequence[float], deadlines: Sequence[float], weights: Sequence[float], given_up: list[int]
) -> set[int]:
    """What remains of `given_up` when those that fit after all are taken out, the most valuable first."""
    remains = set(given_up)
    starts, room = _gaps(works, deadlines, remains)
    for position in sorted(given_up, key=lambda position: (-weights[position], works[position])):
        work_s = works[position]
        if work_s <= room[position] and starts[position] + work_s <= deadlines[position]:
            remains.remove(position)
            starts, room = _gaps(works, deadlines, remains)
    return remains


def _gaps(
    works: Sequence[float], deadlines: Sequence[float], given_up: set[int]
) -> tuple[list[float], list[float]]:
    """By position: when one that was given up would start, and how much those kept behind it can wait."""
    kept = [*works]
    for position in given_up:
        kept[position] = 0.0
    ends = [*accumulate(kept)]
    least_s = math.inf
    room: list[float] = []
    for position in range(len(works) - 1, -1, -1):
        is_kept = kept[position] > 0 or position not in given_up
        if is_kept and deadlines[position] - ends[position] < least_s:
            least_s = deadlines[position] - ends[position]
        room.append(least_s)
    room.reverse()
    return ends, room
