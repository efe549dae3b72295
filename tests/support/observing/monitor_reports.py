"""Reports to the monitor's core, as each role sends them."""

from dataclasses import replace

from slo.autoscaling.need import DecodeDemand, FleetDemand, PrefillDemand
from slo.monitor.directives import ReplicaSeen
from slo.monitor.messages import IngressSeen, MonitorReport, PrefillSeen, Role, RouterSeen
from slo.monitor.settings import MonitorSettings
from slo.outcomes import Outcome, RequestEnded
from slo.predict.prediction_error import PassMeasured
from slo.preemption.types import PreemptionPolicy
from slo.request import ReplicaId
from slo.tiers import PREMIUM

R = ReplicaId("r")
OK = RequestEnded("m", PREMIUM, "acme", Outcome.FINISHED, 1.0, ttft_s=0.1, ttft_budget_s=0.2)
LATE = replace(OK, ttft_s=0.3)
SETTINGS = MonitorSettings(margin=2.0, preemption=PreemptionPolicy.RESCUE)


def ingress(*ended, follows=0, reporter="i", **more):
    return MonitorReport(reporter, Role.INGRESS, follows, IngressSeen(ended), **more)


def prefill(*measured, step=None, waiting=(), follows=0, replica=R, correction=1.0):
    seen = PrefillSeen(ReplicaSeen(replica, step, tuple(waiting)), measured, correction=correction)
    return MonitorReport(replica, Role.PREFILL, follows, seen)


def router(work=1.8, *, capacity=2.0):
    """By default its fleet is busy."""
    demand = FleetDemand(PrefillDemand(work, 0.0, capacity=capacity), DecodeDemand(0.2, 3, replicas=2))
    return MonitorReport("router", Role.ROUTER, 0, RouterSeen({}, {}, demand))


def slow(times, *, passes=1, corrected=1.0):
    return [PassMeasured(0.1, 0.1 * corrected, 0.1 * times)] * passes
