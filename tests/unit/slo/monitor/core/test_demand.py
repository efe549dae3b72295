"""What whoever sizes the fleet hears."""

from dataclasses import replace

import pytest
from monitor_reports import LATE, OK, ingress

from slo.autoscaling.need import DecodeDemand, FleetDemand, PrefillDemand
from slo.monitor.messages import MonitorReport, Role, RouterSeen
from slo.outcomes import Outcome
from slo.tiers import PREMIUM


def test_whoever_sizes_the_fleet_hears_the_routers_demand_and_who_is_at_risk(core):
    demand = FleetDemand(PrefillDemand(1.5, 2.0), DecodeDemand(0.5, 3))
    assert core.demand(0.0) is None
    core.heard(MonitorReport("router", Role.ROUTER, 0, RouterSeen({}, {}, demand)), 1.0)
    assert core.demand(1.0) == demand
    core.heard(ingress(*[LATE] * 20), 2.0)
    core.look(3.0)
    assert core.demand(3.0) == replace(demand, prefill=PrefillDemand(1.5, 2.0, at_risk=True))
    assert core.demand(10.0) is None, "the router has fallen silent"


@pytest.mark.parametrize(
    "ended",
    [
        replace(OK, tpot_s=0.2, tpot_budget_s=0.1),
        replace(OK, outcome=Outcome.FAILED),
        replace(OK, outcome=Outcome.EVICTED),
        replace(OK, outcome=Outcome.SHED, ttft_s=None, up_to_decode=True),
        replace(LATE, up_to_decode=True),
    ],
    ids=["late tokens", "failed", "evicted", "refused for decode", "late for decode"],
)
def test_what_prefill_could_not_help_asks_for_no_prefill_replica(core, ended):
    demand = FleetDemand(PrefillDemand(1.5, 2.0), DecodeDemand(0.5, 3))
    core.heard(MonitorReport("router", Role.ROUTER, 0, RouterSeen({}, {}, demand)), 1.0)
    core.heard(ingress(*[ended] * 20), 2.0)
    core.look(3.0)
    state = core.state(3.0).tiers[PREMIUM]
    assert state.burn.short.rate > 2, "people see it"
    assert state.at_risk is (ended.outcome is not Outcome.FAILED), "to shed others mends no failure"
    assert core.demand(3.0) == demand
