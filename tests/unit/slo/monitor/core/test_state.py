"""What the monitor says of the cluster, each report counted once."""

from dataclasses import replace

import pytest
from monitor_reports import LATE, OK, ingress, prefill, slow

from slo.autoscaling.need import DecodeDemand, FleetDemand, PrefillDemand
from slo.monitor.core import ALL_OBJECTIVES
from slo.monitor.messages import DecodeSeen, MonitorReport, Role, RouterSeen
from slo.tiers import PREMIUM, STANDARD


def test_the_state_tells_it_all(core):
    core.heard(ingress(*[OK] * 30, *[LATE] * 10, dropped=2), 100.0)
    core.heard(prefill(*slow(1.5)), 100.0)
    core.heard(MonitorReport("d", Role.DECODE, 9, DecodeSeen(3)), 100.0)
    placed = {(PREMIUM, "only_replica"): 3}
    core.heard(MonitorReport("router", Role.ROUTER, 9, RouterSeen(placed, {})), 100.0)
    core.heard(MonitorReport("router", Role.ROUTER, 9, RouterSeen(placed, {})), 100.5)
    state = core.state(101.0)
    premium = state.tiers[PREMIUM]
    assert premium.long.ratio == 0.75
    assert premium.burn.short.rate == pytest.approx(25.0)
    assert premium.at_risk
    assert state.tiers[STANDARD].long.ratio is None
    assert [series.tenant for series in core.series(101.0)] == ["acme"]
    assert state.error.mape == pytest.approx(1 / 3)
    assert state.subscribers == dict.fromkeys(Role, 1)
    assert state.behind == 2
    assert core.placed[PREMIUM, "only_replica"] == 6
    assert core.dropped == 2


def test_what_is_told_again_is_not_counted_again_and_the_present_is_taken(core):
    demand = FleetDemand(PrefillDemand(1.5, 2.0), DecodeDemand(0.2, 3, replicas=2))
    for waiting in (demand, replace(demand, decode=DecodeDemand(0.9, 3, replicas=2))):
        core.heard(ingress(LATE, LATE, batch=7), 0.0)
        core.heard(replace(prefill(*slow(1.5)), batch=3), 0.0)
        decided = RouterSeen({(PREMIUM, "only_replica"): 3}, {(PREMIUM, "backlog"): 2}, waiting)
        core.heard(MonitorReport("router", Role.ROUTER, 0, decided, batch=5), 0.0)
    assert core.judged[LATE.model, PREMIUM, ALL_OBJECTIVES, False] == 2
    assert core.placed.total() == 3
    assert core.refused.total() == 2
    assert core.demand(0.0).decode.memory == 0.9
    assert core.state(0.0).error.samples == 1
    core.heard(ingress(LATE, batch=8), 1.0)
    core.heard(ingress(LATE, reporter="another", batch=8), 1.0)
    assert core.judged[LATE.model, PREMIUM, ALL_OBJECTIVES, False] == 4


def test_what_is_told_again_after_minutes_counts_once(core):
    """As by a process behind a network that was cut: it was heard, and did not hear the answer."""
    core.heard(ingress(LATE, batch=7), 0.0)
    core.look(120.0)
    assert core.subscribers == {}
    core.heard(ingress(LATE, batch=7), 121.0)
    assert core.judged[LATE.model, PREMIUM, ALL_OBJECTIVES, False] == 1
    core.look(121.0 + 3700.0)
    assert core._batches == {}


def test_the_error_of_predicted_first_tokens_is_known(core):
    assert core.state(0.0).ttft_error is None
    core.heard(ingress(replace(OK, predicted_ttft_s=0.15), replace(OK, predicted_ttft_s=0.1), OK), 1.0)
    error = core.state(1.0).ttft_error
    assert error.samples == 2
    assert error.mape == pytest.approx(0.25)
