"""A pass that stops at an operator goes on from the start of its half layer."""

import pytest
from layered_model import (
    HALVES,
    IN_ORDER,
    LAYERS,
    ROWS,
    WIDTH,
    assert_same,
    resumes_at,
    undisturbed,
    warmed_up,
)


@pytest.mark.parametrize("in_place", [True, False])
def test_stopped_at_an_operator_it_does_no_more_than_that_half_layer_again(in_place):
    expected, kv = undisturbed(in_place)
    for boundary in range(LAYERS * 5):
        model = warmed_up(in_place, operators=True)
        assert_same(model.to_the_end(boundary), expected)
        assert_same(model.kv, kv)
        half = boundary // 5 * 2 + HALVES[boundary % 5] // 3
        again = [] if resumes_at(boundary) == boundary else [IN_ORDER[half]]
        assert model.computed == [*IN_ORDER[:half], *again, *IN_ORDER[half:]], f"stopped at {boundary}"


@pytest.mark.parametrize("in_place", [True, False])
def test_stopped_at_operators_again_and_again(in_place):
    expected, kv = undisturbed(in_place)
    boundaries = range(LAYERS * 5)
    stops = [(first, second) for first in boundaries for second in boundaries if second >= resumes_at(first)]
    for first, second in stops:
        model = warmed_up(in_place, operators=True)
        assert_same(model.to_the_end(first, second, second, resumes_at(second)), expected)
        assert_same(model.kv, kv)


@pytest.mark.parametrize("in_place", [True, False])
def test_the_others_of_a_step_go_on_from_an_operator_stop_as_often_as_they_are_stopped(in_place):
    rows = (("c", 1), ("a", 5))
    expected, _ = undisturbed(in_place, rows=rows)
    for boundary in range(5, LAYERS * 5):
        model = warmed_up(in_place, operators=True)
        model.board.stop_at = [boundary, boundary, resumes_at(boundary)]
        _, stop = model.run()
        _, stop = model.run(rows, stop.checkpoint)
        _, stop = model.run(rows, stop.checkpoint)
        assert stop.boundary == stop.checkpoint.boundary == resumes_at(boundary)
        assert_same(model.run(rows, stop.checkpoint)[0], expected)


def test_a_stop_at_an_operator_tells_where_it_stopped_and_where_it_goes_on():
    model = warmed_up(operators=True)
    for boundary in range(model.boundaries):
        model.board.stop_at = [boundary]
        _, stop = model.run()
        assert (stop.boundary, stop.checkpoint.boundary) == (boundary, resumes_at(boundary))
        model.board.reached.clear()
        model.run(resume=stop.checkpoint)
        assert model.forward.resumed_from == resumes_at(boundary)
        reached = [reached for _, reached in model.board.reached]
        assert reached == [*range(resumes_at(boundary), model.boundaries)]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_stop_at_an_operator_keeps_no_more_than_one_at_the_start_of_its_half_layer(in_place):
    model = warmed_up(in_place, operators=True)
    rows = sum(tokens for _, tokens in ROWS)
    for boundary in range(model.boundaries):
        model.board.stop_at = [boundary]
        _, at_operator = model.run()
        model.board.stop_at = [resumes_at(boundary)]
        _, at_start = model.run()
        kept, at_start = at_operator.checkpoint.size_bytes, at_start.checkpoint.size_bytes
        if boundary % 5 and resumes_at(boundary) == 0:
            at_start += rows * WIDTH * 4  # the norm's reply; a worker keeps nothing of the first attention
        assert kept == at_start, f"stopped at {boundary}"
