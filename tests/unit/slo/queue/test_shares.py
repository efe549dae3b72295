"""The account of what was served, and how often a class may lead."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.queue.shares import ShareAccount
from slo.tiers import BACKGROUND, PREMIUM, STANDARD, SYSTEM

SHARES = {PREMIUM: 0.5, STANDARD: 0.35, BACKGROUND: 0.15}


def account(memory_s=60.0):
    return ShareAccount(SHARES, memory_s)


def test_before_anything_was_served_everybody_lacks_their_share():
    fresh = account()
    assert {tier: fresh.state().deficit(tier) for tier in SHARES} == SHARES
    assert fresh.state().deficit(SYSTEM) == 0.0


def test_what_was_served_counts_by_time():
    served = account()
    served.served(PREMIUM, 3.0, 3.0)
    served.served(BACKGROUND, 1.0, 3.0)
    assert served.achieved(PREMIUM) == pytest.approx(0.75)
    assert served.state().deficit(PREMIUM) == 0.0
    assert served.state().deficit(BACKGROUND) == 0.0
    assert served.state().deficit(STANDARD) == pytest.approx(0.35)


def test_what_was_served_long_ago_counts_less():
    served = account(memory_s=10.0)
    served.served(BACKGROUND, 1.0, 0.0)
    served.served(PREMIUM, 1.0, 20.0)
    assert served.achieved(BACKGROUND) == pytest.approx(math.exp(-2) / (1 + math.exp(-2)))


def test_what_came_to_nothing_was_not_served():
    """At its worth by then: what is lost is what was filed."""
    served = account(memory_s=10.0)
    served.served(PREMIUM, 1.0, 0.0)
    served.served(BACKGROUND, 1.0, 0.0)
    served.served(BACKGROUND, 1.0, 20.0)
    served.lost(BACKGROUND, 1.0, 20.0)
    assert served.achieved(BACKGROUND) == pytest.approx(0.5)
    served.lost(BACKGROUND, 1.0, 0.0)
    assert served.achieved(BACKGROUND) == pytest.approx(0.0, abs=1e-9)
    served.served(PREMIUM, 1.0, 900.0)
    served.lost(BACKGROUND, 1.0, 20.0)
    assert served.state().deficit(BACKGROUND) == SHARES[BACKGROUND], "no less than nothing"


def test_a_class_that_has_led_waits_until_its_share_has_caught_up():
    paced = account()
    paced.served(PREMIUM, 1000.0, 99.0)
    paced.served(BACKGROUND, 1.5, 101.5, lead_s=1.5)
    assert not paced.state().is_paced(BACKGROUND, 109.9)
    assert paced.state().is_paced(BACKGROUND, 110.0)
    assert paced.state().is_paced(STANDARD, 101.5)


@given(st.lists(st.tuples(st.floats(0.01, 9.0), st.floats(0.0, 20.0)), min_size=1, max_size=60))
def test_leads_take_no_more_than_the_share_of_any_span_and_one_prefill(boosts):
    """A class that leads whenever it may, with any prefills and pauses; all spans between two starts."""
    paced, now_s, boosted = account(), 0.0, []
    for work_s, pause_s in boosts:
        now_s = max(now_s + pause_s, paced._next_boost_s.get(BACKGROUND, 0.0))
        boosted.append((now_s, work_s))
        now_s += work_s
        paced.served(BACKGROUND, work_s, now_s, lead_s=work_s)
    share = SHARES[BACKGROUND]
    for first, (since_s, _) in enumerate(boosted):
        taken_s = 0.0
        for at_s, work_s in boosted[first:]:
            assert taken_s <= share * (at_s - since_s) * (1 + 1e-9) + 1e-9
            taken_s += work_s
