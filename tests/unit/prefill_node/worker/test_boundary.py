"""Where a model's forward pass can stop: which modules are found, and that wrapping them changes nothing."""

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from prefill_node.worker.boundary import (
    BoundaryLevel,
    NoBoundariesError,
    decoder_layers,
    install,
)
from prefill_node.worker.forward import Forward
from prefill_node.worker.launch_ahead import HostOnly
from prefill_node.worker.vote import SoleVote

WIDTH = 4
ROWS = (("a", 3), ("b", 2))


class Attention(nn.Module, AttentionLayerBase):
    """What vLLM's attention is to those who look for it."""

    def get_attn_backend(self):
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError

    def forward(self, hidden):
        return hidden.cumsum(0) * 0.25


class SelfAttention(nn.Module):
    def __init__(self, attentions=1):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, WIDTH)
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.attns = [Attention() for _ in range(attentions)]
        for number, attention in enumerate(self.attns):
            self.add_module("attn" if number == 0 else f"attn_{number}", attention)

    def forward(self, hidden):
        hidden = self.qkv(hidden)
        for attention in self.attns:
            hidden = attention(hidden)
        return self.o_proj(hidden)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.down_proj = nn.Linear(3 * WIDTH, WIDTH)
        self.gate_up_proj = nn.Linear(WIDTH, 3 * WIDTH)
        self.act_fn = nn.Tanh()

    def forward(self, hidden):
        return self.down_proj(self.act_fn(self.gate_up_proj(hidden)))


class Mixture(nn.Module):
    """A mixture of experts, one operator however it is made."""

    def __init__(self):
        super().__init__()
        self.expert = MLP()

    def forward(self, hidden):
        return self.expert(hidden)


class UnknownAttention(SelfAttention):
    """One that calls its projection something else."""

    def __init__(self):
        super().__init__()
        self.out = self.o_proj
        del self.o_proj

    def forward(self, hidden):
        return self.out(self.attn(self.qkv(hidden)))


class AddAndNorm(nn.Module):
    """vLLM's norm, which adds the residual first."""

    def __init__(self):
        super().__init__()
        self.norm = nn.functional.layer_norm

    def forward(self, hidden, residual=None):
        if residual is None:
            return self.norm(hidden, (WIDTH,))
        residual = residual + hidden
        return self.norm(residual, (WIDTH,)), residual


class LlamaDecoderLayer(nn.Module):
    """Named like one of vLLM's whose submodules can be repeated."""

    def __init__(self, attentions=1, feed_forwards=("mlp",), make_mlp=MLP, attention=None):
        super().__init__()
        self.norm = AddAndNorm()
        self.self_attn = attention or SelfAttention(attentions)
        for name in feed_forwards:
            self.add_module(name, make_mlp())
        self.second_norm = AddAndNorm()

    def forward(self, positions, hidden, residual):
        if residual is None:
            residual = hidden
            hidden = self.norm(hidden)
        else:
            hidden, residual = self.norm(hidden, residual)
        hidden = self.self_attn(hidden)
        hidden, residual = self.second_norm(hidden, residual)
        for name, child in self.named_children():
            if name.startswith("mlp"):
                hidden = child(hidden)
        return hidden, residual


class OtherLayer(LlamaDecoderLayer):
    """Another class, as in a model whose layers are of several kinds."""


class FlatLayer(nn.Module):
    """A layer whose attention, and unless given another its MLP, have no parts of their own."""

    def __init__(self, mlp=lambda: nn.Linear(WIDTH, WIDTH)):
        super().__init__()
        self.attn = Attention()
        self.mlp = mlp()

    def forward(self, positions, hidden, residual):
        return hidden + self.mlp(self.attn(hidden)), residual


class Model(nn.Module):
    def __init__(self, *lists):
        super().__init__()
        torch.manual_seed(1)
        for number, layers in enumerate(lists):
            self.add_module(f"list_{number}", nn.ModuleList(make() for make in layers))
        self.final = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        positions = torch.arange(len(hidden))
        residual = None
        for layer in self.list_0:
            hidden, residual = layer(positions, hidden=hidden, residual=residual)
        return self.final(hidden if residual is None else hidden + residual)


class Board:
    def __init__(self):
        self.stop_at = None
        self.ordered = 0
        self.reached = []

    def reach(self, rank, step_id, boundary):
        self.reached.append(boundary)
        if boundary == self.stop_at:
            self.ordered = step_id

    def is_target(self, step_id):
        return self.ordered == step_id


@pytest.fixture
def forward():
    return Forward(0, Board(), SoleVote(), HostOnly())


