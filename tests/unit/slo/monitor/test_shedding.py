"""Who is shed for whom, how fast, and how it is taken back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slo.monitor.attainment import Burn
from slo.monitor.policy import UNSTEERED, ClusterPolicy
from slo.monitor.shedding import SteeringRules, SteerReason, TierBurn, steer
from slo.tiers import BACKGROUND, PREMIUM, STANDARD

RULES = SteeringRules()
LONG_AGO_S = 1000.0
CALM = TierBurn(Burn(0.5, 1, 200), Burn(0.5, 1, 200))
BETWEEN = TierBurn(Burn(1.5, 30, 200), Burn(1.5, 3, 20))
AT_RISK = TierBurn(Burn(5.0, 100, 200), Burn(5.0, 10, 20))
BACKGROUND_OUT = {BACKGROUND: 1.0}


def burns(premium=CALM, standard=CALM):
    return {PREMIUM: premium, STANDARD: standard, BACKGROUND: CALM}


def levels(policy):
    return policy.shed_level(BACKGROUND), policy.shed_level(STANDARD), policy.reserved


TABLE = {
    # what is followed: (background, standard, reserved); who is how; what follows and why
    "all is well": ((0, 0, 0), burns(), (0, 0, 0), SteerReason.NOTHING_TO_DO),
    "premium at risk": ((0, 0, 0), burns(AT_RISK), (0.25, 0, 0.15), SteerReason.PREMIUM_AT_RISK),
    "premium still at risk": ((1, 0, 0.3), burns(AT_RISK), (1, 0.25, 0.3), SteerReason.PREMIUM_AT_RISK),
    "nothing more to shed": ((1, 0.75, 0.3), burns(AT_RISK), (1, 0.75, 0.3), SteerReason.EXHAUSTED),
    "both at risk": ((0.5, 0, 0), burns(AT_RISK, AT_RISK), (0.75, 0, 0.15), SteerReason.PREMIUM_AT_RISK),
    "standard at risk": ((0, 0, 0), burns(CALM, AT_RISK), (0.25, 0, 0), SteerReason.STANDARD_AT_RISK),
    "standard alone cannot have more": ((1, 0, 0), burns(CALM, AT_RISK), (1, 0, 0), SteerReason.EXHAUSTED),
    "premium between": ((0.5, 0, 0.1), burns(BETWEEN), (0.5, 0, 0.1), SteerReason.UNDECIDED),
    "standard between": ((0.5, 0, 0.1), burns(CALM, BETWEEN), (0.5, 0, 0.1), SteerReason.UNDECIDED),
    "premium between, standard shed": ((1, 0.5, 0.3), burns(BETWEEN), (1, 0.5, 0.3), SteerReason.UNDECIDED),
    "standard comes back first": ((1, 0.5, 0.3), burns(), (1, 0.25, 0.3), SteerReason.PREMIUM_CALM),
    "though its refusals are misses": (
        (1, 0.5, 0.3),
        burns(CALM, AT_RISK),
        (1, 0.25, 0.3),
        SteerReason.PREMIUM_CALM,
    ),
    "then background": ((1, 0, 0.3), burns(), (0.75, 0, 0.15), SteerReason.ALL_CALM),
    "then the rest of the reservation": ((0, 0, 0.1), burns(), (0, 0, 0), SteerReason.ALL_CALM),
}


@pytest.mark.parametrize(("before", "how", "after", "reason"), TABLE.values(), ids=TABLE)
def test_one_step(before, how, after, reason):
    background, standard, reserved = before
    policy = ClusterPolicy(7, {BACKGROUND: background, STANDARD: standard}, reserved)
    steered = steer(policy, how, LONG_AGO_S, RULES)
    assert levels(steered.policy) == pytest.approx(after)
    assert steered.reason is reason
    assert steered.policy.version == (7 if before == after else 8)


ALERTS = {
    "both windows burn": (Burn(3, 30, 100), Burn(3, 5, 10), True),
    "it is over": (Burn(3, 30, 100), Burn(0, 0, 10), False),
    "it has only begun": (Burn(0.5, 3, 600), Burn(3, 3, 10), False),
    "two misses are no trend": (Burn(20, 2, 10), Burn(20, 2, 10), False),
    "nothing came": (Burn(0, 0, 0), Burn(0, 0, 0), False),
}


@pytest.mark.parametrize(("long", "short", "at_risk"), ALERTS.values(), ids=ALERTS)
def test_a_tier_is_at_risk_when_both_windows_say_so(long, short, at_risk):
    assert TierBurn(long, short).at_risk(RULES) is at_risk


def test_tightening_waits_for_its_effect_and_relaxing_waits_longer():
    def reason(how, since_s, policy=UNSTEERED):
        return steer(policy, how, since_s, RULES).reason

    shed = UNSTEERED.revised(shed={BACKGROUND: 0.5})
    assert reason(burns(AT_RISK), RULES.tighten_every_s - 1) is SteerReason.TOO_SOON
    assert reason(burns(AT_RISK), RULES.tighten_every_s) is SteerReason.PREMIUM_AT_RISK
    assert reason(burns(), RULES.relax_every_s - 1, shed) is SteerReason.TOO_SOON
    assert reason(burns(), RULES.relax_every_s, shed) is SteerReason.ALL_CALM


def test_what_was_shed_comes_back_altogether():
    policy = UNSTEERED
    for _ in range(20):
        policy = steer(policy, burns(AT_RISK), LONG_AGO_S, RULES).policy
    assert levels(policy) == (1.0, RULES.max_shed_standard, RULES.max_reserved)
    for _ in range(20):
        policy = steer(policy, burns(), LONG_AGO_S, RULES).policy
    assert levels(policy) == (0.0, 0.0, 0.0)


rates = st.sampled_from([CALM, BETWEEN, AT_RISK])


@settings(deadline=None)
@given(
    st.lists(st.tuples(rates, rates, st.floats(0, 60)), max_size=60),
    st.sampled_from([RULES, SteeringRules(step=0.3, reserve_step=0.07, max_shed_standard=0.5)]),
)
def test_whatever_happens_premium_is_served_and_standard_is_shed_only_behind_background(happens, rules):
    policy, since_s = UNSTEERED, LONG_AGO_S
    for premium, standard, passed_s in happens:
        since_s += passed_s
        before, how = policy, burns(premium, standard)
        steered = steer(policy, how, since_s, rules)
        policy = steered.policy
        background_level, standard_level, reserved = levels(policy)
        assert policy.shed_level(PREMIUM) == 0.0
        assert standard_level <= rules.max_shed_standard
        assert standard_level == 0.0 or background_level == 1.0
        assert reserved <= rules.max_reserved
        if policy is not before:
            assert policy.version == before.version + 1
            assert since_s >= rules.tighten_every_s
            since_s = 0.0
        else:
            assert levels(policy) == levels(before)
