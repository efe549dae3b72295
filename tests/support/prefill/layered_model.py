"""A small decoder as vLLM writes them, whose forward pass stops where its board says."""

import itertools
from dataclasses import dataclass, field

import torch

from prefill_node.worker.forward import Forward
from prefill_node.worker.launch_ahead import HostOnly
from prefill_node.worker.vote import SoleVote

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


HALVES = [0, 0, 0, 3, 3]
"""Where a layer that stops at operators goes on, by where it stopped."""


def resumes_at(boundary):
    return boundary // 5 * 5 + HALVES[boundary % 5]
