"""What ingresses, routers and replicas report to the cluster-wide monitor, and its answers.

Durations and slack, never times: clocks of two hosts need not agree.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias, assert_never

from slo.autoscaling.need import FleetDemand
from slo.monitor.directives import PreemptDirective, ReplicaSeen
from slo.monitor.policy import ClusterPolicy
from slo.monitor.settings import MonitorSettings
from slo.outcomes import RequestEnded
from slo.predict.prediction_error import UNCORRECTED, PassMeasured
from slo.protocol import Message
from slo.tiers import Tier


class Role(enum.StrEnum):
    """What a reporter is; the values label metrics."""

    INGRESS = "ingress"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class IngressSeen:
    """An ingress says what has ended there since its last report.

    Attributes:
        ended: The requests.
        ages_s: How long before the report each of them had ended; empty where all have just ended.
    """

    ended: tuple[RequestEnded, ...]
    ages_s: tuple[float, ...] = ()

    @property
    def aged(self) -> Iterator[tuple[RequestEnded, float]]:
        """Each of the requests, with its age."""
        return zip(self.ended, self.ages_s or (0.0,) * len(self.ended), strict=True)

    @property
    def is_quiet(self) -> bool:
        """Whether there is nothing in it to act on."""
        return not self.ended


@dataclass(frozen=True, slots=True)
class RouterSeen:
    """The router says what it has decided since its last report.

    Attributes:
        placed: Requests by tier and by why the replica was chosen.
        refused: Requests by tier and by why they were refused.
        demand: What there is to do.
    """

    placed: Mapping[tuple[Tier, str], int]
    refused: Mapping[tuple[Tier, str], int]
    demand: FleetDemand | None = None

    @property
    def is_quiet(self) -> bool:
        """Whether there is nothing in it to act on; what arrived lately is forgotten slowly."""
        demand = self.demand
        is_asked = demand is not None and (demand.prefill.backlog_s > 0 or demand.decode.requests > 0)
        return not (self.placed or self.refused or is_asked)


@dataclass(frozen=True, slots=True)
class PrefillSeen:
    """A prefill replica says what it does.

    Attributes:
        work: What runs and who waits.
        measured: Forward passes that ended since the last report.
        correction: Of its predictions, which it follows.
    """

    work: ReplicaSeen
    measured: tuple[PassMeasured, ...] = ()
    correction: float = UNCORRECTED

    @property
    def is_quiet(self) -> bool:
        """Whether there is nothing in it to act on."""
        return not (self.measured or self.work.step or self.work.waiting)


@dataclass(frozen=True, slots=True)
class DecodeSeen:
    """A decode replica says how many requests it has."""

    running: int

    @property
    def is_quiet(self) -> bool:
        """Whether there is nothing in it to act on."""
        return self.running == 0


Seen: TypeAlias = IngressSeen | RouterSeen | PrefillSeen | DecodeSeen


def without_events(seen: Seen) -> Seen:
    """What a report says of the present alone, as its events have been heard."""
    match seen:
        case IngressSeen():
            return IngressSeen(())
        case RouterSeen():
            return replace(seen, placed={}, refused={})
        case PrefillSeen():
            return replace(seen, measured=())
        case DecodeSeen():
            return seen
        case _:
            assert_never(seen)


@dataclass(frozen=True, slots=True)
class MonitorReport(Message):
    """One report.

    Attributes:
        reporter: Who reports; unique among all of a model.
        follows: The version of the policy that it follows.
        seen: What it has seen; None when it has nothing to say.
        policy: The policy that it follows, when the monitor has asked for it.
        settings: What the monitor shall work with; from those that know the configuration.
        dropped: How much it has had to leave out since it began.
        acknowledged: How much of that a monitor has answered to.
        model: The model that it is about; each has replicas, attainment and a policy of its own.
        batch: The number of the events in `seen`: those of the report before are told again, under their
            number, if they were not answered. 0 numbers none.
    """

    reporter: str
    role: Role
    follows: int
    seen: Seen | None = None
    policy: ClusterPolicy | None = None
    settings: MonitorSettings | None = None
    dropped: int = 0
    acknowledged: int = 0
    model: str = ""
    batch: int = 0


@dataclass(frozen=True, slots=True)
class MonitorAnswer(Message):
    """The answer to a report.

    Attributes:
        policy: What to follow from now on; None when the reporter follows it already.
        directives: Orders for the reporter alone.
        wanted: Whether the next report shall bring the policy that the reporter follows: the monitor has been
            restarted and does not know it.
        correction: For a prefill replica, how many times as long as its own predictor says a prefill takes
            there; None when it follows that already.
    """

    policy: ClusterPolicy | None = None
    directives: tuple[PreemptDirective, ...] = field(default=())
    wanted: bool = False
    correction: float | None = None
