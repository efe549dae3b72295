"""Requests that are held back until a replica can start them.

Owns their order, who is to be looked at next and when. Whether one is placed, and where, is `router.core`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from slo.queue.feasible_set import feasible_set
from slo.queue.order import DEFAULT_ORDER, order
from slo.queue.prefill import Prefill

if TYPE_CHECKING:
    from router.messages import PlacementRequested
    from slo.request import JobId

LOOKED_AT: Final = 16
"""Held requests that are tried at a time: those behind the first that cannot start may wait for another
replica, the one that has their prefix."""
_ORDER_HOLDS_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for a request until it is placed.

    Attributes:
        tokens: Length of its prompt.
        arrived_s: When it arrived.
        budget_s: For its first token, from arrival; None for no deadline.
        deadline_s: When its prefill must end, infinite for never.
        latest_s: When its prefill must end lest it be refused or evicted; infinite when it never is.
        weight: Its worth on time.
    """

    request: PlacementRequested
    tokens: int
    arrived_s: float
    budget_s: float | None
    deadline_s: float
    latest_s: float
    weight: float


@dataclass(frozen=True, slots=True)
class _Waiting:
    terms: Terms
    own_s: float
    urgent_s: float


class HeldQueue:
    """Held requests in the order in which a replica would run them, as if the fleet were one replica.

    Args:
        guard_s: A request is urgent this long before the last moment at which it could start.
    """

    def __init__(self, guard_s: float) -> None:
        self._guard_s = guard_s
        self._waiting: dict[JobId, _Waiting] = {}
        self._order: list[JobId] | None = None
        self._ordered_s = -math.inf

    def __len__(self) -> int:  # noqa: D105 - how many are held
        return len(self._waiting)

    def hold(self, terms: Terms, own_s: float) -> None:
        """Take a request.

        Args:
            terms: What holds for it.
            own_s: Its least work on any replica.
        """
        urgent_s = terms.deadline_s - own_s - self._guard_s
        self._waiting[terms.request.job_id] = _Waiting(terms, own_s, urgent_s)
        self._order = None

    def remove(self, job_id: JobId) -> Terms | None:
        """A request is placed, evicted or gone; None when it is not held."""
        waiting = self._waiting.pop(job_id, None)
        return None if waiting is None else waiting.terms

    def impossible(self, now_s: float) -> list[Terms]:
        """Those that are to be given up: they cannot end in time wherever they start now."""
        return [one.terms for one in self._waiting.values() if now_s + one.own_s > one.terms.latest_s]

    def next(self, now_s: float, free_at_s: float, replicas: int) -> list[Terms]:
        """Those to be tried now, in order: the first, and whoever has become urgent.

        Args:
            now_s: The time.
            free_at_s: When replicas become free, on average.
            replicas: How many share the work.
        """
        if self._order is None or now_s - self._ordered_s > _ORDER_HOLDS_S:
            waiting = [self._as_prefill(one, replicas) for one in self._waiting.values()]
            self._order = [one.job_id for one in order(DEFAULT_ORDER, waiting, now_s, free_at_s)]
            self._ordered_s = now_s
        held = [one for job in self._order if (one := self._waiting.get(job)) is not None]
        first, later = held[:LOOKED_AT], held[LOOKED_AT:]
        return [one.terms for one in first] + [one.terms for one in later if self._is_urgent(one, now_s)]

    def has_room(self, terms: Terms, own_s: float, now_s: float, replicas: int) -> bool:
        """Whether one more could be on time besides those held, if all replicas were free now."""
        new = self._as_prefill(_Waiting(terms, own_s, 0.0), replicas)
        pool = [self._as_prefill(one, replicas) for one in self._waiting.values()]
        return any(one is new for one in feasible_set([*pool, new], now_s).feasible)

    def next_look_s(self, now_s: float) -> float:
        """When the next becomes urgent or impossible, infinite for never."""
        times = [
            time_s
            for one in self._waiting.values()
            for time_s in (one.urgent_s, one.terms.latest_s - one.own_s)
            if time_s > now_s
        ]
        return min(times, default=math.inf)

    def _is_urgent(self, one: _Waiting, now_s: float) -> bool:
        return one.urgent_s <= now_s <= one.terms.deadline_s - one.own_s

    @staticmethod
    def _as_prefill(one: _Waiting, replicas: int) -> Prefill:
        terms = one.terms
        work_s = one.own_s / replicas
        return Prefill(
            terms.request.job_id, terms.weight, terms.deadline_s - one.own_s + work_s, work_s, terms.arrived_s
        )
