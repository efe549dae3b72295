"""The monitor and the router's admission together: what is shed, for what, and for how long."""

import itertools

import pytest
from steered_fleet import SteeredFleet, Stream

from slo.errors import RejectionReason
from slo.monitor.policy import RELAX_EVERY_S
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD

CALM = {PREMIUM: Stream(5, 0.01)}


def test_a_tier_that_asks_for_too_much_takes_nothing_of_the_share_of_another():
    """Standard asks for three times the fleet, and misses its target by what is refused to it."""
    fleet = SteeredFleet()
    fleet.run(420, **CALM, **{STANDARD: Stream(30, 0.1), BACKGROUND: Stream(0.5, 0.1)})
    assert fleet.steps[-1][1] == {BACKGROUND: 1.0}, "the monitor does what it can"
    assert fleet.fates[STANDARD, RejectionReason.DEADLINE_INFEASIBLE] > 5000
    refused = sum(
        count for (tier, why), count in fleet.fates.items() if tier == BACKGROUND and why is not None
    )
    assert refused == 0
    assert fleet.fates[BACKGROUND, None] == 210


def test_background_that_makes_premium_late_is_shed_to_its_share_within_a_minute():
    """What has come first is served first: premium waits behind twice the fleet of background."""
    fleet = SteeredFleet(in_order=True)
    fleet.run(120, **CALM)
    assert fleet.steps == []
    fleet.run(80, **CALM, **{BACKGROUND: Stream(20, 0.1)})
    began_s, steps = fleet.late_s[PREMIUM][0], fleet.steps
    raised = [(at_s, shed[BACKGROUND]) for at_s, shed, _ in steps[:4]]
    assert raised == [(steps[0][0] + 10 * number, 0.25 * (number + 1)) for number in range(4)]
    assert steps[0][0] < began_s + 6
    assert max(fleet.late_s[PREMIUM]) < began_s + 50, "and is in time while that holds"


def test_failures_of_engines_shed_nobody_and_bring_back_what_a_burst_had_shed():
    """A twenty-fifth of premium fails, four times what its target allows; nothing waits for anything."""
    fleet, failing = SteeredFleet(in_order=True), {PREMIUM: Stream(5, 0.01, fails=0.04)}
    fleet.run(100, **CALM, **{BACKGROUND: Stream(20, 0.1)})
    assert fleet.steps[-1][1][BACKGROUND] == 1.0
    fleet.run(500, **failing, **{BACKGROUND: Stream(2, 0.2)})
    steps = len(fleet.steps)
    fleet.fates.clear()
    fleet.run(600, **failing, **{BACKGROUND: Stream(2, 0.2)})
    assert (fleet.steps[-1][1:], len(fleet.steps)) == (({}, 0.0), steps)
    assert {why for _, why in fleet.fates} == {None}
    assert fleet.monitor.state(1201.0).tiers[PREMIUM].burn.long.rate > 2, "people see them"


def test_what_is_shed_does_not_keep_the_fleet_loaded():
    """Of premium a twenty-fifth is late whatever waits; most of background is let in all the same."""
    fleet = SteeredFleet(in_order=True, slow=0.04)
    fleet.run(1800, **CALM, **{BACKGROUND: Stream(2, 0.2)})
    asked = sum(count for (tier, _), count in fleet.fates.items() if tier == BACKGROUND)
    assert 0.6 < fleet.fates[BACKGROUND, None] / asked < 0.9, "its share is three eighths of that"
    assert not any(shed.get(STANDARD) for _, shed, _ in fleet.steps), "and nobody else is shed"


@pytest.mark.parametrize("slow", [0.0, 0.04])
@pytest.mark.parametrize("per_s", [4, 20])
def test_no_level_falls_sooner_than_it_may_after_any_change(per_s, slow):
    """Background asks for much, and makes premium late whenever more of it is let in."""
    fleet = SteeredFleet(in_order=True, slow=slow)
    fleet.run(1200, **CALM, **{BACKGROUND: Stream(per_s, 0.1)})
    for (before_s, before, kept), (at_s, after, keeps) in itertools.pairwise(fleet.steps):
        if keeps < kept or any(after.get(tier, 0.0) < level for tier, level in before.items()):
            assert at_s - before_s >= RELAX_EVERY_S
    assert bool(fleet.steps) == (per_s == 20 or slow > 0)


