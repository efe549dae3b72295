"""The effective tier: waiting raises it, within limits, and it is worth what lies between the tiers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from own_tiers import FILE, FOUR, IMAGE, ONE, SEVEN, TEXT

from slo.queue.ageing import Ageing, weight_at
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD, SYSTEM

WEIGHTS = DEFAULT_TIERS.weights
BELOW_PREMIUM = 1.5
AGEING = Ageing()
TIERS = st.sampled_from(DEFAULT_TIERS.names)
WAITED = st.floats(0, 1e5)
DEFICIT = st.floats(0, 1)


@pytest.mark.parametrize(
    ("tier", "waited_s", "deficit", "level"),
    [
        (BACKGROUND, 0.0, 0.0, 0.0),
        (BACKGROUND, 10.0, 0.0, 0.5),
        (BACKGROUND, 10.0, 0.1, 0.7),
        (BACKGROUND, 29.0, 0.0, 1.45),
        (BACKGROUND, 100.0, 0.15, 1.5),
        (STANDARD, 4.0, 0.0, 1.2),
        (STANDARD, 100.0, 0.0, BELOW_PREMIUM),
        (PREMIUM, 10.0, 0.0, 2.5),
        (PREMIUM, 100.0, 0.0, 3.5),
        (BACKGROUND, -3.0, 0.0, 0.0),
    ],
)
def test_the_effective_tier_rises_with_waiting_and_deficit(tier, waited_s, deficit, level):
    assert AGEING.effective_tier(DEFAULT_TIERS, tier, waited_s, deficit) == pytest.approx(level)


def test_background_passes_standard_that_comes_after_it_in_time():
    waited_s = 21.0
    assert AGEING.effective_tier(DEFAULT_TIERS, BACKGROUND, waited_s) > AGEING.effective_tier(
        DEFAULT_TIERS, STANDARD, 0.0
    )


@given(st.sampled_from([BACKGROUND, STANDARD]), WAITED, DEFICIT, st.floats(0.05, 0.1), st.floats(0, 9))
def test_premium_is_never_passed(tier, waited_s, deficit, per_s, most):
    ageing = Ageing(per_s, most)
    level = ageing.effective_tier(DEFAULT_TIERS, tier, waited_s, deficit)
    assert level < ageing.effective_tier(DEFAULT_TIERS, PREMIUM, 0.0)
    assert weight_at(level, DEFAULT_TIERS) < WEIGHTS[PREMIUM]


@given(TIERS, WAITED, WAITED, DEFICIT)
def test_who_waits_longer_never_counts_for_less(tier, one_s, other_s, deficit):
    levels = [
        AGEING.effective_tier(DEFAULT_TIERS, tier, waited_s, deficit) for waited_s in sorted((one_s, other_s))
    ]
    assert levels == sorted(levels)
    worths = [weight_at(level, DEFAULT_TIERS) for level in levels]
    assert worths == sorted(worths)


@pytest.mark.parametrize(
    ("level", "value"), [(0.0, 1.0), (0.5, 2**0.5), (1.0, 2.0), (1.5, 8**0.5), (2.0, 4.0), (3.5, 4.0)]
)
def test_the_worth_lies_geometrically_between_the_tiers(level, value):
    assert weight_at(level, DEFAULT_TIERS) == pytest.approx(value)


# Tiers of one's own

SETS = st.sampled_from([FOUR, SEVEN])


@pytest.mark.parametrize(
    ("tiers", "tier", "waited_s", "level"),
    [
        (FOUR, FILE, 20.0, 1.0),
        (FOUR, FILE, 100.0, 1.5),
        (FOUR, IMAGE, 100.0, 2.5),
        (FOUR, TEXT, 20.0, 4.0),
        (SEVEN, "class-7", 100.0, 1.5),
        (SEVEN, "class-2", 100.0, 5.5),
        (ONE, TEXT, 20.0, 1.0),
    ],
)
def test_the_effective_tier_is_a_rank_of_the_set_and_a_rise(tiers, tier, waited_s, level):
    assert AGEING.effective_tier(tiers, tier, waited_s) == pytest.approx(level)


@given(SETS, st.integers(1, 6), WAITED, DEFICIT, st.floats(0.05, 0.1), st.floats(0, 9))
def test_the_top_tier_is_never_passed(tiers, number, waited_s, deficit, per_s, most):
    ageing, tier = Ageing(per_s, most), tiers.names[1 + number % tiers.top_rank]
    level = ageing.effective_tier(tiers, tier, waited_s, deficit)
    assert level < ageing.effective_tier(tiers, tiers.top, 0.0)
    assert weight_at(level, tiers) < tiers[tiers.top].weight


@given(SETS, st.floats(0, 9))
def test_a_rank_has_the_weight_of_its_tier_and_what_lies_between_a_weight_between(tiers, level):
    for tier in tiers.names:
        assert weight_at(float(tiers.rank(tier)), tiers) == pytest.approx(tiers[tier].weight)
    assert weight_at(level, tiers) == pytest.approx(2.0 ** min(level, tiers.top_rank))


def test_a_set_of_one_tier_has_one_weight():
    assert {weight_at(AGEING.effective_tier(ONE, TEXT, waited_s), ONE) for waited_s in (0, 9, 99)} == {1.0}
    assert weight_at(AGEING.effective_tier(ONE, SYSTEM, 9.0), ONE) == 1.0
