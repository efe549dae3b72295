"""Tiers of replicas that grow and shrink: who decides, on what, and what the replicas cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from simulator.fleet.outcome import Passage
from slo.autoscaling.need import DecodeDemand
from slo.monitor.attainment import Counted, RollingAttainment
from slo.monitor.shedding import SteeringRules, TierBurn
from slo.outcomes import Outcome, RequestEnded
from slo.request import ReplicaId
from slo.tiers import TierSet

_RULES: Final = SteeringRules()


@dataclass(frozen=True, slots=True)
class PrefillTierSeen:
    """What there is to decide on for prefill.

    Attributes:
        work: As `slo.autoscaling.need.PrefillDemand.work`; not a number without admission.
        backlog_s: Likewise, as the next.
        ongoing: Prefills that the replicas have.
        running: Replicas that take requests.
        target: How many there shall be until now.
        at_risk: Whether a tier misses its target.
    """

    work: float
    backlog_s: float
    ongoing: int
    running: int
    target: int
    at_risk: bool


@dataclass(frozen=True, slots=True)
class DecodeTierSeen:
    """What there is to decide on for decode.

    Attributes:
        demand: As the router tells it.
        ongoing: Requests that the replicas have, those whose prefill still runs included.
        running: Replicas that take requests.
        target: How many there shall be until now.
    """

    demand: DecodeDemand
    ongoing: int
    running: int
    target: int


Seen = TypeVar("Seen", PrefillTierSeen, DecodeTierSeen)


@dataclass(frozen=True, slots=True)
class Elasticity(Generic[Seen]):
    """How a tier is scaled.

    Attributes:
        sizer: How many replicas there shall be from now on, by what is seen and the time.
        start_s: From the order of a replica until it takes requests.
        every_s: How often is asked.
    """

    sizer: Callable[[Seen, float], int]
    start_s: float = 60.0
    every_s: float = 1.0


@dataclass(slots=True)
class Payroll:
    """A tier's replicas' time; of prefill also how well it is used, as the monitor sees it."""

    tiers: TierSet
    _attainment: RollingAttainment = field(default_factory=RollingAttainment)
    _since_s: dict[ReplicaId, float] = field(default_factory=dict)
    _paid_s: float = 0.0

    def hired(self, replica_id: ReplicaId, at_s: float) -> None:
        """A replica was ordered."""
        self._since_s[replica_id] = at_s

    def left(self, replica_id: ReplicaId, at_s: float) -> None:
        """It is not there any more."""
        self._paid_s += at_s - self._since_s.pop(replica_id)

    def paid(self, seconds: float) -> None:
        """A replica was started in vain."""
        self._paid_s += seconds

    def total_s(self, now_s: float) -> float:
        """All of it until now."""
        return self._paid_s + math.fsum(now_s - since_s for since_s in self._since_s.values())

    def judge(self, passage: Passage, now_s: float) -> None:
        """A request has ended."""
        arrival, job = passage.arrival, passage.job
        is_finished = passage.outcome is Outcome.FINISHED and job is not None
        ended = RequestEnded(
            "",
            arrival.tier,
            "",
            passage.outcome or Outcome.FAILED,
            now_s - arrival.at_s,
            ttft_s=job.first_token_s - arrival.at_s if is_finished and job is not None else None,
            ttft_budget_s=arrival.ttft_s,
            unattainable=passage.unattainable,
        )
        self._attainment.add(ended, now_s)

    def is_at_risk(self, now_s: float) -> bool:
        """Whether a tier misses its target, as the monitor has it."""
        windows = self._attainment
        return any(
            TierBurn(
                windows.burn(tier, policy.target, windows.long_s, now_s, Counted.IN_REACH),
                windows.burn(tier, policy.target, windows.short_s, now_s, Counted.IN_REACH),
            ).at_risk(_RULES)
            for tier, policy in self.tiers.clients.items()
        )