def mixture():
    return LlamaDecoderLayer(make_mlp=Mixture)


def unknown_attention():
    return LlamaDecoderLayer(attention=UnknownAttention())


def decoder():
    return Model([LlamaDecoderLayer] * 3)


# Which layers


def test_the_one_list_of_equal_layers_is_found_in_its_order():
    model = nn.ModuleDict({"outer": decoder(), "head": nn.Linear(WIDTH, WIDTH)})
    assert decoder_layers(model) == list(model["outer"].list_0)


@pytest.mark.parametrize(
    ("lists", "problem"),
    [
        ([], "no list"),
        ([[lambda: nn.Linear(WIDTH, WIDTH)] * 3], "no list"),
        ([[LlamaDecoderLayer, OtherLayer, LlamaDecoderLayer]], "no list"),
        ([[LlamaDecoderLayer, LlamaDecoderLayer, lambda: LlamaDecoderLayer(attentions=0)]], "no list"),
        ([[lambda: LlamaDecoderLayer(attentions=2)] * 3], "no list"),
        ([[LlamaDecoderLayer]], "no list"),
        ([[LlamaDecoderLayer] * 2, [LlamaDecoderLayer] * 2], "2 lists"),
    ],
    ids=[
        "no list at all",
        "a list of something else",
        "layers of several kinds",
        "layers without attention among them",
        "two attentions in a layer",
        "a single layer",
        "two lists",
    ],
)
def test_a_model_in_which_it_is_not_clear_where_to_stop_is_refused(lists, problem):
    with pytest.raises(NoBoundariesError, match=f"Model has {problem}"):
        decoder_layers(Model(*lists))


def test_lists_within_the_layers_do_not_count():
    """Such as the experts of a mixture, or attentions that are kept in a list."""
    model = decoder()
    for layer in model.list_0:
        layer.mlp.experts = nn.ModuleList(MLP() for _ in range(4))
    assert len(decoder_layers(model)) == 3


# How fine


@pytest.mark.parametrize(
    ("make", "asked", "expected"),
    [
        (LlamaDecoderLayer, BoundaryLevel.LAYER, (3, BoundaryLevel.LAYER)),
        (LlamaDecoderLayer, BoundaryLevel.SUBLAYER, (6, BoundaryLevel.SUBLAYER)),
        (LlamaDecoderLayer, BoundaryLevel.OPERATOR, (21, BoundaryLevel.OPERATOR)),
        (mixture, BoundaryLevel.OPERATOR, (15, BoundaryLevel.OPERATOR)),
        (unknown_attention, BoundaryLevel.OPERATOR, (6, BoundaryLevel.SUBLAYER)),
        (OtherLayer, BoundaryLevel.OPERATOR, (3, BoundaryLevel.LAYER)),
        (FlatLayer, BoundaryLevel.OPERATOR, (3, BoundaryLevel.LAYER)),
        (FlatLayer, BoundaryLevel.SUBLAYER, (3, BoundaryLevel.LAYER)),
        (lambda: FlatLayer(MLP), BoundaryLevel.SUBLAYER, (3, BoundaryLevel.LAYER)),
        (
            lambda: LlamaDecoderLayer(feed_forwards=("mlp_1", "mlp_2")),
            BoundaryLevel.SUBLAYER,
            (3, BoundaryLevel.LAYER),
        ),
        (OtherLayer, BoundaryLevel.SUBLAYER, (3, BoundaryLevel.LAYER)),
        (
            lambda: LlamaDecoderLayer(feed_forwards=()),
            BoundaryLevel.SUBLAYER,
            (3, BoundaryLevel.LAYER),
        ),
    ],
    ids=[
        "layers",
        "and MLPs",
        "and operators",
        "operators and mixtures of experts",
        "an attention whose operators have other names",
        "operators of a layer that is not known",
        "operators of a layer without parts",
        "an MLP without parts",
        "attention without parts",
        "two MLPs",
        "a layer that is not known",
        "no MLP",
    ],
)
def test_it_stops_as_finely_as_asked_for_if_the_layers_allow(make, asked, expected, forward):
    model = Model([make] * 3)
    count, granularity = expected
    boundaries = install(model, asked, forward)
    assert (boundaries.shape.boundaries, boundaries.granularity) == expected
    assert bool(boundaries.why_not_finer) == (granularity is not asked), "and it says why not finer"
    forward.begin(1, lambda: ROWS, None)
    model(torch.ones(5, WIDTH))
    forward.end()
    assert forward.signal.reached == [*range(count)]


