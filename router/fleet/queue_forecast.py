"""What a replica makes of its outstanding prefills, and of one more.

Owns the prediction for one replica: its own order and preemption (`slo.queue.feasible_set`,
`slo.preemption.feasible_set_policy`) applied to what the router knows of its work. The running pass is one
prefill among the others; where it can be preempted, the better of letting it end and stopping it is
predicted. Left out: what the replica expects to arrive (`slo.queue.arrival_forecast`), prompts that share a
pass, and the margin by which it stops a pass earlier than it would have to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from slo.queue.feasible_set import FeasibleSet, feasible_set, value
from slo.queue.prefill import Prefill

_EPSILON_S = 1e-9


@dataclass(frozen=True, slots=True)
class OutstandingWork:
    """The outstanding work of one replica at one moment.

    Attributes:
        waiting: Everything with a deadline that neither runs nor shares the running pass.
        runner: The running pass as one prefill with what is left of it and of its prompts behind it; None
            when nothing runs.
        free_at_s: When it would end; the moment itself when nothing runs.
        stops_at_s: When it could be preempted, or ends a chunk; None when it could not.
        undue_s: Work of what waits without a deadline: it goes last, and none of it can be late.
    """

    waiting: Sequence[Prefill]
    runner: Prefill | None
    free_at_s: float
    stops_at_s: float | None
    undue_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prospect:
    """What would follow from placing a prefill on a replica.

    Attributes:
        start_s: When it would start.
        end_s: When it would end.
        gain: By how much the weight of what the replica finishes on time would grow.
        is_on_time: Whether it is one of those.
    """

    start_s: float
    end_s: float
    gain: float
    is_on_time: bool


@dataclass(frozen=True, slots=True)
class QueuePlan:
    """The prefills that a replica keeps on time, laid out so that one more can be tried quickly.

    With n kept, position 0 to n is a place among them in order of their deadlines. The running pass is not
    among them; those from position `runner_place` on run after it in any case.

    Attributes:
        value: Weight of everything that is on time, the running pass included.
        deadlines_s: Of those kept, ascending.
        work_before_s: By position, work of those kept before it.
        start_by_s: By position, the latest moment at which the first of those kept may start for all from the
            position to `runner_place` to be on time; infinite without any.
        start_behind_by_s: The same for those from the position, or `runner_place` if that is later, to the
            end.
        runner_start_by_s: The same for the running pass, infinite when it has no deadline or is late anyway.
        waits_for_end: Whether they are also on time if the running pass is not stopped.
        total_s: Work of all that wait.
        due_s: Work of those of them that have a deadline.
    """

    value: float
    deadlines_s: list[float]
    work_before_s: list[float]
    start_by_s: list[float]
    start_behind_by_s: list[float]
    runner_place: int
    runner_start_by_s: float
    waits_for_end: bool
    total_s: float
    due_s: float


def plan(work: OutstandingWork) -> QueuePlan:
    """Predict which prefills the replica keeps on time."""
    runner = work.runner
    due_s = sum([prefill.remaining_s for prefill in work.waiting])
    best_value, chosen, stops_at_s = _best(work, work.waiting)
    waits = stops_at_s is None
    kept = [prefill for prefill in chosen.feasible if prefill is not runner]
    is_runner_kept = _runner_value(work) > 0 if waits else len(kept) < len(chosen.feasible)
    deadlines_s = [prefill.deadline_s for prefill in kept]
    work_before_s = [0.0, *accumulate(prefill.remaining_s for prefill in kept)]
    place, runner_start_by_s = len(kept), math.inf
    if runner is not None and is_runner_kept:
        place = sum(1 for deadline_s in deadlines_s if deadline_s < runner.deadline_s)
        runner_start_by_s = runner.deadline_s - work_before_s[place]
    before, behind = [math.inf] * (len(kept) + 1), [math.inf] * (len(kept) + 1)
    for position in range(len(kept) - 1, -1, -1):
        start_by_s = deadlines_s[position] - work_before_s[position + 1]
        before[position] = min(before[position + 1], start_by_s if position < place else math.inf)
        behind[position] = min(behind[position + 1], start_by_s if position >= place else math.inf)
    return QueuePlan(
        best_value,
        deadlines_s,
        work_before_s,
        before,
        behind,
        place,
        runner_start_by_s,
        waits,
        due_s + work.undue_s,
        due_s,
    )


def prospect(work: OutstandingWork, new: Prefill, value_before: float) -> Prospect:
    """Predict in full what the replica makes of one more.

    `value_before` is `QueuePlan.value` without it.
    """
    best_value, chosen, stops_at_s = _best(work, [*work.waiting, new])
    start_s = work.free_at_s if stops_at_s is None else stops_at_s
    gain = best_value - value_before
    for prefill in chosen.feasible:
        if prefill is new:
            return Prospect(start_s, start_s + new.remaining_s, gain, is_on_time=True)
        start_s += prefill.remaining_s
    start_s = work.free_at_s + sum([prefill.remaining_s for prefill in work.waiting])
    is_undue = new.deadline_s == math.inf
    if is_undue:
        start_s += work.undue_s
    return Prospect(start_s, start_s + new.remaining_s, gain, is_on_time=is_undue)


def _best(work: OutstandingWork, waiting: Sequence[Prefill]) -> tuple[float, FeasibleSet, float | None]:
    """The value on time, who is, and when the running pass is stopped for it, None if it ends first."""
    direct = feasible_set(waiting, work.free_at_s)
    best_value = _value(direct) + _runner_value(work)
    if work.runner is not None and work.stops_at_s is not None and (direct.tardy or direct.rest):
        stopped = feasible_set([work.runner, *waiting], work.stops_at_s)
        if (stopped_value := _value(stopped)) > best_value:
            return stopped_value, stopped, work.stops_at_s
    return best_value, direct, None


def _value(chosen: FeasibleSet) -> float:
    return sum(map(value, chosen.feasible))


def _runner_value(work: OutstandingWork) -> float:
    """The weight of the running pass if it is on time when it is not stopped, else 0."""
    runner = work.runner
    if runner is None or runner.deadline_s == math.inf or work.free_at_s > runner.deadline_s + _EPSILON_S:
        return 0.0
    return value(runner)
