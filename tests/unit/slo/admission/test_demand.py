"""The account of arriving work, and its fair division."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.admission.demand import RecentDemand, divide
from slo.tiers import PREMIUM, STANDARD


def test_a_steady_stream_is_seen_as_what_it_is():
    demand = RecentDemand(memory_s=20.0)
    for tenth in range(4000):
        demand.arrived(PREMIUM, "a", 0.05, tenth / 10)
        demand.arrived(STANDARD, "b", 0.02, tenth / 10)
    seen = demand.by_tenant(400.0)
    assert seen[PREMIUM]["a"] == pytest.approx(0.5, rel=0.01)
    assert seen[STANDARD]["b"] == pytest.approx(0.2, rel=0.01)


@given(st.floats(0.1, 500))
def test_what_arrived_is_forgotten_at_one_rate(pause_s):
    demand = RecentDemand(memory_s=10.0)
    demand.arrived(PREMIUM, "a", 1.0, 5.0)
    assert demand.by_tenant(5.0 + pause_s)[PREMIUM]["a"] == pytest.approx(0.1 * math.exp(-pause_s / 10))


def test_the_account_goes_on_for_ever():
    demand = RecentDemand(memory_s=1.0)
    demand.arrived(PREMIUM, "gone", 1.0, 0.0)
    for second in range(1, 2000):
        demand.arrived(PREMIUM, "here", 1.0, float(second))
    seen = demand.by_tenant(1999.0)[PREMIUM]
    assert seen["here"] == pytest.approx(1 / (1 - math.exp(-1)), rel=1e-6)
    assert "gone" not in seen


def test_what_arrived_long_before_a_long_silence_is_forgotten():
    demand = RecentDemand(memory_s=20.0)
    demand.arrived(PREMIUM, "a", 1.0, 0.0)
    assert demand.by_tenant(1e6)[PREMIUM]["a"] == 0.0
    demand.withdrawn(PREMIUM, "a", 1.0, 0.0)
    demand.arrived(PREMIUM, "a", 1.0, 1e6)
    demand.withdrawn(PREMIUM, "a", 1.0, 0.0)
    assert demand.by_tenant(1e6)[PREMIUM]["a"] == pytest.approx(0.05)


KEYS = "abcdef"
DEMANDS = st.dictionaries(st.sampled_from(KEYS), st.floats(0, 10), min_size=1)
WEIGHTS = st.fixed_dictionaries({key: st.floats(0.01, 5) for key in KEYS})


@given(st.floats(0, 10), DEMANDS, WEIGHTS)
def test_a_fair_division(capacity, demands, weights):
    parts = divide(capacity, demands, weights)
    total = sum(weights[key] for key in demands)
    assert parts.keys() == demands.keys()
    assert sum(parts.values()) <= capacity + 1e-9
    for key, part in parts.items():
        assert part <= demands[key]
        assert part >= min(demands[key], capacity * weights[key] / total) - 1e-9
    if sum(demands.values()) <= capacity:
        assert parts == pytest.approx(demands)
    else:
        assert sum(parts.values()) == pytest.approx(capacity)
    short = [parts[key] / weights[key] for key in parts if parts[key] < demands[key] - 1e-9]
    assert not short or max(short) == pytest.approx(min(short))


@given(
    works_s=st.lists(st.floats(1e-4, 100.0), min_size=1, max_size=60),
    fraction=st.floats(0.0, 0.8),
    later_s=st.floats(0.0, 4000.0),
)
def test_as_much_is_refused_as_is_wanted_in_proportion_to_the_work(works_s, fraction, later_s):
    demand = RecentDemand(memory_s=20.0)
    for work_s in works_s:
        demand.arrived(PREMIUM, "a", work_s, 0.0)
    demand.arrived(PREMIUM, "another", 50.0, later_s)
    chances = [demand.chance(PREMIUM, "a", work_s, fraction, 0.8) for work_s in works_s]
    assert all(0.0 <= chance <= 0.8 for chance in chances)
    if later_s > 200:  # it is forgotten, and nobody asks who is not there
        return
    lost_s = math.fsum(chance * work_s for chance, work_s in zip(chances, works_s, strict=True))
    # Of those of one size, of which the longest is up to twice the shortest, a few may be at the limit.
    assert lost_s == pytest.approx(fraction * math.fsum(works_s), rel=0.35)
    below = [chance / work_s for chance, work_s in zip(chances, works_s, strict=True) if chance < 0.8]
    assert below == pytest.approx([below[0]] * len(below)) if below else True


def test_requests_of_one_size_are_refused_alike_and_one_without_work_never():
    demand = RecentDemand()
    for number in range(100):
        demand.arrived(PREMIUM, "a", 0.1, 0.1 * number)
    demand.arrived(PREMIUM, "a", 0.0, 10.0)
    assert demand.chance(PREMIUM, "a", 0.1, 0.3, 0.8) == pytest.approx(0.3)
    assert demand.chance(PREMIUM, "a", 0.0, 0.3, 0.8) == 0.0
    assert demand.chance(PREMIUM, "a", 0.1, 0.0, 0.8) == 0.0
    assert RecentDemand().chance(PREMIUM, "a", 0.0, 0.3, 0.8) == 0.0, "nor when nobody has asked for anything"


def test_one_giant_is_not_refused_in_place_of_everybody():
    """It is refused as far as may be, and the others lose the rest."""
    demand = RecentDemand()
    demand.arrived(PREMIUM, "a", 100.0, 0.0)
    for _ in range(1000):
        demand.arrived(PREMIUM, "a", 0.1, 0.0)
    assert demand.chance(PREMIUM, "a", 100.0, 0.6, 0.8) == 0.8
    assert demand.chance(PREMIUM, "a", 0.1, 0.6, 0.8) == pytest.approx(0.4)


def test_what_was_withdrawn_counts_for_no_size():
    demand = RecentDemand()
    demand.arrived(PREMIUM, "a", 0.1, 0.0)
    demand.arrived(PREMIUM, "a", 100.0, 1.0)
    demand.withdrawn(PREMIUM, "a", 100.0, 1.0)
    assert demand.chance(PREMIUM, "a", 0.1, 0.5, 0.8) == pytest.approx(0.5)


@pytest.mark.parametrize("fraction", [0.8, math.nextafter(0.8, 0.0)], ids=["all that may be", "nearly"])
def test_a_flood_is_refused_as_far_as_may_be_whatever_little_came_long_before_it(fraction):
    """The earlier request has less work than what rounding takes from that of the flood."""
    for number in range(100):
        demand, work_s = RecentDemand(memory_s=20.0), 1.0 + number / 128
        demand.arrived(PREMIUM, "a", 0.01, 0.0)
        for tenth in range(50):
            demand.arrived(PREMIUM, "a", work_s, 900.0 + tenth / 10)
        assert demand.chance(PREMIUM, "a", work_s, fraction, 0.8) == pytest.approx(0.8)
