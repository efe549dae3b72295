"""A forward pass that stops and goes on computes what an undisturbed one does, each part of it once."""

import itertools
import time
import weakref
from dataclasses import dataclass, field

import pytest
import torch

from prefill_node.worker.checkpoint import Checkpoint
from prefill_node.worker.forward import Forward
from prefill_node.worker.launch_ahead import HostOnly
from prefill_node.worker.vote import SoleVote
from prefill_node.worker.vote_errors import VoteTimeoutError

LAYERS = 4
WIDTH = 6
ROWS = (("a", 5), ("b", 3), ("c", 1))


@dataclass
class Board:
    """Orders a stop when the pass gets to the next of `stop_at`."""

    stop_at: list = field(default_factory=list)
    ordered: int = 0
    reached: list = field(default_factory=list)
    timed_out: list = field(default_factory=list)

    def reach(self, rank, step_id, boundary):
        self.reached.append((step_id, boundary))
        if self.stop_at and self.stop_at[0] == boundary:
            self.stop_at.pop(0)
            self.ordered = step_id

    def is_target(self, step_id):
        return self.ordered == step_id

    def vote_timed_out(self, rank):
        self.timed_out.append(rank)


class Model:
    """A decoder as vLLM writes them: hidden states and residual go from layer to layer, KV to the side.

    Args:
        in_place: The norms write over their arguments, as vLLM's fused kernels do.
        sublayers: It can stop before each MLP as well.
        operators: It can stop at two operators within each attention and at one within each MLP as well.
    """

    def __init__(self, in_place=True, sublayers=True, votes=None, operators=False, **options):
        self.board = Board()
        self.forward = Forward(0, self.board, votes or SoleVote(), options.pop("launch_ahead", HostOnly()))
        self.in_place = in_place
        self.sublayers = sublayers
        self.operators = operators
        self.width = 5 if operators else 2 if sublayers else 1
        self.steps = itertools.count(1)
        self.kv = {}
        self.computed = []

    @property
    def boundaries(self):
        return LAYERS * self.width

    def run(self, rows=ROWS, resume=None):
        """One pass: (what comes out by request, the stop)."""
        self.rows = rows
        self.forward.begin(next(self.steps), lambda: rows, resume)
        try:
            hidden, residual = self._embed(), None
            for number in range(LAYERS):
                hidden, residual = self._layer(number, hidden, residual)
        finally:
            stop = self.forward.end()
        return dict(self._split(hidden + residual)), stop

    def to_the_end(self, *stop_at, rows=ROWS):
        """Run with stops at these boundaries, going on after each."""
        self.board.stop_at = list(stop_at)
        resume = None
        while True:
            output, stop = self.run(rows, resume)
            if stop is None:
                assert not self.board.stop_at, "not every stop took place"
                return output
            resume = stop.checkpoint

    def _embed(self):
        return torch.cat([self._embedded(name, tokens) for name, tokens in self.rows])

    def _embedded(self, name, tokens):
        return torch.sin(torch.arange(tokens * WIDTH).view(tokens, WIDTH) * ord(name[0]))

    def _layer(self, number, hidden, residual):
        first = number * self.width
        span = range(first, first + self.width)
        return self.forward.layer(span, lambda: self._compute(number, hidden, residual), lambda: hidden)

    def _compute(self, number, hidden, residual):
        if residual is None:
            residual = hidden
            hidden = self._part(None, lambda: self._normal(hidden))
        else:
            hidden, residual = self._part(None, lambda x=hidden, r=residual: self._add_and_norm(x, r))
        hidden = self._part(None, lambda x=hidden: self._attention(number, x))
        hidden, residual = self._part(None, lambda x=hidden, r=residual: self._add_and_norm(x, r))
        before_mlp = number * self.width + (3 if self.operators else 1)
        return self._part(before_mlp, lambda x=hidden: self._mlp(number, x)), residual

    def _part(self, boundary, compute):
        return self.forward.child(boundary, compute) if self.sublayers else compute()

    def _operator(self, number, within, resumes_within):
        if self.operators:
            self.forward.operator(number * self.width + within, number * self.width + resumes_within)

    def _attention(self, number, hidden):
        self.computed.append(("attention", number))
        projected = hidden * 1.0
        self._operator(number, 1, 0)
        out = []
        for name, own in self._split(projected):
            self.kv[number, name] = own.clone()
            out.append(own.cumsum(0) * 0.3)
        self._operator(number, 2, 0)
        return torch.cat(out)

    def _mlp(self, number, hidden):
        self.computed.append(("mlp", number))
        up = hidden * (number + 1)
        self._operator(number, 4, 3)
        return torch.tanh(up) + 0.1 * number

    def _add_and_norm(self, hidden, residual):
        if not self.in_place:
            residual = residual + hidden
            return self._normal(residual), residual
        residual += hidden
        hidden.copy_(self._normal(residual))
        return hidden, residual

    def _normal(self, tensor):
        return tensor / (tensor.abs().amax(1, keepdim=True) + 1.0)

    def _split(self, tensor):
        return [*zip([name for name, _ in self.rows], tensor.split([n for _, n in self.rows]), strict=True)]


ALL = [("attention", number) for number in range(LAYERS)], [("mlp", number) for number in range(LAYERS)]
IN_ORDER = [part for parts in zip(*ALL, strict=True) for part in parts]
VARIANTS = [*itertools.product([True, False], [True, False])]


def undisturbed(in_place=True, sublayers=True, rows=ROWS):
    model = Model(in_place, sublayers)
    return model.run(rows)[0], model.kv


