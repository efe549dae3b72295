"""A tier of replicas whose number follows a sizer: orders, starts, draining.

Owns when a replica is ordered, when it is up, and what the tier has had of them. What a replica is, and what
becomes of its requests, is the fleet's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol

from simulator.fleet.scaling import Elasticity, Payroll, Seen
from simulator.replica.loop import EventLoop
from slo.request import ReplicaId


class Drained(Protocol):
    """A replica that can be told to take no more."""

    def drain(self) -> None:
        """Take no more."""


@dataclass(frozen=True, slots=True)
class Crew(Generic[Seen]):
    """The fleet's part.

    Attributes:
        staying: The replicas that take requests, the oldest first.
        see: What there is to decide on, with as many running and so many wanted until now.
        hire: Brings a replica up, and says which it is.
        let_go: Ends those that have drained.
        is_over: Whether every request has ended.
    """

    staying: Callable[[], Sequence[Drained]]
    see: Callable[[int, int], Seen]
    hire: Callable[[], ReplicaId]
    let_go: Callable[[], None]
    is_over: Callable[[], bool]


class ElasticTier(Generic[Seen]):
    """One tier.

    Args:
        loop: The virtual time.
        crew: The fleet's part.
        payroll: Who is paid from the order on.
        elasticity: How it is scaled.
        replicas: With how many it begins.

    Attributes:
        sizes: (time, replicas wanted) whenever that changes, from the start.
    """

    def __init__(
        self, loop: EventLoop, crew: Crew[Seen], payroll: Payroll, elasticity: Elasticity[Seen], replicas: int
    ) -> None:
        self.sizes = [(0.0, replicas)]
        self._loop = loop
        self._crew: Crew[Seen] = crew
        self._payroll = payroll
        self._elasticity: Elasticity[Seen] = elasticity
        self._target = replicas
        self._starting = 0

    def start(self) -> None:
        """Ask from now on."""
        self._loop.call_at(self._loop.now_s + self._elasticity.every_s, self._resize)

    def _resize(self) -> None:
        """Ask how many replicas there shall be, and see to it."""
        now_s = self._loop.now_s
        self._crew.let_go()
        if self._crew.is_over():
            return
        staying = self._crew.staying()
        target = self._elasticity.sizer(self._crew.see(len(staying), self._target), now_s)
        if target != self._target:
            self._target = target
            self.sizes.append((now_s, target))
        for _ in range(target - len(staying) - self._starting):
            self._starting += 1
            self._loop.call_at(now_s + self._elasticity.start_s, self._join, now_s)
        for replica in staying[max(target, 1) :]:
            replica.drain()
        self.start()

    def _join(self, ordered_s: float) -> None:
        """A replica that was ordered is up; one that is not wanted any more was ended before that."""
        self._starting -= 1
        if len(self._crew.staying()) >= self._target or self._crew.is_over():
            self._payroll.paid(self._loop.now_s - ordered_s)
        else:
            self._payroll.hired(self._crew.hire(), ordered_s)
