"""The order in which waiting prefills get the replica.

Owns the order alone: who can be on time together is `slo.queue.feasible_set`, who shares a forward pass
`slo.queue.batching`, who stops a running one `slo.preemption.decide`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Final, assert_never

from slo.queue.arrival_forecast import Expected, Forecast
from slo.queue.class_targets import ClassPrices, TargetState
from slo.queue.fairness import FairnessRule
from slo.queue.feasible_set import feasible_set
from slo.queue.prefill import Prefill, together_s
from slo.queue.slack import sedf_rank


class QueueOrder(enum.StrEnum):
    """Which waiting prefill goes first.

    `SEDF`: the earliest deadline that can still be met (`slo.queue.slack.sedf_rank`).

    `FEASIBLE_SET`: the earliest deadline among those that can all be met together
    (`slo.queue.feasible_set`). When not all can, those of the least value per second of work are tardy, so
    that one request that is late anyway does not make all behind it late too, as it does in any order by
    deadline alone.
    """

    SEDF = "sedf"
    FEASIBLE_SET = "feasible_set"


class Aim(enum.StrEnum):
    """What `QueueOrder.FEASIBLE_SET`, as order and as policy, makes as large as it can.

    `REQUESTS`: the number of requests on time, by their weights, all classes alike.

    `TARGETS`: the attainment of each class, measured by its own target (`slo.queue.class_targets`).
    """

    REQUESTS = "requests"
    TARGETS = "targets"


DEFAULT_ORDER: Final = QueueOrder.FEASIBLE_SET


def order(
    kind: QueueOrder,
    prefills: Sequence[Prefill],
    now_s: float,
    max_suspended_s: float = math.inf,
    forecast: Forecast | None = None,
    fairness: FairnessRule | None = None,
    targets: TargetState | None = None,
) -> list[Prefill]:
    """Sort waiting prefills, the one to run next first.

    Under either rule, overdue steps go first: those that have been suspended for as long as they may be.
    Next are those boosted because their class would otherwise starve (`slo.queue.fairness`). Among the
    infeasible, and among those without a deadline, preempted ones go first: until they end they hold memory
    and one of the places of suspended steps. `FEASIBLE_SET` keeps time free for what the `forecast` expects,
    and aims at the `targets` of the classes, if there are any.
    """
    start_s = now_s
    overdue: list[Prefill] = []
    if max_suspended_s < math.inf:
        overdue = [prefill for prefill in prefills if prefill.suspended_s >= max_suspended_s]
    if overdue:
        overdue.sort(key=lambda prefill: prefill.arrived_s)
        start_s += together_s(overdue)
        prefills = [prefill for prefill in prefills if prefill.suspended_s < max_suspended_s]
    match kind:
        case QueueOrder.SEDF:
            ordered = _by_sedf_rank(prefills, start_s)
        case QueueOrder.FEASIBLE_SET:
            prices = None if targets is None else targets.at(prefills, start_s)
            expected = None if forecast is None else forecast.at(now_s)
            ordered = _feasible_first(prefills, start_s, expected, fairness, prices)
        case _:
            assert_never(kind)
    if fairness is not None and (boosts := fairness.boosts(prefills, now_s)):
        ordered = fairness.boosted(ordered, boosts, start_s)
    return overdue + ordered if overdue else ordered


def _by_sedf_rank(prefills: Sequence[Prefill], start_s: float) -> list[Prefill]:
    def key(prefill: Prefill) -> tuple[int, bool, float, float]:
        group, distance, arrived_s = sedf_rank(
            prefill.deadline_s, start_s, prefill.remaining_s, prefill.arrived_s
        )
        return group, group > 0 and prefill.preemptions == 0, distance, arrived_s

    return sorted(prefills, key=key)


def _feasible_first(
    prefills: Sequence[Prefill],
    start_s: float,
    expected: Expected | None,
    fairness: FairnessRule | None,
    prices: ClassPrices | None,
) -> list[Prefill]:
    """The feasible set, then the tardy set, then those that are infeasible or have no deadline."""
    feasible, tardy, rest = feasible_set(prefills, start_s, expected, prices)
    if len(rest) > 1:
        rest = _by_sedf_rank(rest, start_s) if fairness is None else fairness.by_effective_tier(rest, start_s)
    if expected is not None and tardy:  # some may be tardy only for what may arrive: they have a feasible set
        start_s += together_s(feasible)
        return feasible + _feasible_first(tardy, start_s, None, fairness, prices) + rest
    return feasible + tardy + rest