def assert_same(given, expected):
    assert given.keys() == expected.keys()
    for key, tensor in given.items():
        assert torch.equal(tensor, expected[key]), f"{key} differs"


def warmed_up(*variant, **options):
    """A model after its first pass, from which it knows what a layer returns."""
    model = Model(*variant, **options)
    model.run()
    model.kv.clear()
    model.computed.clear()
    model.board.reached.clear()
    return model


# Stop and go on


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


HALVES = [0, 0, 0, 3, 3]
"""Where a layer that stops at operators goes on, by where it stopped."""


def resumes_at(boundary):
    return boundary // 5 * 5 + HALVES[boundary % 5]


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


def test_a_resumed_pass_reports_and_votes_from_its_boundary_on():
    model = warmed_up()
    model.board.stop_at = [5]
    _, stop = model.run()
    model.board.reached.clear()
    model.run(resume=stop.checkpoint)
    assert model.forward.resumed_from == 5
    assert [boundary for _, boundary in model.board.reached] == [5, 6, 7]
    model.run()
    assert model.forward.resumed_from == 0


def test_the_stop_says_when():
    model = warmed_up()
    model.board.stop_at = [3]
    before_s = time.monotonic()
    _, stop = model.run()
    assert before_s <= stop.stopped_s <= time.monotonic()
    assert stop.checkpoint.rows == ROWS


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


# Who stops


def test_an_order_for_another_step_stops_nothing():
    for other in (0, 1, 3, 99):
        model = warmed_up()
        model.board.ordered = other
        output, stop = model.run()
        assert model.board.reached[0] == (2, 0), "this is step 2"
        assert stop is None
        assert_same(output, undisturbed()[0])


class Peers:
    """The other ranks, one of which has seen an order for these boundaries."""

    def __init__(self, *stops):
        self.stops = stops
        self.ballots = []

    def vote(self, step_id, boundary, wish):
        self.ballots.append((boundary, wish))
        return wish or boundary in self.stops


def test_it_stops_with_the_others_although_it_has_seen_no_order():
    peers = Peers()
    model = warmed_up(votes=peers)
    peers.stops = (4,)
    _, stop = model.run()
    assert stop.checkpoint.boundary == 4


def test_it_tells_the_others_its_wish_at_every_boundary():
    peers = Peers()
    model = warmed_up(votes=peers)
    peers.ballots.clear()
    model.board.stop_at = [5]
    model.run()
    assert peers.ballots == [*((boundary, False) for boundary in range(5)), (5, True)]


def test_the_first_pass_of_all_does_not_stop_before_it_knows_what_a_layer_returns():
    model = Model()
    model.board.stop_at = [0]
    _, stop = model.run()
    assert stop.checkpoint.boundary == 2
    assert_same(model.run(resume=stop.checkpoint)[0], undisturbed()[0])
    assert model.computed == IN_ORDER


class AbsentPeer:
    def vote(self, step_id, boundary, wish):
        if boundary == 3:
            raise VoteTimeoutError((1,), step_id, boundary, 1.0)
        return wish


def test_a_vote_that_times_out_is_recorded_and_is_no_stop():
    model = Model(votes=AbsentPeer())
    with pytest.raises(VoteTimeoutError, match="rank 1"):
        model.run()
    assert model.board.timed_out == [0]
    assert model.forward.end() is None


def test_a_layer_that_fails_is_no_stop_and_the_next_pass_is_sound():
    model = warmed_up()
    attention = model._attention
    model._attention = lambda *args: (_ for _ in ()).throw(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        model.run()
    model._attention = attention
    output, stop = model.run()
    assert stop is None
    assert_same(output, undisturbed()[0])


class Watched:
    """Notes the calls that bound the launch-ahead."""

    def __init__(self):
        self.calls = []

    def start(self, at_s):
        self.calls.append(("start", at_s))

    def reach(self, boundary):
        self.calls.append(boundary)


def test_the_launch_ahead_is_bounded_at_each_boundary_that_is_reached():
    watched = Watched()
    model = warmed_up(launch_ahead=watched)
    watched.calls.clear()
    model.board.stop_at = [5]
    _, stop = model.run()
    assert watched.calls == [("start", ()), *range(6)]
    watched.calls.clear()
    model.run(resume=stop.checkpoint)
    assert watched.calls == [("start", ()), *range(5, 8)]


# Memory


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


# Rows


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


# Size


def test_tensors_that_share_memory_count_once():
    base = torch.zeros(10, WIDTH)
    other = torch.zeros(10, WIDTH)
    shared = Checkpoint(3, (("a", 10),), (base, base[2:]), (base.view(-1), (other, [base.T])))
    assert shared.size_bytes == 2 * 10 * WIDTH * 4


def test_a_view_counts_as_all_the_memory_that_it_keeps():
    base = torch.zeros(100, WIDTH)
    assert Checkpoint(1, (("a", 1),), base[:1]).size_bytes == 100 * WIDTH * 4


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


def test_ranks_may_come_late_in_the_first_pass_of_a_size_only():
    seen = []

    class Votes(SoleVote):
        def vote(self, step_id, boundary, wish):
            if boundary == 0:
                seen.append(self.is_first_pass)
            return wish

    model = Model(votes=Votes())
    model.run()
    model.run()
    model.run(rows=(("a", 40),))
    model.to_the_end(0, rows=(("a", 300),))
    model.run(rows=(("a", 300),))
    assert seen == [True, False, True, True, True, False], "a stopped pass is not through"
