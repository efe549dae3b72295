"""What a pass lets go of, when it stops and when it is over."""

import weakref

import torch
from layered_model import ROWS, WIDTH, Board, warmed_up

from prefill_node.worker.forward import Forward
from prefill_node.worker.launch_ahead import HostOnly
from prefill_node.worker.vote import SoleVote


def test_a_pass_keeps_no_tensors_when_it_is_over():
    model = warmed_up()
    model.board.stop_at = [3]
    _, stop = model.run()
    assert stop is not None
    assert model.forward.end() is None, "a stop is told once"
    assert not model.forward.active
    held = [model.forward._entering, model.forward._stand_in, model.forward._resume, model.forward._stop]
    assert held == [None] * 4
    assert not model.forward._replies
    assert not model.forward._replay


def test_what_stands_in_after_a_stop_is_one_tensor_made_when_the_layer_has_let_go_of_its_own():
    """A layer's intermediate values are most of what a pass takes: nothing comes on top of them."""
    forward = Forward(0, Board(stop_at=[2]), SoleVote(), HostOnly())
    forward._is_shape_known = True
    tokens, held = torch.zeros(9, WIDTH), []

    def with_intermediates():
        up = torch.zeros(9, 4 * WIDTH)
        held.append(weakref.ref(up))
        forward.operator(2, 1)
        return up

    def tokens_of():
        assert held[0]() is None
        return tokens

    forward.begin(1, lambda: ROWS, None)
    forward.layer(range(1), lambda: (tokens + 1, tokens + 2), lambda: tokens)
    hidden, residual = forward.layer(range(1, 3), with_intermediates, tokens_of)
    assert forward.end().boundary == 2
    assert hidden.shape == residual.shape == (9, WIDTH)
    assert hidden.data_ptr() == residual.data_ptr()
    assert not hidden.any()


def test_a_compiled_pass_lets_go_of_what_it_has_copied_before_something_stands_in():
    forward = Forward(0, Board(stop_at=[1]), SoleVote(), HostOnly())
    held = []

    def first(alive):
        made = torch.ones(9, WIDTH)
        held.append(weakref.ref(made))
        return [made]

    def stand_in():
        assert held[0]() is None
        return torch.zeros(9, WIDTH)

    forward.begin(1, lambda: ROWS, None)
    forward.walk([first, lambda alive: alive.pop()], 9, stand_in)
    stop = forward.end()
    assert torch.equal(stop.checkpoint.entering[0], torch.ones(9, WIDTH))
