"""Who may be ended for good: only what was promised nothing, and only at its limits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.decode.drop import droppable_tiers, may_be_dropped, overdue
from slo.decode.restore import Parked
from slo.request import JobId, RequestContext
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD, TierPolicy, TierSet

PROMISES = {"ttft_s": 1.0, "ttft_scale": 2.0, "tpot_s": 0.1, "e2e_s": 9.0}
NOW_S, AFTER_S = 1000.0, 300.0


def tiers(lowest, **top):
    """A top tier, and one below it."""
    nothing = TierPolicy(None, None, sheddable=True, weight=2.0)
    return TierSet({PREMIUM: replace(nothing, **top), BACKGROUND: lowest}, default=PREMIUM)


def lowest(**given):
    return replace(TierPolicy(None, None, sheddable=True, weight=1.0), **given)


def test_of_the_default_tiers_the_background_may_be_dropped():
    assert droppable_tiers(DEFAULT_TIERS) == {BACKGROUND}


@pytest.mark.parametrize("promised", PROMISES)
def test_a_tier_with_any_objective_may_not(promised):
    assert droppable_tiers(tiers(lowest())) == {BACKGROUND}
    assert droppable_tiers(tiers(lowest(**{promised: PROMISES[promised]}))) == set()


def test_nor_may_one_that_may_not_be_shed_or_the_top_tier():
    assert droppable_tiers(tiers(lowest(sheddable=False))) == set()
    alone = TierSet({BACKGROUND: lowest()}, default=BACKGROUND)
    assert droppable_tiers(alone) == set()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, True),
        ({"tier": STANDARD}, False),
        ({"ttft_budget_s": 3.0}, False),
        ({"ttft_budget_s": -3.0}, False),
        ({"tpot_s": 0.1}, False),
    ],
    ids=str,
)
def test_a_request_with_an_objective_of_its_own_may_not(given, expected):
    context = RequestContext(JobId("j"), "r", **{"tier": BACKGROUND, "ttft_budget_s": None, **given})
    assert may_be_dropped(context, frozenset({BACKGROUND})) is expected
    assert not may_be_dropped(context, frozenset())


def parked(**given):
    values = {"request_id": "a", "tier": BACKGROUND, "since_s": NOW_S - AFTER_S - 1, "is_newcomer": False}
    return Parked(**{**values, "may_drop": True, **given})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, True),
        ({"may_drop": False}, False),
        ({"is_newcomer": True}, False),
        ({"since_s": NOW_S - AFTER_S}, False),
        ({"since_s": NOW_S}, False),
        ({"preemptions": 5}, True),
    ],
    ids=str,
)
def test_who_has_waited_for_its_memory_for_longer_than_the_limit_is_overdue(given, expected):
    one = parked(**given)
    assert overdue([one], AFTER_S, NOW_S) == ([one] if expected else [])


@given(
    st.lists(
        st.builds(
            parked,
            request_id=st.uuids().map(str),
            since_s=st.floats(0, NOW_S),
            is_newcomer=st.booleans(),
            may_drop=st.booleans(),
        ),
        max_size=10,
    ),
    st.floats(1, NOW_S),
)
def test_a_longer_limit_drops_no_others(waiting, after_s):
    found = overdue(waiting, after_s, NOW_S)
    assert set(found) <= {one for one in waiting if one.may_drop and not one.is_newcomer}
    assert set(overdue(waiting, 2 * after_s, NOW_S)) <= set(found)
    assert overdue(waiting, NOW_S, NOW_S) == [], "nobody has waited since before the beginning"
