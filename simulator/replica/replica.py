"""A prefill replica in virtual time: the governor and ledger that serve, around a virtual engine.

Stands in for the replica process (`prefill_node.replica.server`,
`prefill_node.replica.preemption_controller`): every arrival, issue and end wakes the governor, and one timer
does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prefill_node.board.messages import Reached
from prefill_node.replica.governing.governor import ForwardProfile, Governor
from prefill_node.replica.governing.ledger import Accepted, PrefillLedger
from simulator.findings import State
from simulator.replica.engine import Issued, VirtualEngine
from simulator.replica.job import Job
from simulator.replica.loop import EventLoop
from slo.predict.prefill_time import PrefillPredictor
from slo.preemption.types import Keep, Preempt, PreemptionMode, PreemptionRules
from slo.queue.order import QueueOrder
from slo.tiers import Tier


@dataclass(frozen=True, slots=True)
class ReplicaRules:
    """How a replica decides.

    Attributes:
        weights: Value of a request on time, by tier.
        signal_s: From an arrival to the moment at which the workers can see the order.
    """

    preemption: PreemptionRules
    order: QueueOrder
    predictor: PrefillPredictor
    weights: Mapping[Tier, float]
    signal_s: float = 0.0002


class VirtualReplica:
    """One prefill replica.

    Args:
        profile: Where a pass of its model can stop, and how far the host launches ahead of the device; with
            nothing ahead it waits at each boundary.
        prefilled: Called with every request whose prefill is done; `release` must be called for it later.

    Attributes:
        blocking_s: Of each stop, from the decision to standstill.
        busy_s: Device time spent so far, that of work done again included.
    """

    def __init__(
        self,
        loop: EventLoop,
        engine: VirtualEngine,
        rules: ReplicaRules,
        profile: ForwardProfile,
        prefilled: Callable[[Job], None],
    ) -> None:
        self.blocking_s: list[float] = []
        self.busy_s = 0.0
        self.engine = engine
        self.ledger = PrefillLedger(rules.predictor)
        self.governor = Governor(
            self.ledger, rules.weights, rules.preemption, rules.order, profile, engine.fairness
        )
        self._loop = loop
        self._rules = rules
        self._ahead_s = profile.ahead_s
        self._prefilled = prefilled
        self._keeps = rules.preemption.mode is PreemptionMode.RESUME
        self._recheck = 0
        self._stopping = False

    def arrive(self, job: Job) -> None:
        """Take a request."""
        now_s = self._loop.now_s
        arrival = job.arrival
        job.expect_cached(self.engine.cached_tokens(job))
        accepted = Accepted(
            job.job_id, arrival.tier, arrival.tokens, job.deadline_s, arrival.at_s, job.cached_tokens
        )
        self.governor.arrived(accepted, now_s)
        self.engine.add(job, now_s)
        job.enter(State.WAITING, now_s)
        if self.engine.issued is None:
            self._issue()
        else:
            self._decide()

    def release(self, job: Job) -> None:
        """The KV of a prefilled request has left, or is not wanted."""
        self.engine.release(job)
        if self.engine.issued is None:
            self._issue()

    def reached(self) -> Reached:
        """The running step and the boundary that its host has reached, as its worker publishes it."""
        issued = self.engine.issued
        if issued is None:
            return Reached(0, 0)
        host_at = issued.boundary_after(self._loop.now_s, self._ahead_s) - 1
        boundary = min(max(host_at, issued.view.from_boundary), issued.times.boundaries)
        return Reached(issued.view.step_id, boundary)

    def _issue(self) -> None:
        issued = self.engine.issue(self._loop.now_s)
        if issued is not None:
            self._stopping = False
            self._loop.call_at(issued.ends_s, self._complete, issued)
            self._decide()

    def _complete(self, issued: Issued) -> None:
        if self.engine.issued is not issued or self._stopping:
            return  # it has been stopped
        self.busy_s += self._loop.now_s - issued.view.started_s
        for job in self.engine.complete(self._loop.now_s):
            self.ledger.ended(job.job_id)
            self._prefilled(job)
        if self.engine.issued is None:
            self._issue()

    def _decide(self) -> None:
        if not self.governor.is_on:
            return
        now_s = self._loop.now_s
        self._recheck += 1
        match self.governor.decide(self.engine.view(), self.reached(), now_s):
            case Preempt(_, beneficiary):
                self._order_stop(beneficiary)
            case Keep(_, recheck_at_s):
                if recheck_at_s < math.inf:
                    self._loop.call_at(recheck_at_s, self._timer, self._recheck)

    def _timer(self, number: int) -> None:
        if number == self._recheck and self.engine.issued is not None:
            self._decide()

    def _order_stop(self, beneficiary: str) -> None:
        issued = self.engine.issued
        assert issued is not None
        ordered_s = self._loop.now_s
        boundary = issued.boundary_after(ordered_s + self._rules.signal_s, self._ahead_s)
        if boundary >= issued.times.boundaries:
            return  # the last boundary is behind the host: the pass ends
        self._stopping = True
        stops_s = max(issued.origin_s + issued.times.at_s(boundary), ordered_s + self._rules.signal_s)
        self._loop.call_at(stops_s, self._stop, issued, boundary, beneficiary, ordered_s)

    def _stop(self, issued: Issued, boundary: int, beneficiary: str, ordered_s: float) -> None:
        now_s = self._loop.now_s
        self.blocking_s.append(now_s - ordered_s)
        self.busy_s += now_s - issued.view.started_s
        self.engine.stop(now_s, boundary, beneficiary, keep=self._keeps)
        self._issue()
