"""How much time is expected to be wanted, by its value."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.queue.arrival_forecast import NEAR, SHARE, Forecast

MEMORY_S = 30.0
LAST = 0.0
"""A forecast that is asked for an earlier time says what held at its last arrival."""
ARRIVALS = st.lists(
    st.tuples(st.floats(0, 20), st.floats(1e-6, 100), st.sampled_from([1.0, 2.0, 4.0])), max_size=60
)
"""Time since the last one, work, weight."""
DENSITIES = st.floats(1e-9, 1e9)


def steady(*kinds, seconds=300, memory_s=MEMORY_S):
    """When for `seconds` a request of each kind, (work, weight), has arrived per second."""
    forecast = Forecast(memory_s)
    for at_s in range(seconds):
        for work_s, weight in kinds:
            forecast.arrived(work_s, weight, float(at_s))
    return forecast


def after(arrivals):
    forecast, now_s = Forecast(MEMORY_S), 0.0
    for gap_s, work_s, weight in arrivals:
        now_s += gap_s
        forecast.arrived(work_s, weight, now_s)
    return forecast


def test_nothing_is_expected_before_anything_has_arrived():
    assert Forecast().at(0.0).load == 0.0
    assert Forecast().at(1e9).reserved_for([1.0])[0] == 0.0


@pytest.mark.parametrize("work_s", [0.1, 0.5, 1.0, 3.0])
def test_the_load_is_the_work_that_arrives_per_second(work_s):
    assert steady((work_s, 1.0)).at(LAST).load == pytest.approx(work_s, rel=0.02)


def test_what_arrived_is_forgotten_by_a_factor_of_e_in_the_time_of_the_memory():
    forecast = Forecast(MEMORY_S)
    forecast.arrived(60.0, 1.0, 0.0)
    assert forecast.at(LAST).load == pytest.approx(2.0)
    forecast.arrived(1e-9, 1.0, MEMORY_S)
    assert forecast.at(LAST).load == pytest.approx(2.0 / math.e)
    forecast.arrived(1e-9, 1.0, 20 * MEMORY_S)
    assert forecast.at(LAST).load == pytest.approx(0.0, abs=1e-6)


def test_less_is_expected_the_longer_nobody_has_come():
    forecast = steady((2.0, 4.0))
    loads = [forecast.at(299.0 + silent_s).load for silent_s in (0.0, MEMORY_S, 3 * MEMORY_S)]
    assert loads == pytest.approx([loads[0], loads[0] / math.e, loads[0] / math.e**3])
    reserved = [forecast.at(299.0 + silent_s).reserved_for([0.1])[0] for silent_s in (0.0, 20.0, 30.0)]
    assert reserved[0] > reserved[1] > reserved[2] == 0.0, "who could be on time is not held back for nobody"
    assert forecast.at(1e9).load == 0.0


@pytest.mark.parametrize("work_s", [0.0, -1.0])
def test_work_of_no_length_does_not_count(work_s):
    forecast = Forecast()
    forecast.arrived(work_s, 1.0, 0.0)
    assert forecast.at(LAST).load == 0.0


def test_work_of_no_weight_does_not_count():
    forecast = Forecast()
    forecast.arrived(100.0, 0.0, 0.0)
    assert forecast.at(LAST).load == 0.0


@pytest.mark.parametrize(("load", "pressure"), [(0.5, 0.0), (0.88, 0.0), (1.05, 0.5), (1.2, 1.0), (1.8, 1.0)])
def test_of_denser_work_a_share_is_kept_free_in_so_far_as_there_is_more_than_can_be_done(load, pressure):
    dense = steady((load, 4.0)).at(LAST)
    assert dense.reserved_for([0.1])[0] == pytest.approx(min(0.95, SHARE * pressure * load), abs=0.06)


def test_nothing_is_kept_free_of_the_time_of_the_next_few():
    assert Forecast().at(LAST).near_s == 0.0
    mixed = steady((0.1, 4.0), (0.5, 1.0))
    assert mixed.at(LAST).near_s == pytest.approx(NEAR * 0.3)
    for n in range(200):
        mixed.arrived(0.1, 4.0, 400.0 + n)
    assert mixed.at(LAST).near_s == pytest.approx(NEAR * 0.1, rel=0.01), "what was longer is forgotten"


def test_only_what_has_more_value_per_second_counts():
    mixed = steady((0.4, 4.0), (0.8, 1.0))  # 10 and 1.25 per second
    assert mixed.at(LAST).reserved_for([1e3])[0] == 0.0
    assert mixed.at(LAST).reserved_for([10.0])[0] == 0.0, "its own kind"
    assert mixed.at(LAST).reserved_for([5.0])[0] == pytest.approx(SHARE * 0.4, rel=0.1)
    assert mixed.at(LAST).reserved_for([1.25])[0] == mixed.at(LAST).reserved_for([5.0])[0]
    assert mixed.at(LAST).reserved_for([0.5])[0] == pytest.approx(SHARE * 1.2, rel=0.1)


@pytest.mark.parametrize("value_per_s", [0.0, 1e-300, math.inf])
def test_every_density_has_an_answer(value_per_s):
    assert 0.0 <= steady((2.0, 1.0)).at(LAST).reserved_for([value_per_s])[0] < 1.0


@given(ARRIVALS, DENSITIES)
def test_nothing_is_kept_free_below_a_load_of_nine_tenths(arrivals, density):
    forecast = after(arrivals)
    if forecast.at(LAST).load <= 0.9:
        assert forecast.at(LAST).reserved_for([density])[0] == 0.0


@given(ARRIVALS, DENSITIES, DENSITIES)
def test_the_denser_keeps_less_free(arrivals, one, other):
    forecast = after(arrivals)
    assert (
        forecast.at(LAST).reserved_for([max(one, other)])[0]
        <= forecast.at(LAST).reserved_for([min(one, other)])[0]
    )


@given(ARRIVALS, DENSITIES)
def test_something_is_always_left(arrivals, density):
    expected = after(arrivals).at(LAST)
    most = min(0.95, SHARE * expected.load * (1 + 1e-12))  # sums of the same numbers in another order
    assert 0.0 <= expected.reserved_for([density])[0] <= most


@given(ARRIVALS)
def test_more_arrivals_never_lower_the_load_at_their_time(arrivals):
    forecast = after(arrivals)
    before, at_s = forecast.at(LAST).load, sum(gap_s for gap_s, _, _ in arrivals)
    forecast.arrived(1.0, 1.0, at_s)
    assert forecast.at(LAST).load == pytest.approx(before + 1.0 / MEMORY_S)
