"""The parts of a forward pass before its boundaries add up, however unequal the stretches are."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.predict.pass_shape import NOTHING, WHOLE, PassPart, PassShape
from slo.predict.prefill_time import PrefillPredictor, attention_pairs

work = st.floats(0, 1e12)
stretches = st.lists(st.tuples(work, work), min_size=1, max_size=60).filter(
    lambda found: sum(tokens for tokens, _ in found) > 1e-3
)


def shape_of(found):
    return PassShape.of(*map(list, zip(*found, strict=True)))


def test_each_boundary_counts_what_lies_before_it_of_either_kind():
    shape = PassShape.of([1, 0, 5, 4], [0, 3, 0, 1])
    assert [part.tokens for part in shape.done] == pytest.approx([0.0, 0.1, 0.1, 0.6])
    assert [part.pairs for part in shape.done] == pytest.approx([0.0, 0.0, 0.75, 0.75])
    assert shape.pair_work == pytest.approx(4 / 10)
    assert shape.boundaries == 4
    assert shape.at(4) == WHOLE


def test_where_no_work_is_known_all_boundaries_count_the_same():
    assert PassShape.of([0, 0, 0, 0]) == PassShape.even(4)


def test_where_attention_is_not_known_it_lies_as_the_other_work():
    shape = PassShape.of([1, 3], [0, 0])
    assert shape == PassShape((NOTHING, PassPart(0.25, 0.25)))


def test_a_vote_that_answers_a_boundary_late_stops_a_stretch_later():
    shape = PassShape.of([1, 2, 5, 2])
    assert max(part.tokens for part in shape.stretches()) == pytest.approx(0.5)
    assert max(part.tokens for part in replace(shape, late_by=1).stretches()) == pytest.approx(0.7)


def test_a_pass_without_boundaries_is_never_under_way():
    assert PassShape(()).at(0) == PassShape(()).at(7) == NOTHING
    assert PassShape(()).stretches() == ()


@given(stretches)
def test_it_goes_from_nothing_to_everything_and_never_back(found):
    shape = shape_of(found)
    at = [shape.at(boundary) for boundary in range(len(found) + 1)]
    assert (at[0], at[-1]) == (NOTHING, WHOLE)
    for kind in ("tokens", "pairs"):
        assert [getattr(part, kind) for part in at] == sorted(getattr(part, kind) for part in at)


@given(stretches, st.integers(1, 8192), st.integers(0, 200_000), st.floats(0, 1e-2), st.floats(0, 1e-6))
def test_whatever_a_pass_computes_one_of_the_stretches_is_its_longest(
    found, tokens, context, per_token_s, per_pair_s
):
    shape, predictor = shape_of(found), PrefillPredictor(per_token_s, 0.001, per_pair_s=per_pair_s)
    pairs = attention_pairs(tokens, context)

    def seconds(part):
        return predictor.part_s(part, tokens, pairs)

    at = [seconds(shape.at(boundary)) for boundary in range(len(found) + 1)]
    longest = max(end - start for start, end in pairwise(at))
    assert max(map(seconds, shape.stretches())) == pytest.approx(longest, rel=1e-6, abs=1e-9 * at[-1] + 1e-12)
    assert at[-1] == pytest.approx(predictor.pass_s(tokens, pairs))


def waits_s(ends_s, late_by):
    """What orders wait for that come at a thousand moments of a pass, spread evenly."""
    whole_s, stops_s = ends_s[-1], [*ends_s, *[ends_s[-1]] * late_by]
    for number in range(1000):
        at_s = (number + 0.5) / 1000 * whole_s
        stretch = sum(1 for end_s in ends_s if end_s <= at_s)
        yield stops_s[stretch + late_by] - at_s


@given(stretches, st.integers(0, 2), st.floats(0.01, 5.0), st.floats(0, 5.0))
def test_the_mean_stop_is_that_of_orders_at_any_moment(found, late_by, tokens_s, pairs_s):
    shape = replace(shape_of(found), late_by=late_by)
    ends = [shape.at(boundary) for boundary in range(1, len(found) + 1)]
    ends_s = [part.tokens * tokens_s + part.pairs * pairs_s for part in ends]
    mean_s = sum(waits_s(ends_s, late_by)) / 1000
    whole_s = tokens_s + pairs_s
    assert shape.mean_stop().seconds(tokens_s, pairs_s) == pytest.approx(
        mean_s, rel=0.01, abs=0.003 * whole_s
    )


def test_a_pass_of_nothing_stops_at_once():
    assert PassShape.even(4).mean_stop().seconds(0.0, 0.0) == 0.0
    assert PassShape(()).mean_stop().seconds(1.0, 1.0) == 0.0
