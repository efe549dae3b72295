"""Boundaries in a loaded model: the places where its forward pass can stop.

Owns how decoder layers are found and wrapped. A model's forward hands what a layer returns to the next
layer, so a pass goes on at layer k when every layer before k returns what layer k - 1 had returned. Within
a layer, likewise, the submodules that had run return what they had returned. Nothing is assumed of a model
but that it calls a list of equal decoder layers in order and computes nothing between two of them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefill_node.forward import Forward


class Granularity(enum.StrEnum):
    """Where a forward pass can stop."""

    LAYER = "layer"
    SUBLAYER = "sublayer"


REPLAYABLE_LAYERS: Final = frozenset(
    f"{family}DecoderLayer"
    for family in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe")
)
"""Decoder layers of vLLM that compute nothing in place between their submodules, by reading their code.

A layer that adds in place to what a submodule has returned would add again when the reply is repeated.
"""


class NoBoundariesError(Exception):
    """A model in which no boundaries can be found; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The boundaries of a model.

    Attributes:
        count: Boundaries of one forward pass.
        granularity: Where they are; `LAYER` when a finer one was asked for and the layers have none.
    """

    count: int
    granularity: Granularity


def install(model: nn.Module, granularity: Granularity, forward: Forward) -> Boundaries:
    """Wrap the decoder layers of `model` so that they ask `forward` at their boundaries.

    Raises:
        NoBoundariesError: when it has no uniform list of decoder layers.
    """
    layers = decoder_layers(model)
    feed_forwards = [_feed_forward(layer) for layer in layers]
    replayable = type(layers[0]).__name__ in REPLAYABLE_LAYERS
    if granularity is Granularity.LAYER or None in feed_forwards or not replayable:
        for number, layer in enumerate(layers):
            _wrap_layer(layer, range(number, number + 1), forward)
        return Boundaries(len(layers), Granularity.LAYER)
    for number, layer in enumerate(layers):
        within = 2 * number + 1
        _wrap_layer(layer, range(2 * number, within + 1), forward)
        for child in layer.children():
            _wrap_child(child, within if child is feed_forwards[number] else None, forward)
    return Boundaries(2 * len(layers), Granularity.SUBLAYER)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The one list of equal layers with one attention each.

    Raises:
        NoBoundariesError: when there is none, or more than one.
    """
    found = [
        module for module in model.modules() if isinstance(module, nn.ModuleList) and _is_uniform(module)
    ]
    if len(found) != 1:
        problem = "no list of equal decoder layers" if not found else f"{len(found)} lists of decoder layers"
        msg = f"{type(model).__name__} has {problem}"
        raise NoBoundariesError(msg)
    return list(found[0])


def _is_uniform(modules: nn.ModuleList) -> bool:
    return (
        len(modules) > 1
        and len({type(module) for module in modules}) == 1
        and all(_attentions(module) == 1 for module in modules)
    )


def _attentions(module: nn.Module) -> int:
    return sum(_is_attention(part) for part in module.modules())


def _is_attention(module: nn.Module) -> bool:
    """Whether it has what vLLM's `AttentionLayerBase` demands; other decoders may have it as well."""
    return all(hasattr(module, name) for name in ("get_attn_backend", "get_kv_cache_spec"))


def _feed_forward(layer: nn.Module) -> nn.Module | None:
    """The layer's MLP or mixture of experts: its only submodule with parts of its own and no attention.

    Norms have no parts. Parameters do not tell: vLLM repacks them for some devices and leaves them empty.
    """
    heavy = [child for child in layer.children() if any(True for _ in child.children())]
    without = [child for child in heavy if not _attentions(child)]
    return without[0] if len(heavy) == 2 and len(without) == 1 else None  # noqa: PLR2004 - attention and this


def _wrap_layer(layer: nn.Module, span: range, forward: Forward) -> None:
    """Have `layer` run through `forward`; `span` are the boundaries at its entry and within."""
    original: Callable[..., Any] = layer.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if not forward.active:
            return original(*args, **kwargs)
        return forward.layer(span, lambda: original(*args, **kwargs), lambda: _rows_of(args, kwargs))

    layer.forward = run


def _wrap_child(child: nn.Module, boundary: int | None, forward: Forward) -> None:
    """Have a submodule of a layer run through `forward`; its pass can stop just before it at `boundary`."""
    original: Callable[..., Any] = child.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if not forward.active:
            return original(*args, **kwargs)
        return forward.child(boundary, lambda: original(*args, **kwargs))

    child.forward = run


def _rows_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states among a layer's arguments: its first tensor of floating point."""
    return next(
        value
        for value in (*args, *kwargs.values())
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    )
