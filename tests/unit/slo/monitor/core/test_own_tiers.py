"""A monitor of a deployment's own tiers."""

from dataclasses import replace

from monitor_reports import LATE, OK, SETTINGS, ingress, prefill, router
from own_tiers import FILE, FOUR, IMAGE, SEARCH, TEXT

from slo.monitor.core import MonitorCore
from slo.monitor.directives import StepSeen, WaiterSeen
from slo.monitor.shedding import SteerReason
from slo.preemption.types import KeepReason
from slo.request import JobId
from slo.tiers import BACKGROUND, PREMIUM


def ended(tier, request=OK, times=1):
    return [replace(request, tier=tier)] * times


def test_a_monitor_of_other_tiers_measures_and_sheds_those():
    core = MonitorCore(replace(SETTINGS, tiers=FOUR), 0.0)
    core.heard(router(), 100.0)
    core.heard(ingress(*ended(TEXT, LATE, 20), *ended(FILE, OK, 5)), 100.0)
    assert core.look(101.0) is SteerReason.TOP_TIER_AT_RISK
    assert core.policy.shed == {FILE: 0.25}
    state = core.state(101.0)
    assert tuple(state.tiers) == FOUR.names
    assert state.tiers[SEARCH].target == 0.95
    assert state.tiers[TEXT].at_risk
    assert {series.tier for series in core.series(101.0)} == {TEXT, FILE}


def test_directives_follow_the_ranks_of_the_set():
    core = MonitorCore(replace(SETTINGS, tiers=FOUR), 0.0)
    step = StepSeen(7, (SEARCH,), 2.0, 0.1, KeepReason.WAITERS_IN_TIME)
    lower, higher = WaiterSeen(JobId("file"), FILE, 1.0), WaiterSeen(JobId("image"), IMAGE, 1.0)
    assert core.heard(prefill(step=step, waiting=[lower]), 0.0).directives == ()
    (directive,) = core.heard(prefill(step=step, waiting=[lower, higher]), 0.0).directives
    assert directive.beneficiary == "image"


def test_a_deployment_that_changes_its_tiers_leaves_nothing_of_the_old_ones():
    core = MonitorCore(SETTINGS, 0.0)
    core.heard(router(), 100.0)
    core.heard(ingress(*[LATE] * 20), 100.0)
    core.look(101.0)
    assert core.policy.shed == {BACKGROUND: 0.25}
    core.heard(ingress(*ended(IMAGE), settings=replace(SETTINGS, tiers=FOUR)), 102.0)
    core.heard(ingress(*ended(PREMIUM)), 102.0)  # from one that has not heard of the change
    core.look(103.0)
    assert core.policy.shed == {}
    state = core.state(103.0)
    assert tuple(state.tiers) == FOUR.names
    assert {series.tier for series in core.series(103.0)} == {IMAGE}
