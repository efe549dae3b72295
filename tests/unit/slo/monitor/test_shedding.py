"""Who is shed for whom, how fast, and how it is taken back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_tiers import FILE, FOUR, IMAGE, ONE, SEARCH, SEVEN

from slo.autoscaling.need import FleetLoad
from slo.monitor.attainment import Burn
from slo.monitor.policy import UNSTEERED, ClusterPolicy
from slo.monitor.shedding import SteeringRules, SteerReason, TierBurn, steer
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD

LOADED, IDLE, UNKNOWN = FleetLoad
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
    "premium at risk": ((0, 0, 0), burns(AT_RISK), (0.25, 0, 0.15), SteerReason.TOP_TIER_AT_RISK),
    "premium still at risk": ((1, 0, 0.3), burns(AT_RISK), (1, 0.25, 0.3), SteerReason.TOP_TIER_AT_RISK),
    "nothing more to shed": ((1, 0.75, 0.3), burns(AT_RISK), (1, 0.75, 0.3), SteerReason.EXHAUSTED),
    "both at risk": ((0.5, 0, 0), burns(AT_RISK, AT_RISK), (0.75, 0, 0.15), SteerReason.TOP_TIER_AT_RISK),
    "standard at risk": ((0, 0, 0), burns(CALM, AT_RISK), (0.25, 0, 0), SteerReason.LOWER_TIER_AT_RISK),
    "standard alone cannot have more": ((1, 0, 0), burns(CALM, AT_RISK), (1, 0, 0), SteerReason.EXHAUSTED),
    "premium between": ((0.5, 0, 0.1), burns(BETWEEN), (0.5, 0, 0.1), SteerReason.UNDECIDED),
    "standard between": ((0.5, 0, 0.1), burns(CALM, BETWEEN), (0.5, 0, 0.1), SteerReason.UNDECIDED),
    "premium between, standard shed": ((1, 0.5, 0.3), burns(BETWEEN), (1, 0.5, 0.3), SteerReason.UNDECIDED),
    "standard comes back first": ((1, 0.5, 0.3), burns(), (1, 0.25, 0.3), SteerReason.HIGHER_TIERS_CALM),
    "though its refusals are misses": (
        (1, 0.5, 0.3),
        burns(CALM, AT_RISK),
        (1, 0.25, 0.3),
        SteerReason.HIGHER_TIERS_CALM,
    ),
    "then background": ((1, 0, 0.3), burns(), (0.75, 0, 0.15), SteerReason.ALL_CALM),
    "then the rest of the reservation": ((0, 0, 0.1), burns(), (0, 0, 0), SteerReason.ALL_CALM),
}


@pytest.mark.parametrize(("before", "how", "after", "reason"), TABLE.values(), ids=TABLE)
def test_one_step(before, how, after, reason):
    background, standard, reserved = before
    policy = ClusterPolicy(7, {BACKGROUND: background, STANDARD: standard}, reserved)
    steered = steer(policy, how, LOADED, LONG_AGO_S, RULES, DEFAULT_TIERS)
    assert levels(steered.policy) == pytest.approx(after)
    assert steered.reason is reason
    assert steered.policy.version == (7 if before == after else 8)


@pytest.mark.parametrize("load", [IDLE, UNKNOWN])
@pytest.mark.parametrize("how", [burns(AT_RISK), burns(CALM, AT_RISK), burns(AT_RISK, AT_RISK)])
def test_nobody_is_shed_for_what_load_does_not_cause(load, how):
    steered = steer(UNSTEERED, how, load, LONG_AGO_S, RULES, DEFAULT_TIERS)
    assert (steered.policy, steered.reason) == (UNSTEERED, SteerReason.NOT_FOR_LOAD)


def test_what_was_shed_for_load_comes_back_once_the_fleet_is_idle_and_stays_while_nobody_knows():
    before = ClusterPolicy(7, {BACKGROUND: 1.0, STANDARD: 0.5}, 0.3)
    failing = burns(AT_RISK, AT_RISK)
    steered = steer(before, failing, UNKNOWN, LONG_AGO_S, RULES, DEFAULT_TIERS)
    assert (steered.policy, steered.reason) == (before, SteerReason.NOT_FOR_LOAD)
    policy = before
    for _ in range(20):
        policy = steer(policy, failing, IDLE, LONG_AGO_S, RULES, DEFAULT_TIERS).policy
    assert levels(policy) == (0.0, 0.0, 0.0)
    assert steer(before, burns(), UNKNOWN, LONG_AGO_S, RULES, DEFAULT_TIERS).policy.version == 8, (
        "calm is calm"
    )


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
        return steer(policy, how, LOADED, since_s, RULES, DEFAULT_TIERS).reason

    shed = UNSTEERED.revised(shed={BACKGROUND: 0.5})
    assert reason(burns(AT_RISK), RULES.tighten_every_s - 1) is SteerReason.TOO_SOON
    assert reason(burns(AT_RISK), RULES.tighten_every_s) is SteerReason.TOP_TIER_AT_RISK
    assert reason(burns(), RULES.relax_every_s - 1, shed) is SteerReason.TOO_SOON
    assert reason(burns(), RULES.relax_every_s, shed) is SteerReason.ALL_CALM


def test_what_was_shed_comes_back_altogether():
    policy = UNSTEERED
    for _ in range(20):
        policy = steer(policy, burns(AT_RISK), LOADED, LONG_AGO_S, RULES, DEFAULT_TIERS).policy
    assert levels(policy) == (1.0, RULES.max_shed, RULES.max_reserved)
    for _ in range(20):
        policy = steer(policy, burns(), LOADED, LONG_AGO_S, RULES, DEFAULT_TIERS).policy
    assert levels(policy) == (0.0, 0.0, 0.0)


rates = st.sampled_from([CALM, BETWEEN, AT_RISK])
loads = st.sampled_from(FleetLoad)


@settings(deadline=None)
@given(
    st.lists(st.tuples(rates, rates, st.floats(0, 60), loads), max_size=60),
    st.sampled_from([RULES, SteeringRules(step=0.3, reserve_step=0.07, max_shed=0.5)]),
)
def test_whatever_happens_premium_is_served_and_standard_is_shed_only_behind_background(happens, rules):
    policy, since_s = UNSTEERED, LONG_AGO_S
    for premium, standard, passed_s, load in happens:
        since_s += passed_s
        before, how = policy, burns(premium, standard)
        steered = steer(policy, how, load, since_s, rules, DEFAULT_TIERS)
        policy = steered.policy
        background_level, standard_level, reserved = levels(policy)
        assert policy.shed_level(PREMIUM) == 0.0
        assert standard_level <= rules.max_shed
        assert standard_level == 0.0 or background_level == 1.0
        assert reserved <= rules.max_reserved
        if policy is not before:
            assert policy.version == before.version + 1
            assert since_s >= rules.tighten_every_s
            since_s = 0.0
        else:
            assert levels(policy) == levels(before)


# Tiers of one's own


def of(tiers, **how):
    return {tier: how.get(tier.replace("-", "_"), CALM) for tier in tiers.names}


def shed(tiers, policy):
    return {tier: level for tier in tiers.names if (level := policy.shed_level(tier))}


FOUR_TABLE = {
    "the top sheds the lowest": ({}, {"text": AT_RISK}, {FILE: 0.25}, SteerReason.TOP_TIER_AT_RISK),
    "then the next": ({FILE: 1}, {"text": AT_RISK}, {FILE: 1, SEARCH: 0.25}, SteerReason.TOP_TIER_AT_RISK),
    "then the one above": (
        {FILE: 1, SEARCH: 0.75},
        {"text": AT_RISK},
        {FILE: 1, SEARCH: 0.75, IMAGE: 0.25},
        SteerReason.TOP_TIER_AT_RISK,
    ),
    "the second sheds both below": (
        {FILE: 1},
        {"image": AT_RISK},
        {FILE: 1, SEARCH: 0.25},
        SteerReason.LOWER_TIER_AT_RISK,
    ),
    "the third sheds the lowest": ({}, {"search": AT_RISK}, {FILE: 0.25}, SteerReason.LOWER_TIER_AT_RISK),
    "the lowest sheds nobody": ({}, {"file": AT_RISK}, {}, SteerReason.NOTHING_TO_DO),
    "the second comes back first": (
        {FILE: 1, SEARCH: 0.75, IMAGE: 0.5},
        {},
        {FILE: 1, SEARCH: 0.75, IMAGE: 0.25},
        SteerReason.HIGHER_TIERS_CALM,
    ),
    "then the third": ({FILE: 1, SEARCH: 0.5}, {}, {FILE: 1, SEARCH: 0.25}, SteerReason.HIGHER_TIERS_CALM),
    "but not before the second is calm": (
        {FILE: 1, SEARCH: 0.5},
        {"image": BETWEEN},
        {FILE: 1, SEARCH: 0.5},
        SteerReason.UNDECIDED,
    ),
    "the lowest comes back last": ({FILE: 0.5}, {"file": AT_RISK}, {FILE: 0.25}, SteerReason.ALL_CALM),
}


@pytest.mark.parametrize(("before", "how", "after", "reason"), FOUR_TABLE.values(), ids=FOUR_TABLE)
def test_one_step_with_four_tiers(before, how, after, reason):
    policy = ClusterPolicy(7, before, RULES.max_reserved if before else 0.0)
    steered = steer(policy, of(FOUR, **how), LOADED, LONG_AGO_S, RULES, FOUR)
    assert shed(FOUR, steered.policy) == after
    assert steered.reason is reason


def test_a_tier_that_may_not_be_shed_is_passed_over():
    policy = UNSTEERED
    for _ in range(40):
        policy = steer(policy, of(SEVEN, class_1=AT_RISK), LOADED, LONG_AGO_S, RULES, SEVEN).policy
    levels_of_all = {tier: policy.shed_level(tier) for tier in SEVEN.names}
    assert levels_of_all == {
        "class-1": 0.0,
        **{f"class-{number}": RULES.max_shed for number in range(2, 6)},
        "class-6": 0.0,
        "class-7": 1.0,
    }
    for _ in range(40):
        policy = steer(policy, of(SEVEN), LOADED, LONG_AGO_S, RULES, SEVEN).policy
    assert not any(policy.shed.values())
    assert policy.reserved == 0.0


def test_a_set_of_one_tier_sheds_nothing():
    steered = steer(UNSTEERED, of(ONE, text=AT_RISK), LOADED, LONG_AGO_S, RULES, ONE)
    assert not any(steered.policy.shed.values())
    at_limit = ClusterPolicy(1, {}, RULES.max_reserved)
    assert (
        steer(at_limit, of(ONE, text=AT_RISK), LOADED, LONG_AGO_S, RULES, ONE).reason is SteerReason.EXHAUSTED
    )


@settings(deadline=None)
@given(
    st.sampled_from([FOUR, SEVEN]),
    st.lists(st.tuples(st.lists(rates, min_size=7, max_size=7), st.floats(0, 60), loads), max_size=60),
)
def test_whatever_happens_tiers_are_shed_from_the_lowest_up(tiers, happens):
    policy, since_s = UNSTEERED, LONG_AGO_S
    for burning, passed_s, load in happens:
        since_s += passed_s
        how = dict(zip(tiers.names, burning, strict=False))
        before, policy = policy, steer(policy, how, load, since_s, RULES, tiers).policy
        since_s = since_s if policy is before else 0.0
        found = [policy.shed_level(tier) for tier in tiers.sheddable]
        assert set(shed(tiers, policy)) <= set(tiers.sheddable)
        full = [1.0 if tier == tiers.lowest else RULES.max_shed for tier in tiers.sheddable]
        for position, level in enumerate(found):
            assert level <= full[position]
            assert level == 0.0 or found[:position] == full[:position], "those below it are shed first"
