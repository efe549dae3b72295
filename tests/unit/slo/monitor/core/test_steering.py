"""The policy of the cluster: what is shed when the top tier misses, and taken back."""

from dataclasses import replace

import pytest
from monitor_reports import LATE, OK, SETTINGS, ingress, router

from slo.monitor.core import ALL_OBJECTIVES, SETTLE_S, Judged, MonitorCore
from slo.monitor.shedding import SteerReason
from slo.preemption.types import PreemptionPolicy
from slo.tiers import BACKGROUND, PREMIUM, ObjectiveName


def test_the_answer_to_a_report_is_the_policy_and_nothing_once_it_is_followed(core):
    assert core.heard(ingress(), 0.0).policy is None
    core.look(SETTLE_S)
    answer = core.heard(ingress(follows=0), SETTLE_S)
    assert answer.policy is core.policy
    assert core.policy.version == 1
    assert core.heard(ingress(follows=1), SETTLE_S).policy is None


def test_the_configured_preemption_goes_with_the_policy(core):
    core.look(SETTLE_S)
    assert (core.policy.preemption, core.policy.margin) == (PreemptionPolicy.RESCUE, 2.0)


def test_premium_that_misses_has_background_shed_and_is_relieved_later(core):
    core.heard(router(), 100.0)
    core.heard(ingress(*[OK] * 50, *[LATE] * 10), 100.0)
    assert core.look(101.0) is SteerReason.TOP_TIER_AT_RISK
    assert core.policy.shed_level(BACKGROUND) == 0.25
    assert core.policy.reserved == 0.15
    assert core.look(102.0) is SteerReason.TOO_SOON
    for second in range(110, 400):
        core.heard(ingress(*[OK] * 5), float(second))
        core.look(float(second))
    assert core.policy.shed_level(BACKGROUND) == 0.0
    assert core.policy.reserved == 0.0


@pytest.mark.parametrize(
    "said", [router(0.02), router(0.02, capacity=0.0), None], ids=["idle", "none", "no word"]
)
def test_misses_that_are_not_for_load_shed_nobody(core, said):
    """One client that promises itself a first token in a millisecond, every eight seconds."""
    hopeless = replace(OK, ttft_s=0.1, ttft_budget_s=0.001)
    for second in range(600):
        if said is not None:
            core.heard(said, float(second))
        if second % 8 == 0:
            core.heard(ingress(hopeless), float(second))
        core.look(float(second))
    assert core.state(600.0).tiers[PREMIUM].burn.long.rate > 2, "operators see them"
    assert not any(core.policy.shed.values())
    assert core.policy.reserved == 0.0


def test_a_loaded_fleet_is_not_steered_by_what_nothing_would_keep(core):
    hopeless = replace(LATE, ttft_budget_s=0.001, unattainable=(ObjectiveName.TTFT,))
    for second in range(100, 160):
        core.heard(router(), float(second))
        core.heard(ingress(OK, hopeless, hopeless), float(second))
        assert core.look(float(second)) is SteerReason.NOTHING_TO_DO
    state = core.state(160.0).tiers[PREMIUM]
    assert (state.long.ratio, state.at_risk) == (pytest.approx(1 / 3), False)
    assert state.burn.long.rate > 50, "people see all"
    assert core.judgements()[Judged("m", PREMIUM, ALL_OBJECTIVES, met=False)] == 120
    assert not core.demand(160.0).prefill.at_risk
    core.heard(ingress(*[LATE] * 10), 160.0)
    assert core.look(160.0) is SteerReason.TOP_TIER_AT_RISK
    assert core.demand(160.0).prefill.at_risk


def test_a_monitor_that_does_not_steer_sheds_nothing():
    core = MonitorCore(replace(SETTINGS, steers=False), 0.0)
    core.heard(router(), 100.0)
    core.heard(ingress(*[LATE] * 50), 100.0)
    core.look(101.0)
    assert not any(core.policy.shed.values())
    assert core.state(101.0).tiers[PREMIUM].at_risk


def test_a_monitor_that_is_told_to_steer_no_more_takes_back_what_it_shed(core):
    core.heard(router(), 100.0)
    core.heard(ingress(*[LATE] * 50), 100.0)
    core.look(101.0)
    version = core.policy.version
    assert core.policy.shed[BACKGROUND] > 0
    assert core.policy.reserved > 0
    core.heard(ingress(settings=replace(SETTINGS, steers=False)), 102.0)
    assert core.look(103.0) is SteerReason.NOTHING_TO_DO
    assert (dict(core.policy.shed), core.policy.reserved) == ({}, 0.0)
    assert core.policy.version == version + 1
    core.look(104.0)
    assert core.policy.version == version + 1
