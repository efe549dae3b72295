"""Which rows of a checkpoint can be used, and how large it is."""

import pytest
import torch
from layered_model import IN_ORDER, LAYERS, ROWS, WIDTH, assert_same, undisturbed, warmed_up

from prefill_node.worker.checkpoint import Checkpoint


@pytest.mark.parametrize(
    ("rows", "goes_on"),
    [
        (ROWS, True),
        ((("c", 1), ("a", 5), ("b", 3)), True),
        ((("b", 3),), True),
        ((("c", 1), ("a", 5)), True),
        ((("a", 5), ("b", 3), ("c", 1), ("new", 2)), False),
        ((("a", 5), ("b", 2), ("c", 1)), False),
        ((("a", 5), ("b", 4)), False),
        ((("new", 9),), False),
    ],
    ids=[
        "the same",
        "another order",
        "one is left",
        "some are left, in another order",
        "one more",
        "fewer tokens of one",
        "more tokens of one",
        "somebody else's",
    ],
)
def test_a_checkpoint_serves_those_of_its_rows_that_are_asked_for(rows, goes_on):
    expected, _ = undisturbed(rows=rows)
    for boundary in range(1, LAYERS * 2):
        model = warmed_up()
        model.board.stop_at = [boundary]
        _, stop = model.run()
        model.computed.clear()
        output, _ = model.run(rows, stop.checkpoint)
        assert_same(output, expected)
        assert model.computed == IN_ORDER[boundary if goes_on else 0 :]
        assert model.forward.resumed_from == (boundary if goes_on else 0)


def test_what_is_not_laid_out_by_token_cannot_be_taken_apart():
    rows = (("a", 1), ("b", 1))
    kept = Checkpoint(2, rows, (torch.zeros(2, WIDTH), torch.zeros(())))
    assert kept.select(rows) is kept
    assert kept.select((("b", 1),)) is None


def test_a_tensor_that_holds_nothing_has_no_rows_to_select():
    """Latent attention has one: a compiled pass orders the cache's update before it by that."""
    rows = (("a", 1), ("b", 2))
    kept = Checkpoint(2, rows, [torch.arange(3.0).view(3, 1), torch.empty(0)])
    selected = kept.select((("b", 2),))
    assert selected is not None
    assert selected.entering[0].tolist() == [[1.0], [2.0]]
    assert selected.entering[1].numel() == 0


def test_tensors_that_share_memory_count_once():
    base = torch.zeros(10, WIDTH)
    other = torch.zeros(10, WIDTH)
    shared = Checkpoint(3, (("a", 10),), (base, base[2:]), (base.view(-1), (other, [base.T])))
    assert shared.size_bytes == 2 * 10 * WIDTH * 4


def test_a_view_counts_as_all_the_memory_that_it_keeps():
    base = torch.zeros(100, WIDTH)
    assert Checkpoint(1, (("a", 1),), base[:1]).size_bytes == 100 * WIDTH * 4


@pytest.mark.parametrize(
    ("in_place", "boundary", "tensors"),
    [(True, 0, 0), (True, 4, 2), (False, 4, 2), (True, 1, 2), (True, 5, 2), (False, 5, 2)],
    ids=[
        "at the first layer",
        "between layers",
        "between layers, copies",
        "in the first layer",
        "in a layer",
        "in a layer, copies",
    ],
)
def test_a_checkpoint_is_as_large_as_what_enters_its_boundary(in_place, boundary, tensors):
    """Hidden states and residual, within a layer too; older ones are hollow."""
    model = warmed_up(in_place)
    model.board.stop_at = [boundary]
    _, stop = model.run()
    rows = sum(tokens for _, tokens in ROWS)
    assert stop.checkpoint.size_bytes == tensors * rows * WIDTH * 4
