"""The fractions of a forward pass before its boundaries add up, however unequal the stretches are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_node.board.pass_shape import PassShape

works = st.lists(st.floats(0, 1e12), min_size=1, max_size=60).filter(lambda work: sum(work) > 1e-3)


def test_each_boundary_counts_what_lies_before_it():
    shape = PassShape.of([1, 2, 5, 2])
    assert shape.done == pytest.approx((0.0, 0.1, 0.3, 0.8))
    assert shape.boundaries == 4
    assert shape.at(4) == 1.0


def test_where_no_work_is_known_all_boundaries_count_the_same():
    assert PassShape.of([0, 0, 0, 0]) == PassShape.even(4)


def test_a_pass_without_boundaries_is_never_under_way():
    assert PassShape(()).at(0) == PassShape(()).at(7) == PassShape(()).longest(2) == 0.0


@given(works)
def test_it_goes_from_nothing_to_everything_and_never_back(work):
    shape = PassShape.of(work)
    at = [shape.at(boundary) for boundary in range(len(work) + 1)]
    assert (at[0], at[-1]) == (0.0, 1.0)
    assert at == sorted(at)


@given(works, st.integers(0, 70))
def test_no_stop_waits_for_more_than_the_longest_stretch(work, ahead):
    """Wherever the device is, it finishes the stretch that it is in and at most `ahead` further ones."""
    shape = PassShape.of(work)
    stretches = [part / sum(work) for part in work]
    longest = max(sum(stretches[first : first + 1 + ahead]) for first in range(len(stretches)))
    assert shape.longest(ahead) == pytest.approx(longest, abs=1e-9)


@given(st.integers(1, 500), st.integers(0, 10))
def test_of_even_stretches_it_is_one_more_than_what_is_launched_ahead(boundaries, ahead):
    assert PassShape.even(boundaries).longest(ahead) == pytest.approx(min(1.0, (1 + ahead) / boundaries))
