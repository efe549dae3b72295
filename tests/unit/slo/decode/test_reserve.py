"""What is kept for the top tier follows what it has held within five minutes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.decode.reserve import AMPLE, LEAST, MOST, WINDOW_S, TopTierReserve

HISTORY = st.lists(
    st.tuples(st.floats(0, 60), st.floats(0, 1)), min_size=1, max_size=80
)  # (seconds since the one before, held)


@given(HISTORY)
def test_it_is_more_than_was_held_at_most_within_bounds(history):
    reserve, now_s, seen = TopTierReserve(), 0.0, []
    for since_s, held in history:
        now_s += since_s
        seen.append((now_s, held))
        reserve.observe(held, now_s)
    recent = [held for at_s, held in seen if at_s >= now_s - WINDOW_S + 100]
    older = [held for at_s, held in seen if at_s >= now_s - WINDOW_S - 100]
    part = reserve.part(now_s)
    assert LEAST <= part <= MOST
    assert part >= min(MOST, AMPLE * max(recent))
    assert part <= max(LEAST, AMPLE * max(older))


def test_a_peak_is_forgotten_after_the_window():
    reserve = TopTierReserve()
    reserve.observe(0.07, 0.0)
    reserve.observe(0.01, 10.0)
    assert reserve.part(WINDOW_S - 1) == pytest.approx(0.084)
    assert reserve.part(WINDOW_S + 1) == LEAST


def test_a_peak_is_forgotten_however_often_somebody_looks():
    reserve = TopTierReserve()
    reserve.observe(0.3, 0.0)
    for look in range(1, 801):
        reserve.observe(0.0, look * 0.5)
    assert reserve.part(400.0) == LEAST


def test_others_may_take_what_the_top_tier_holds_itself_of_it():
    reserve = TopTierReserve()
    reserve.observe(0.07, 0.0)
    assert reserve.kept(0.07, 1.0) == pytest.approx(0.014)
    assert reserve.kept(0.3, 1.0) == 0.0


@pytest.mark.parametrize(
    ("held", "total", "places"), [(0.0, 20, 1), (0.07, 256, 22), (0.5, 256, 25), (0.5, 9, 0), (0.0, 1, 0)]
)
def test_places_are_kept_like_memory_and_never_more_than_a_tenth(held, total, places):
    reserve = TopTierReserve()
    reserve.observe(held, 0.0)
    assert reserve.places(total, 1.0) == places


def test_it_takes_no_memory_without_end():
    reserve = TopTierReserve()
    for step in range(100_000):
        reserve.observe(1.0 - step * 1e-6, step * 0.01)
    assert len(reserve._peaks) <= WINDOW_S + 2