def test_one_layer_that_cannot_stop_within_makes_all_stop_between_layers(forward):
    model = decoder()
    model.list_0[1].extra = MLP()
    boundaries = install(model, BoundaryLevel.OPERATOR, forward)
    assert (boundaries.shape.boundaries, boundaries.granularity) == (3, BoundaryLevel.LAYER)


def test_layers_with_an_mlp_and_layers_with_experts_can_stop_at_operators_each_in_its_own_way(forward):
    model = Model([LlamaDecoderLayer, mixture, LlamaDecoderLayer])
    boundaries = install(model, BoundaryLevel.OPERATOR, forward)
    assert (boundaries.granularity, boundaries.why_not_finer) == (BoundaryLevel.OPERATOR, "")
    assert boundaries.shape.boundaries == 7 + 5 + 7
    forward.begin(1, lambda: ROWS, None)
    model(torch.ones(5, WIDTH))
    forward.end()
    assert forward.signal.reached == [*range(19)]


# How far


def test_boundaries_are_weighed_by_the_matrices_between_them(forward):
    shape = install(decoder(), BoundaryLevel.OPERATOR, forward).shape
    assert shape.pair_work == 0, "attention of this decoder has no sizes"
    layer = 1 + 0 + 1 + 3 + 3  # in squares of the width: before attention, attention, behind it, up, down
    within = [0, 0, 1, 1, 2, 5, 5]
    assert [part.tokens for part in shape.done] == pytest.approx(
        [(number * layer + before) / (3 * layer) for number in range(3) for before in within]
    )


@pytest.mark.parametrize("granularity", BoundaryLevel)
def test_the_entry_of_a_layer_is_as_far_however_finely_it_can_stop(granularity, forward):
    shape = install(decoder(), granularity, forward).shape
    per_layer = shape.boundaries // 3
    assert [part.tokens for part in shape.done[::per_layer]] == pytest.approx([0, 1 / 3, 2 / 3])


@pytest.mark.parametrize(
    ("granularity", "of_a_layer"),
    [
        (BoundaryLevel.LAYER, [0]),
        (BoundaryLevel.SUBLAYER, [0, 1]),
        (BoundaryLevel.OPERATOR, [0, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_from_a_layers_second_boundary_on_its_cache_may_have_been_written_to(
    granularity, of_a_layer, forward
):
    model = decoder()
    for number, layer in enumerate(model.list_0):
        layer.self_attn.attns[0].layer_name = f"layers.{number}"
    boundaries = install(model, granularity, forward)
    assert boundaries.attentions == ("layers.0", "layers.1", "layers.2")
    assert list(boundaries.begun) == [layer + begun for layer in range(3) for begun in of_a_layer]


# Wrapped


@pytest.mark.parametrize("granularity", BoundaryLevel)
def test_stopped_and_resumed_a_wrapped_model_gives_what_it_gave_before(granularity, forward):
    model, given = decoder(), torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)
    expected = model(given)
    boundaries = install(model, granularity, forward)
    steps = iter(range(1, 100))
    for boundary in [None, *range(boundaries.shape.boundaries)]:
        forward.signal.stop_at = boundary
        forward.begin(next(steps), lambda: ROWS, None)
        output = model(given)
        stop = forward.end()
        if stop is not None:
            assert output.shape == expected.shape
            forward.signal.stop_at = None
            forward.begin(next(steps), lambda: ROWS, stop.checkpoint)
            output = model(given)
            assert forward.end() is None
            within = {"layer": [0], "sublayer": [0, 1], "operator": [0, 1, 1, 1, 4, 4, 4]}[granularity]
            assert stop.boundary == boundary
            layer, place = divmod(boundary, len(within))
            assert forward.resumed_from == layer * len(within) + within[place]
        assert torch.equal(output, expected), f"differs after a stop at {boundary}"


@pytest.mark.parametrize("granularity", BoundaryLevel)
def test_outside_of_a_step_a_wrapped_model_just_computes(granularity, forward):
    """As in warm-up passes, which neither vote nor stop, and whose tensors have any shape."""
    model, given = decoder(), torch.ones(9, WIDTH)
    expected = model(given)
    install(model, granularity, forward)
    forward.signal.ordered = forward.signal.stop_at = 0
    assert torch.equal(model(given), expected)
    assert forward.signal.reached == []


def test_a_model_that_is_refused_is_left_as_it_was(forward):
    model = Model([LlamaDecoderLayer] * 2, [LlamaDecoderLayer] * 2)
    with pytest.raises(NoBoundariesError):
        install(model, BoundaryLevel.LAYER, forward)
    assert all("forward" not in vars(module) for module in model.modules())
