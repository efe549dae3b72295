"""The effective tier: waiting raises it, within limits, and it is worth what lies between the tiers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.queue.ageing import BELOW_PREMIUM, Ageing, weight_of
from slo.tiers import BACKGROUND, CLIENT_TIERS, DEFAULT_TIER_POLICIES, PREMIUM, STANDARD

WEIGHTS = {tier: policy.weight for tier, policy in DEFAULT_TIER_POLICIES.items()}
AGEING = Ageing()
TIERS = st.sampled_from(CLIENT_TIERS)
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
    assert AGEING.effective_tier(tier, waited_s, deficit) == pytest.approx(level)


def test_background_passes_standard_that_comes_after_it_in_time():
    waited_s = 21.0
    assert AGEING.effective_tier(BACKGROUND, waited_s) > AGEING.effective_tier(STANDARD, 0.0)


@given(st.sampled_from([BACKGROUND, STANDARD]), WAITED, DEFICIT, st.floats(0.05, 0.1), st.floats(0, 9))
def test_premium_is_never_passed(tier, waited_s, deficit, per_s, most):
    ageing = Ageing(per_s, most)
    level = ageing.effective_tier(tier, waited_s, deficit)
    assert level < ageing.effective_tier(PREMIUM, 0.0)
    assert weight_of(level, WEIGHTS) < WEIGHTS[PREMIUM]


@given(TIERS, WAITED, WAITED, DEFICIT)
def test_who_waits_longer_never_counts_for_less(tier, one_s, other_s, deficit):
    levels = [AGEING.effective_tier(tier, waited_s, deficit) for waited_s in sorted((one_s, other_s))]
    assert levels == sorted(levels)
    worths = [weight_of(level, WEIGHTS) for level in levels]
    assert worths == sorted(worths)


@pytest.mark.parametrize(
    ("level", "value"), [(0.0, 1.0), (0.5, 2**0.5), (1.0, 2.0), (1.5, 8**0.5), (2.0, 4.0), (3.5, 4.0)]
)
def test_the_worth_lies_geometrically_between_the_tiers(level, value):
    assert weight_of(level, WEIGHTS) == pytest.approx(value)