def test_in_an_overload_that_lasts_the_top_tier_keeps_its_target_though_more_is_tried():
    """What has come first is served first: each level that is too low costs premium."""
    fleet = SteeredFleet(in_order=True)
    overload = CALM | {BACKGROUND: Stream(20, 0.1)}
    fleet.run(600, **overload)
    steps = len(fleet.steps)
    fleet.run(1200, **overload)
    late = sum(at_s > 600 for at_s in fleet.late_s[PREMIUM])
    assert late <= 0.01 * 5 * 1200
    lowered = [
        shed.get(BACKGROUND, 0.0) < before.get(BACKGROUND, 0.0)
        for (_, before, _), (_, shed, _) in itertools.pairwise(fleet.steps[steps - 1 :])
    ]
    assert 1 <= sum(lowered) <= 5, "it is tried, and not each half minute"


def test_once_an_overload_is_over_what_was_shed_is_back_within_two_minutes():
    fleet = SteeredFleet(in_order=True)
    fleet.run(1800, **CALM, **{BACKGROUND: Stream(20, 0.1)})
    assert fleet.steps[-1][1]
    fleet.run(120, **CALM, **{BACKGROUND: Stream(5, 0.1)})
    assert fleet.steps[-1][1:] == ({}, 0.0)


LONG_ANSWERS = {
    PREMIUM: Stream(10, 0.01, lasts_s=4),
    STANDARD: Stream(3, 0.1, lasts_s=20),
    BACKGROUND: Stream(2, 0.05, lasts_s=60),
}
"""Half of what prefill can do, each tier less than its share of it; 220 answers at a time."""


def test_where_decode_is_short_what_is_above_the_share_of_decode_gives_way_to_premium():
    fleet = SteeredFleet(streams=100)
    fleet.run(110, **LONG_ANSWERS)
    late_s = fleet.late_s[PREMIUM]
    assert len(late_s) > 400
    assert max(late_s) < late_s[0] + 90
    fleet.fates.clear()
    late_s.clear()
    fleet.run(490, **LONG_ANSWERS)
    assert len(late_s) < 0.02 * 10 * 490, "by what is tried"
    assert fleet.fates[PREMIUM, None] == 10 * 490
    for tier in (STANDARD, BACKGROUND):
        assert fleet.fates[tier, RejectionReason.SHED_BY_POLICY] > 0
        took = fleet.fates[tier, None] * LONG_ANSWERS[tier].lasts_s / 490 / 100
        assert took > 0.95 * DEFAULT_TIERS[tier].share


def test_where_decode_is_short_a_tier_within_its_share_of_it_is_not_shed():
    """Standard alone has too many answers; background has a tenth of what decode can do."""
    fleet = SteeredFleet(streams=100)
    fleet.run(400, **LONG_ANSWERS | {BACKGROUND: Stream(0.2, 0.05, lasts_s=50)})
    assert fleet.late_s[PREMIUM]
    assert fleet.steps[-1][1][BACKGROUND] > 0
    assert {why for tier, why in fleet.fates if tier == BACKGROUND} == {None}


def test_where_prefill_is_short_a_tier_within_its_share_of_it_is_not_shed_for_its_answers():
    """Standard makes premium wait for prefill; background has a third of decode, which is at ease."""
    fleet = SteeredFleet(in_order=True, streams=100)
    floods = {STANDARD: Stream(20, 0.1, lasts_s=0.5), BACKGROUND: Stream(0.5, 0.1, lasts_s=60)}
    fleet.run(400, **CALM, **floods)
    assert max(shed[BACKGROUND] for _, shed, _ in fleet.steps) == 1.0
    assert fleet.fates[STANDARD, RejectionReason.SHED_BY_POLICY] > 0
    assert {why for tier, why in fleet.fates if tier == BACKGROUND} == {None}


def test_in_an_overload_of_decode_that_lasts_less_is_tried_seldom():
    fleet = SteeredFleet(streams=100)
    fleet.run(600, **LONG_ANSWERS)
    steps = len(fleet.steps)
    fleet.run(1200, **LONG_ANSWERS)
    tried = [at_s for at_s, *_ in fleet.steps[steps:]]
    assert 1 <= len(tried) <= 12
    late = sum(at_s > 600 for at_s in fleet.late_s[PREMIUM])
    assert late <= 0.02 * 10 * 1200


@pytest.mark.parametrize("ends", ["more replicas", "fewer requests"])
def test_once_an_overload_of_decode_is_over_what_was_shed_is_back_within_minutes(ends):
    """Seven steps of half a minute; prefill has as much to do as before where the replicas come."""
    fleet = SteeredFleet(streams=100)
    fleet.run(1800, **LONG_ANSWERS)
    assert fleet.steps[-1][1][BACKGROUND] == 1.0
    left = LONG_ANSWERS
    if ends == "more replicas":
        fleet.decode_replicas = 4
    else:
        left = {tier: Stream(it.per_s / 4, it.work_s, lasts_s=it.lasts_s) for tier, it in left.items()}
    fleet.run(300, **left)
    assert fleet.steps[-1][1:] == ({}, 0.0)
