"""Where a model's forward pass can stop: which modules are found, and that wrapping them changes nothing."""

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from prefill_node.boundary import Boundaries, Granularity, NoBoundariesError, decoder_layers, install
from prefill_node.forward import Forward
from prefill_node.launch_ahead import HostOnly
from prefill_node.vote import SoleVote

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
        self.attns = [Attention() for _ in range(attentions)]
        for number, attention in enumerate(self.attns):
            self.add_module(f"attn_{number}", attention)

    def forward(self, hidden):
        hidden = self.qkv(hidden)
        for attention in self.attns:
            hidden = attention(hidden)
        return hidden


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return torch.tanh(self.up(hidden))


class LlamaDecoderLayer(nn.Module):
    """Named like one of vLLM's whose submodules can be repeated."""

    def __init__(self, attentions=1, feed_forwards=("mlp",)):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.self_attn = SelfAttention(attentions)
        for name in feed_forwards:
            self.add_module(name, MLP())

    def forward(self, positions, hidden, residual=None):
        hidden = hidden + self.self_attn(self.norm(hidden))
        for name, child in self.named_children():
            if name.startswith("mlp"):
                hidden = hidden + child(hidden)
        return hidden


class OtherLayer(LlamaDecoderLayer):
    """Another class, as in a model whose layers are of several kinds."""


class FlatLayer(nn.Module):
    """A layer whose attention, and unless given another its MLP, have no parts of their own."""

    def __init__(self, mlp=lambda: nn.Linear(WIDTH, WIDTH)):
        super().__init__()
        self.attn = Attention()
        self.mlp = mlp()

    def forward(self, positions, hidden):
        return hidden + self.mlp(self.attn(hidden))


class Model(nn.Module):
    def __init__(self, *lists):
        super().__init__()
        torch.manual_seed(1)
        for number, layers in enumerate(lists):
            self.add_module(f"list_{number}", nn.ModuleList(make() for make in layers))
        self.final = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        positions = torch.arange(len(hidden))
        for layer in self.list_0:
            hidden = layer(positions, hidden=hidden)
        return self.final(hidden)


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
        (LlamaDecoderLayer, Granularity.LAYER, Boundaries(3, Granularity.LAYER)),
        (LlamaDecoderLayer, Granularity.SUBLAYER, Boundaries(6, Granularity.SUBLAYER)),
        (FlatLayer, Granularity.SUBLAYER, Boundaries(3, Granularity.LAYER)),
        (lambda: FlatLayer(MLP), Granularity.SUBLAYER, Boundaries(3, Granularity.LAYER)),
        (
            lambda: LlamaDecoderLayer(feed_forwards=("mlp_1", "mlp_2")),
            Granularity.SUBLAYER,
            Boundaries(3, Granularity.LAYER),
        ),
        (OtherLayer, Granularity.SUBLAYER, Boundaries(3, Granularity.LAYER)),
        (lambda: LlamaDecoderLayer(feed_forwards=()), Granularity.SUBLAYER, Boundaries(3, Granularity.LAYER)),
    ],
    ids=[
        "layers",
        "and MLPs",
        "an MLP without parts",
        "attention without parts",
        "two MLPs",
        "a layer that is not known",
        "no MLP",
    ],
)
def test_it_stops_as_finely_as_asked_for_if_the_layers_allow(make, asked, expected, forward):
    model = Model([make] * 3)
    assert install(model, asked, forward) == expected
    forward.begin(1, lambda: ROWS, None)
    model(torch.ones(5, WIDTH))
    forward.end()
    assert forward.signal.reached == [*range(expected.count)]


def test_one_layer_that_cannot_stop_within_makes_all_stop_between_layers(forward):
    model = decoder()
    model.list_0[1].extra = MLP()
    assert install(model, Granularity.SUBLAYER, forward) == Boundaries(3, Granularity.LAYER)


# Wrapped


@pytest.mark.parametrize("granularity", Granularity)
def test_stopped_and_resumed_a_wrapped_model_gives_what_it_gave_before(granularity, forward):
    model, given = decoder(), torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)
    expected = model(given)
    boundaries = install(model, granularity, forward)
    steps = iter(range(1, 100))
    for boundary in [None, *range(boundaries.count)]:
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
            assert forward.resumed_from == boundary
        assert torch.equal(output, expected), f"differs after a stop at {boundary}"


@pytest.mark.parametrize("granularity", Granularity)
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
        install(model, Granularity.LAYER, forward)
    assert all("forward" not in vars(module) for module in model.modules())
