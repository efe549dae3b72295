"""Models that resume exactly, and those that only seem to."""

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from prefill_node.worker.boundary import BoundaryLevel, install
from prefill_node.worker.forward import Forward
from prefill_node.worker.launch_ahead import HostOnly
from prefill_node.worker.rehearsal import why_inexact
from prefill_node.worker.vote import SoleVote

WIDTH, TOKENS = 4, 5


class Attention(nn.Module, AttentionLayerBase):
    def get_attn_backend(self):
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError

    def forward(self, hidden):
        return hidden.cumsum(0) * 0.25


class Layer(nn.Module):
    """A layer as vLLM's are: it hands on what its MLP returned, and the residual."""

    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, residual):
        residual = hidden if residual is None else residual + hidden
        return self.mlp(self.attn(residual).tanh()), residual


class Counting(Layer):
    """One with a state of its own, as a recurrent layer has."""

    calls = 0

    def forward(self, hidden, residual):
        hidden, residual = super().forward(hidden, residual)
        self.calls += 1
        return hidden * self.calls, residual


class Remembering(Layer):
    """One that hands on something beside the model, in memory that every pass writes to."""

    memory = torch.zeros(TOKENS, WIDTH)

    def forward(self, hidden, residual):
        if residual is not None:
            hidden = hidden + self.memory
        hidden, residual = super().forward(hidden, residual)
        self.memory.copy_(hidden)
        return hidden, residual


class Borrowing(Layer):
    """One whose first layer hands on memory that every pass writes to."""

    memory = torch.zeros(TOKENS, WIDTH)

    def forward(self, hidden, residual):
        if residual is None:
            hidden = self.memory.copy_(hidden)
        return super().forward(hidden, residual)


class Model(nn.Module):
    def __init__(self, layer, skips=()):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(layer() for _ in range(5))
        self.skips = dict(skips)

    def forward(self, hidden):
        residual, kept = None, {}
        for number, layer in enumerate(self.layers):
            kept[number] = hidden
            if number in self.skips:
                hidden = hidden + kept[self.skips[number]]
            hidden, residual = layer(hidden, residual)
        return hidden + residual


class Bystander:
    """A board and a vote that a rehearsal must leave alone."""

    def is_target(self, step_id):
        raise AssertionError

    reach = vote = vote_timed_out = is_target


def rehearsed(model):
    bystander = Bystander()
    forward = Forward(0, bystander, bystander, HostOnly())
    boundaries = install(model, BoundaryLevel.LAYER, forward)
    given = torch.linspace(-1, 1, TOKENS * WIDTH).view(TOKENS, WIDTH)
    with torch.inference_mode():
        refusal = why_inexact(forward, boundaries.count, TOKENS, lambda first: model(given + first))
    assert (forward.signal, forward.votes, forward.active) == (bystander, bystander, False)
    return refusal


def test_layers_that_hand_on_all_that_they_know_resume_exactly():
    assert rehearsed(Model(Layer)) == ""


@pytest.mark.parametrize(
    ("model", "why"),
    [
        pytest.param(lambda: Model(Layer, {4: 1}), "ends with other values", id="a skip over two layers"),
        pytest.param(lambda: Model(Layer, {2: 1}), "ends with other values", id="a skip over one layer"),
        pytest.param(lambda: Model(Counting), "two undisturbed passes", id="a state of its own"),
        pytest.param(lambda: Model(Remembering), "ends with other values", id="memory that passes share"),
        pytest.param(lambda: Model(Borrowing), "ends with other values", id="a checkpoint in such memory"),
    ],
)
def test_what_would_end_with_other_values_is_found(model, why):
    assert why in rehearsed(model())


def test_two_passes_go_on_by_turns():
    model = Model(Layer)
    forward = Forward(0, Bystander(), SoleVote(), HostOnly())
    boundaries = install(model, BoundaryLevel.LAYER, forward)
    given, passes = torch.ones(TOKENS, WIDTH), []

    def run(first):
        passes.append(first)
        return model(given + first)

    with torch.inference_mode():
        assert why_inexact(forward, boundaries.count, TOKENS, run) == ""
    undisturbed, by_turns = passes[:3], passes[3:]
    assert undisturbed == [0, 1, 0]
    assert by_turns == [0, 1] * (boundaries.count + 1)


def test_a_pass_that_never_comes_to_a_boundary_is_found():
    model = Model(Layer)
    forward = Forward(0, Bystander(), SoleVote(), HostOnly())
    boundaries = install(model, BoundaryLevel.LAYER, forward)
    given = torch.ones(TOKENS, WIDTH)
    with torch.inference_mode():
        why = why_inexact(forward, boundaries.count + 1, TOKENS, lambda first: model(given + first))
    assert "does not stop at boundary 5" in why


def test_values_that_are_no_numbers_prove_nothing():
    model = Model(Layer)
    model.layers[0].mlp.weight.data.fill_(torch.inf)
    assert "two undisturbed passes" in rehearsed(model)
