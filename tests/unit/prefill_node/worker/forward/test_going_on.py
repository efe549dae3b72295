"""A forward pass that stops and goes on computes what an undisturbed one does, each part of it once."""

import itertools
import time

import pytest
from layered_model import IN_ORDER, LAYERS, ROWS, VARIANTS, WIDTH, assert_same, undisturbed, warmed_up


@pytest.mark.parametrize(("in_place", "sublayers"), VARIANTS)
def test_stopped_at_each_boundary_it_computes_everything_once_and_the_same(in_place, sublayers):
    expected, kv = undisturbed(in_place, sublayers)
    for boundary in range(LAYERS * (2 if sublayers else 1)):
        model = warmed_up(in_place, sublayers)
        assert_same(model.to_the_end(boundary), expected)
        assert_same(model.kv, kv)
        assert model.computed == IN_ORDER, f"stopped at {boundary}"


@pytest.mark.parametrize(("in_place", "sublayers"), VARIANTS)
def test_stopped_twice(in_place, sublayers):
    expected, kv = undisturbed(in_place, sublayers)
    boundaries = range(LAYERS * (2 if sublayers else 1))
    for first, second in itertools.combinations_with_replacement(boundaries, 2):
        model = warmed_up(in_place, sublayers)
        assert_same(model.to_the_end(first, second), expected)
        assert_same(model.kv, kv)
        assert model.computed == IN_ORDER, f"stopped at {first} and {second}"


def test_stopped_at_every_boundary_of_one_pass():
    model = warmed_up()
    expected, _ = undisturbed()
    assert_same(model.to_the_end(*range(model.boundaries)), expected)
    assert model.computed == IN_ORDER


@pytest.mark.parametrize("sublayers", [True, False])
def test_after_a_stop_nothing_more_is_computed(sublayers):
    model = warmed_up(True, sublayers)
    for boundary in range(model.boundaries):
        model.computed.clear()
        model.board.reached.clear()
        model.board.stop_at = [boundary]
        output, stop = model.run()
        per_boundary = 1 if sublayers else 2
        assert model.computed == IN_ORDER[: boundary * per_boundary]
        assert stop.checkpoint.boundary == boundary
        assert [reached for _, reached in model.board.reached] == [*range(boundary + 1)], "and nobody votes"
        assert {name: tensor.shape for name, tensor in output.items()} == {
            name: (tokens, WIDTH) for name, tokens in ROWS
        }


def test_other_passes_in_between_change_nothing():
    model = warmed_up()
    expected, _ = undisturbed()
    for boundary in range(model.boundaries):
        model.board.stop_at = [boundary]
        _, stop = model.run()
        other, _ = model.run((("other", 4), ("a", 2)))
        assert_same(other, undisturbed(rows=(("other", 4), ("a", 2)))[0])
        assert_same(model.run(resume=stop.checkpoint)[0], expected)


def test_two_stopped_passes_are_kept_apart():
    model = warmed_up()
    others = (("d", 2), ("e", 4))
    model.board.stop_at = [5, 3]
    _, first = model.run()
    _, second = model.run(others)
    assert_same(model.run(resume=first.checkpoint)[0], undisturbed()[0])
    assert_same(model.run(others, second.checkpoint)[0], undisturbed(rows=others)[0])


def test_the_stop_says_when():
    model = warmed_up()
    model.board.stop_at = [3]
    before_s = time.monotonic()
    _, stop = model.run()
    assert before_s <= stop.stopped_s <= time.monotonic()
    assert stop.checkpoint.rows == ROWS
