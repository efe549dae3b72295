"""Boundaries in a loaded model: the places where its forward pass can stop.

Owns how decoder layers are found and wrapped. A model's forward hands what a layer returns to the next
layer, so a pass goes on at layer k when every layer before k returns what layer k - 1 had returned. Within
a layer, likewise, the submodules that had run return what they had returned; a submodule that was left in the
middle runs again. It is assumed that a model calls a list of equal decoder layers in order and computes
nothing between two of them; `prefill_node.worker.rehearsal` sees whether that is so.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from prefill_node.worker.forward import Forward
from prefill_node.worker.operator_work import Work, work
from slo.predict.pass_shape import PassShape


class BoundaryLevel(enum.StrEnum):
    """Where a forward pass can stop."""

    LAYER = "layer"
    SUBLAYER = "sublayer"
    OPERATOR = "operator"


REPLAYABLE_LAYERS: Final = frozenset(
    f"{family}DecoderLayer"
    for family in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe")
)
"""Decoder layers of vLLM that can be entered again in the middle, by reading their code.

Behind each norm they use nothing older than what it has returned. They compute nothing in place between their
submodules: a layer that adds in place to what a submodule has returned would add again when the reply is
repeated. And their attention and MLP write over nothing that enters them, so that one that was left in the
middle can run again.
"""


class NoBoundariesError(Exception):
    """A model in which no boundaries can be found; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The boundaries of a model.

    Attributes:
        shape: How many one forward pass has, and how much of it lies before each.
        granularity: Where they are.
        why_not_finer: What keeps the model from stopping wherever it was asked to; empty for nothing.
        attentions: Names of the layers that have a KV cache, in the order in which a pass fills it; none
            where that is not known.
        begun: By boundary, how many of them may have been written to when a pass has reached it.
    """

    shape: PassShape
    granularity: BoundaryLevel
    why_not_finer: str = ""
    attentions: tuple[str, ...] = ()
    begun: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Boundaries of one forward pass."""
        return self.shape.boundaries


@dataclass(frozen=True, slots=True)
class _Place:
    """A boundary of a layer.

    Attributes:
        module: What runs next; the layer itself at its entry.
        resumes_back: How many boundaries before this one a pass goes on that stopped here.
        work: What runs before the next boundary, see `prefill_node.worker.operator_work`.
    """

    module: nn.Module
    resumes_back: int
    work: Work


def install(model: nn.Module, granularity: BoundaryLevel, forward: Forward) -> Boundaries:
    """Wrap the decoder layers of `model` so that they ask `forward` at their boundaries.

    Raises:
        NoBoundariesError: when it has no uniform list of decoder layers.
    """
    layers = decoder_layers(model)
    granularity, why_not_finer = _finest(layers, granularity)
    stretches: list[Work] = []
    begun: list[int] = []
    for number, layer in enumerate(layers):
        places = _places(layer, granularity)
        _wrap(layer, places, len(stretches), granularity, forward)
        stretches += [place.work for place in places]
        begun += [number] + [number + 1] * (len(places) - 1)
    attentions = tuple([name for layer in layers for name in attentions_of(layer)])
    return Boundaries(shape_of(stretches), granularity, why_not_finer, attentions, tuple(begun))


def shape_of(stretches: Sequence[Work]) -> PassShape:
    """The shape of a pass from the work behind each boundary, up to the next."""
    return PassShape.of([each.per_token for each in stretches], [each.per_pair for each in stretches])


def stretches_of_layers(model: nn.Module, *, before_attention: bool) -> list[Work]:
    """The work between cuts behind the attention of each layer, or before it too; none where layers differ.

    What lies behind the last layer, and before the first, counts to the stretch beside it.
    """
    try:
        layers = decoder_layers(model)
    except NoBoundariesError:
        return []
    stretches, since = [], Work()
    for layer in layers:
        kernel = next(part for part in layer.modules() if _is_attention(part))
        attention = (_halves(layer) or (None,))[0]
        into_heads = Work()
        if attention is not None and (operators := _operators(attention)) is not None:
            into_heads = work(attention) - work(kernel) - work(operators[1])
        if before_attention:
            stretches += [since + into_heads, work(kernel)]
        else:
            stretches.append(since + into_heads + work(kernel))
        since = work(layer) - work(kernel) - into_heads
    return [*stretches, since]


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
        raise NoBoundariesError(f"{type(model).__name__} has {problem}")
    return list(found[0])


def _is_uniform(modules: nn.ModuleList) -> bool:
    return (
        len(modules) > 1
        and len({type(module) for module in modules}) == 1
        and all(_attentions(module) == 1 for module in modules)
    )


