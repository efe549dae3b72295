"""When a tier of replicas grows and shrinks."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.autoscaling.need import (
    DecodeDemand,
    FleetDemand,
    FleetLoad,
    Need,
    PrefillDemand,
    ScaleReason,
    decode_need,
    prefill_need,
)
from slo.autoscaling.scaler import Scaler, ScalingRules

RULES = ScalingRules(1, 8, start_s=60.0, keep_s=300.0, busy=0.8)


class Tier:
    """Replicas that are up as soon as they are ordered, unless `running` says otherwise."""

    def __init__(self, replicas=1, rules=RULES):
        self.scaler = Scaler(rules)
        self.target = replicas
        self.now_s = 0.0

    def see(self, work=None, backlog_s=0.0, *, at_risk=False, running=None, for_s=1.0):
        """Decide once a second for a while; the last decision."""
        until_s = self.now_s + for_s
        while self.now_s < until_s:
            up = self.target if running is None else running
            seen = PrefillDemand(work or 0.0, backlog_s, at_risk)
            start_s = self.scaler.rules.start_s
            need = None if work is None else partial(prefill_need, seen, up, start_s=start_s)
            scaled = self.scaler.decide(need, up, self.target, self.now_s)
            self.target = scaled.target
            self.now_s += 1.0
        return scaled


def test_it_grows_at_once_to_what_arrives_with_room():
    assert Tier(1).see(work=0.89).target == 1
    scaled = Tier(1).see(work=0.95)
    assert (scaled.target, scaled.reason) == (2, ScaleReason.DEMAND)
    assert Tier(3).see(work=2.0).reason is ScaleReason.NOTHING_TO_DO


def test_what_waits_and_will_wait_until_a_replica_is_up_makes_it_grow_further():
    scaled = Tier(2).see(work=1.0, backlog_s=90.0)
    assert (scaled.target, scaled.reason) == (3, ScaleReason.BACKLOG)
    assert Tier(1).see(work=3.0).target == 5  # 3, and 2 for what waits after 60 s


def test_a_little_too_much_for_minutes_makes_it_grow_by_one():
    rules = ScalingRules(1, 8, start_s=60.0, keep_s=300.0, busy=1.0)
    tier = Tier(4, rules)
    assert tier.see(work=4.2, for_s=300).target == 4
    scaled = tier.see(work=4.2)
    assert (scaled.target, scaled.reason) == (5, ScaleReason.DEMAND)
    assert tier.see(work=4.2, for_s=3000).target == 5


def test_a_wave_that_others_make_up_for_does_not():
    tier = Tier(4, ScalingRules(1, 8, start_s=60.0, keep_s=300.0, busy=1.0))
    for _ in range(20):
        tier.see(work=4.2, for_s=60)
        tier.see(work=3.6, for_s=60)
    assert tier.target == 4


def test_a_short_queue_is_no_reason_to_grow():
    assert Tier(1).see(work=0.89, backlog_s=10.0, for_s=60).target == 1  # 1.06 until that is worked off
    assert Tier(1).see(work=0.89, backlog_s=16.0).reason is ScaleReason.BACKLOG


def test_what_is_starting_is_not_ordered_again():
    tier = Tier(1)
    assert tier.see(work=3.0, running=1).target == 5
    assert tier.see(work=3.0, backlog_s=100.0, running=1, for_s=10).target <= 7


def test_it_shrinks_once_fewer_have_sufficed_for_a_while():
    tier = Tier(5)
    assert tier.see(work=0.5, for_s=300).target == 5
    scaled = tier.see(work=0.5)
    assert (scaled.target, scaled.reason) == (1, ScaleReason.FEWER_SUFFICE)


def test_it_keeps_what_a_wave_within_that_time_needed():
    tier = Tier(5)
    for _ in range(4):
        tier.see(work=3.0, for_s=50)
        tier.see(work=0.5, for_s=200)
    assert tier.target == 4, "the average of a minute in which most was needed"


SLOW = ScalingRules(1, 8, start_s=600.0, keep_s=300.0, busy=0.8)
"""Replicas take longer to start than they are kept."""


def test_what_is_starting_is_kept_until_it_serves():
    """Load in waves would otherwise order replicas for ever of which none serves."""
    tier = Tier(1, SLOW)
    ordered = tier.see(work=3.0, running=1).target
    assert ordered == 5
    assert tier.see(work=0.5, running=1, for_s=10 * SLOW.start_s - 1).target == ordered
    assert tier.see(work=0.5, running=1, for_s=2).target == 1, "none has come for long, and none is needed"


def test_what_a_tier_starts_with_is_kept_until_it_serves():
    tier = Tier(4, SLOW)
    assert tier.see(work=0.0, running=0, for_s=10 * SLOW.start_s).target == 4
    assert tier.see(work=0.0, running=0).target == 1


def test_while_replicas_are_replaced_it_does_not_shrink():
    """Serve would stop one more of the former version, the last one that serves among them."""
    tier = Tier(2, ScalingRules(1, 3, start_s=40.0, keep_s=60.0))
    assert tier.see(work=0.08, for_s=10).target == 2
    assert tier.see(work=0.08, running=1, for_s=200).target == 2, "one is gone, and its successor starts"
    assert tier.see(work=0.08, running=2, for_s=60).target == 1


def test_what_has_started_is_kept_no_longer_than_other_replicas():
    tier = Tier(1, SLOW)
    assert tier.see(work=3.0, running=1).target == 5
    assert tier.see(work=0.5, running=5, for_s=SLOW.keep_s - 1).target == 5
    assert tier.see(work=0.5, running=5, for_s=2).target < 5


def test_between_the_two_levels_it_stays():
    for work in (1.35, 1.25):
        assert Tier(2).see(work=work, for_s=1000).target == 2


def test_a_tier_at_risk_gets_one_more_at_a_time_and_loses_none():
    tier = Tier(3)
    scaled = tier.see(work=1.5, at_risk=True)
    assert (scaled.target, scaled.reason) == (4, ScaleReason.AT_RISK)
    assert tier.see(work=1.5, at_risk=True, running=3, for_s=60).target == 4
    assert Tier(8).see(work=3.0, at_risk=True, for_s=400).target == 8
    assert Tier(8).see(work=3.0, for_s=400).target == 4


def test_a_tier_at_risk_shrinks_where_nobody_queues():
    """Objectives that no fleet keeps would hold it at the size of its busiest hour."""
    tier = Tier(3)
    assert tier.see(work=0.2, at_risk=True, for_s=300).target == 3
    assert tier.see(work=0.2, at_risk=True, for_s=100).target == 1


def test_a_replica_that_is_being_replaced_is_waited_for():
    """One of four has crashed, and Serve starts another: what is at risk meanwhile orders no fifth."""
    tier = Tier(4)
    tier.see(work=2.0, for_s=100)
    waiting = tier.see(work=2.0, at_risk=True, running=3, for_s=RULES.start_s)
    assert (waiting.target, waiting.reason) == (4, ScaleReason.NOTHING_TO_DO)
    scaled = tier.see(work=2.0, at_risk=True, running=4)
    assert (scaled.target, scaled.reason) == (5, ScaleReason.AT_RISK), "four were not enough"


def test_where_none_starts_no_more_are_ordered_and_somebody_is_told():
    tier = Tier(3)
    assert tier.see(work=1.5, at_risk=True).target == 4
    waiting = tier.see(work=1.5, at_risk=True, running=3, for_s=2 * RULES.start_s)
    assert (waiting.target, waiting.is_overdue) == (4, False)
    waiting = tier.see(work=1.5, at_risk=True, running=3, for_s=600)
    assert (waiting.target, waiting.is_overdue) == (4, True)
    assert not tier.see(work=1.5, running=4).is_overdue
    assert not tier.see(work=1.5, running=2).is_overdue, "that has only begun"


def test_replicas_that_come_up_one_after_the_other_are_not_overdue():
    """As while Serve replaces all replicas of a tier."""
    tier = Tier(8)
    for up in (6, 7, 6, 7, 6, 7, 6, 7):
        assert not tier.see(work=3.0, running=up, for_s=RULES.start_s).is_overdue


def test_without_knowledge_nothing_changes_and_the_wait_begins_anew():
    tier = Tier(5)
    tier.see(work=0.5, for_s=250)
    assert tier.see(work=None).reason is ScaleReason.UNKNOWN
    assert tier.see(work=0.5, for_s=250).target == 5
    assert tier.see(work=0.5, for_s=100).target == 1


@given(st.lists(st.floats(0, 20), min_size=1, max_size=60), st.integers(1, 8))
def test_it_keeps_to_its_bounds(works, replicas):
    tier = Tier(replicas)
    for work in works:
        assert 1 <= tier.see(work=work, for_s=20).target <= 8


def test_bounds_that_change_hold_from_then_on():
    tier = Tier(2)
    tier.scaler.bounds = 1, 2
    scaled = tier.see(work=3.0, for_s=100)
    assert (scaled.target, scaled.reason) == (2, ScaleReason.NOTHING_TO_DO)
    tier.scaler.bounds = 1, 8
    assert tier.see(work=3.0).target == 4
    tier.scaler.bounds = 1, 3
    assert tier.see(work=3.0).target == tier.see(work=None).target == 3


def test_bounds_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="1 <= 3 <= 2"):
        ScalingRules(3, 2)
    with pytest.raises(ValueError, match=r"0 < 1\.1 <= 1"):
        ScalingRules(1, 2, busy=1.1)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (DecodeDemand(1.5, 40), Need(1.5, 0.0, ScaleReason.MEMORY, ScaleReason.MEMORY)),
        (
            DecodeDemand(1.5, 40, asked=9.0, refused=0.5),
            Need(2.0, 0.0, ScaleReason.MEMORY, ScaleReason.MEMORY),
        ),
        (DecodeDemand(0.4, 100, pace=1.0), Need(1.2, 0.0, ScaleReason.PACE, ScaleReason.PACE)),
        (
            DecodeDemand(0.4, 100, pace=1.0, refused=1.0),
            Need(2.4, 0.0, ScaleReason.PACE, ScaleReason.PACE),
        ),
        (DecodeDemand(0.0, 4, pace=0.1), Need(0.2, 0.0, ScaleReason.PACE, ScaleReason.PACE)),
    ],
)
def test_decode_needs_what_its_memory_and_its_pace_need(seen, expected):
    assert decode_need(seen) == expected


def fleet(work=0.1, backlog_s=0.0, memory=0.1, pace=0.1, *, capacity=2.0, replicas=2):
    prefill = PrefillDemand(work, backlog_s, capacity=capacity)
    return FleetDemand(prefill, DecodeDemand(memory, 3, pace, replicas)).load


def test_a_fleet_is_loaded_when_requests_may_wait_for_each_other():
    assert fleet() is FleetLoad.IDLE
    assert fleet(work=0.69) is FleetLoad.IDLE
    for loaded in ({"work": 0.71}, {"memory": 1.1}, {"pace": 1.1}, {"backlog_s": 11.0}):
        assert fleet(**loaded) is FleetLoad.LOADED
    assert fleet(memory=0.9) is FleetLoad.UNKNOWN, "what is shed must not look idle at once"
    assert fleet(capacity=0.0) is fleet(replicas=0) is FleetLoad.UNKNOWN
