"""What is to come of an answer: the mean of what was to come of those that got longer."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.decode.output_length import FIRST_GUESS, REMEMBERED, OutputLengths
from slo.tiers import BACKGROUND, PREMIUM

LENGTHS = st.lists(st.integers(1, 5000), min_size=20, max_size=200)
PLENTY = 10**6


def known(lengths, tier=PREMIUM, tenant="a"):
    learned = OutputLengths()
    for length in lengths:
        learned.ended(tier, tenant, length)
    learned.factor = 1.0
    return learned


@given(LENGTHS, st.integers(0, 6000))
def test_the_mean_of_what_the_longer_ones_had_to_come(lengths, emitted):
    longer = [length - emitted for length in lengths if length > emitted]
    expected = math.ceil(sum(longer) / len(longer)) if longer else max(FIRST_GUESS, emitted)
    found = known(lengths).remaining(PREMIUM, "a", emitted, PLENTY)
    assert found == pytest.approx(expected, abs=1)


@given(LENGTHS, st.integers(0, 6000), st.integers(0, 6000))
def test_never_more_than_may_come(lengths, emitted, most):
    assert 0 <= known(lengths).remaining(PREMIUM, "a", emitted, most) <= most


def test_only_the_latest_count():
    learned = known([10] * 50 + [500] * REMEMBERED)
    assert learned.remaining(PREMIUM, "a", 0, PLENTY) == 500


def test_a_tenant_with_few_answers_is_taken_for_one_of_its_tier():
    learned = known([100] * 40)
    learned.ended(PREMIUM, "b", 900)
    learned.factor = 1.0
    assert learned.remaining(PREMIUM, "b", 0, PLENTY) == pytest.approx((40 * 100 + 900) / 41, abs=1)
    assert learned.remaining(BACKGROUND, "a", 0, PLENTY) == FIRST_GUESS, "tiers are apart"


def test_memory_is_kept_for_a_part_of_it():
    learned = OutputLengths()
    for _ in range(40):
        learned.ended(PREMIUM, "a", 100)
    assert learned.remaining(PREMIUM, "a", 0, PLENTY) == 10
    assert learned.expected(PREMIUM, "a", 0, PLENTY) == 100
    assert learned.whole(PREMIUM, "a", PLENTY) == 100, "where no memory is at stake, nothing is corrected"


def test_tenants_without_end_take_no_memory_without_end():
    learned = OutputLengths()
    for number in range(3000):
        learned.ended(PREMIUM, f"tenant {number}", 7)
    assert len(learned._tenants) <= 1024