def _attentions(module: nn.Module) -> int:
    return sum(_is_attention(part) for part in module.modules())


def attentions_of(model: nn.Module) -> tuple[str, ...]:
    """VLLM's names for what keeps a KV cache in a model, or in one of its layers, in their order."""
    return tuple([getattr(part, "layer_name", "") for part in model.modules() if _is_attention(part)])


def _is_attention(module: nn.Module) -> bool:
    """Whether it has what vLLM's `AttentionLayerBase` demands; other decoders may have it as well."""
    return all(hasattr(module, name) for name in ("get_attn_backend", "get_kv_cache_spec"))


def _finest(layers: list[nn.Module], asked: BoundaryLevel) -> tuple[BoundaryLevel, str]:
    """How finely all of these layers can stop, up to what is asked for, and why not finer."""
    if asked is BoundaryLevel.LAYER:
        return asked, ""
    kind = type(layers[0]).__name__
    if kind not in REPLAYABLE_LAYERS:
        return BoundaryLevel.LAYER, f"it is not known whether {kind} can be entered in the middle"
    halves = [_halves(layer) for layer in layers]
    if None in halves:
        return BoundaryLevel.LAYER, f"{kind} is not one attention and one MLP"
    if asked is BoundaryLevel.OPERATOR and not all(half and _operators(half[0]) for half in halves):
        return BoundaryLevel.SUBLAYER, f"the attention of {kind} has no operators of known names"
    return asked, ""


def _halves(layer: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """The layer's attention, and its MLP or mixture of experts: its only submodules with parts of their own.

    Norms have no parts. Parameters do not tell: vLLM repacks them for some devices and leaves them empty.
    """
    heavy = [child for child in layer.children() if any(True for _ in child.children())]
    attentions = [child for child in heavy if _attentions(child)]
    others = [child for child in heavy if not _attentions(child)]
    return (attentions[0], others[0]) if len(attentions) == len(others) == 1 else None


def _operators(attention: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """The attention proper and the projection behind it, by the names that vLLM's models have for them."""
    kernel, projection = getattr(attention, "attn", None), getattr(attention, "o_proj", None)
    return (kernel, projection) if kernel is not None and projection is not None else None


def _places(layer: nn.Module, granularity: BoundaryLevel) -> list[_Place]:
    """The boundaries of a layer, in the order in which it gets to them."""
    halves = _halves(layer)
    if granularity is BoundaryLevel.LAYER or halves is None:
        return [_Place(layer, 0, work(layer))]
    attention, feed_forward = halves
    operators = _operators(attention) if granularity is BoundaryLevel.OPERATOR else None
    if operators is None:
        return [_Place(layer, 0, work(attention)), _Place(feed_forward, 0, work(feed_forward))]
    kernel, projection = operators
    into_heads = work(attention) - work(kernel) - work(projection)
    places = [
        _Place(layer, 0, Work()),
        _Place(attention, 0, into_heads),
        _Place(kernel, 1, work(kernel)),
        _Place(projection, 2, work(projection)),
    ]
    activation, down = getattr(feed_forward, "act_fn", None), getattr(feed_forward, "down_proj", None)
    if activation is None or down is None:  # a mixture of experts is one operator
        return [*places, _Place(feed_forward, 0, work(feed_forward))]
    up = _Place(feed_forward, 0, work(feed_forward) - work(down))
    return [*places, up, _Place(activation, 1, Work()), _Place(down, 2, work(down))]


def _wrap(
    layer: nn.Module, places: list[_Place], first: int, granularity: BoundaryLevel, forward: Forward
) -> None:
    """Have a layer, its submodules and their operators ask `forward`; its boundaries begin at `first`."""
    _wrap_layer(layer, range(first, first + len(places)), forward)
    if granularity is BoundaryLevel.LAYER:
        return
    number_of = {id(place.module): first + number for number, place in enumerate(places)}
    children = list(layer.children())
    for child in children:
        _wrap_child(child, number_of.get(id(child)), forward)
    for place in places[1:]:
        if place.module not in children:
            boundary = number_of[id(place.module)]
            _wrap_operator(place.module, boundary, boundary - place.resumes_back, forward)


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


def _wrap_operator(operator: nn.Module, boundary: int, resumes_at: int, forward: Forward) -> None:
    """Have the pass stop just before an operator within a submodule, to go on at `resumes_at`."""
    original: Callable[..., Any] = operator.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if forward.active:
            forward.operator(boundary, resumes_at)
        return original(*args, **kwargs)

    operator.forward = run


def _rows_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states among a layer's arguments: its first tensor of floating point."""
    return next(
        value
        for value in (*args, *kwargs.values())
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    )
