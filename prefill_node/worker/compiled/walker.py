"""Stands in the place of vLLM's function that runs a compiled forward pass.

Owns the way from that function to the stretches that a pass can stop between, and which compiled passes have
none. What happens at each place is `prefill_node.worker.forward`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

import vllm.compilation.backends
import vllm.compilation.caching
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index

from prefill_node.worker.boundary import (
    Boundaries,
    BoundaryLevel,
    NoBoundariesError,
    attentions_of,
    shape_of,
    stretches_of_layers,
)
from prefill_node.worker.checkpoint import map_tensors
from prefill_node.worker.compiled.stretches import PIECES, NotInPiecesError, Stretches, cut, stretch_name
from prefill_node.worker.forward import Forward
from slo.predict.pass_shape import PassShape

if TYPE_CHECKING:
    import torch

_BUILDERS: Final = (vllm.compilation.backends, vllm.compilation.caching)
"""Where vLLM makes the function: after compiling, and from what it has stored of that."""
_NAME: Final = "compile_execution_fn"
_ORIGINALS: Final = tuple([getattr(builder, _NAME) for builder in _BUILDERS])
"""vLLM's own: a pass is never cut by two, not even behind an engine that failed in this process."""


class Walker:
    """A compiled pass: called as vLLM calls it, in stretches while a step runs that may stop.

    Args:
        whole: vLLM's function, with its pieces bound.
        stretches: The same in stretches.
        consts: What its code calls `__vllm_consts__`.
    """

    def __init__(self, whole: partial[Any], stretches: Stretches, consts: list[Any] | None) -> None:
        self.stretches = stretches
        self._whole = whole
        namespace: dict[str, Any] = {"__vllm_consts__": consts or []}
        exec(compile(stretches.source, "<stretches>", "exec"), namespace)  # noqa: S102 - as vLLM does its own
        self._run = [namespace[stretch_name(number)] for number in range(stretches.count)]
        self._forward: Forward | None = None
        self._rows_at = -1
        self._no_rows: Any = None

    def attach(self, forward: Forward) -> None:
        """From now on, ask `forward` between stretches.

        Raises:
            NoBoundariesError: when the pass has not run yet, or its inputs do not say its number of rows.
        """
        if self._no_rows is None:
            raise NoBoundariesError("the compiled pass has not run before")
        if self._rows_at < 0:
            raise NoBoundariesError("the compiled pass takes other numbers than that of its rows")
        self._forward = forward

    def __call__(self, *inputs: Any) -> Any:
        """The outputs of the pass; zeros when it stops."""
        forward = self._forward
        if forward is not None and forward.active:
            if forward.resumes:
                # A graph computes on what it was captured with, not on what a checkpoint holds.
                get_forward_context().cudagraph_runtime_mode = CUDAGraphMode.NONE
            pieces = self._whole.keywords[PIECES]
            run = [partial(stretch, inputs, **{PIECES: pieces}) for stretch in self._run]
            height = inputs[self._rows_at]
            return forward.walk(run, height, lambda: self._zeros(height))
        outputs = self._whole(*inputs)
        if self._no_rows is None:
            self._learn(inputs, outputs)
        return outputs

    def _learn(self, inputs: tuple[Any, ...], outputs: Any) -> None:
        """Find where the number of rows stands, and of what shape the outputs are."""
        numbers = [place for place, value in enumerate(inputs) if type(value) is int]
        rows = set()

        def empty(tensor: torch.Tensor) -> torch.Tensor:
            rows.add(tensor.shape[0])
            return tensor[:0].clone()

        self._no_rows = map_tensors(outputs, empty)
        if rows == {inputs[place] for place in numbers}:
            self._rows_at = numbers[0]

    def _zeros(self, rows: int) -> Any:
        return map_tensors(self._no_rows, lambda each: each.new_zeros((rows, *each.shape[1:])))


def _begun(stretches: Stretches) -> tuple[int, ...]:
    """At the start of each stretch, how many attentions may have put keys and values in the KV cache.

    That they do before the attention itself, in the stretch before it.
    """
    if any(stretches.at_attention):
        return tuple(accumulate(map(int, stretches.at_attention)))
    return tuple(range(stretches.count))


def _is_one_a_layer(names: Sequence[str]) -> bool:
    """Whether these are layers that follow each other, which a pass goes through in that order."""
    try:
        layers = [extract_layer_index(name) for name in names]
    except AssertionError:  # vLLM's for a name with several numbers
        return False
    return all(before < after for before, after in pairwise(layers))


class CompiledPass:
    """Has an engine's compiled pass made so that it can stop.

    Args:
        granularity: Where: behind each attention; with anything finer also before it.
    """

    def __init__(self, granularity: BoundaryLevel) -> None:
        self._granularity = granularity
        self._walkers: list[Walker] = []
        self._problems: list[str] = []

    def watch(self) -> None:
        """Take vLLM's function wherever it is made from now on; before the model is loaded."""
        for builder, original in zip(_BUILDERS, _ORIGINALS, strict=True):
            setattr(builder, _NAME, partial(self._make, original))

    def unwatch(self) -> None:
        """The model is loaded, compiled and has run."""
        for builder, original in zip(_BUILDERS, _ORIGINALS, strict=True):
            setattr(builder, _NAME, original)

    def attach(self, model: Any, forward: Forward) -> Boundaries:
        """Have the pass ask `forward` at its boundaries.

        Raises:
            NoBoundariesError: when it has none, or there is not one pass.
        """
        if self._problems:
            raise NoBoundariesError(f"the compiled pass cannot be cut: {self._problems[0]}")
        if len(self._walkers) != 1:
            raise NoBoundariesError(f"vLLM has compiled {len(self._walkers)} passes where one is expected")
        (walker,) = self._walkers
        walker.attach(forward)
        is_fine = self._granularity is not BoundaryLevel.LAYER
        level = BoundaryLevel.SUBLAYER if is_fine else BoundaryLevel.LAYER
        why = "" if level is self._granularity else "pieces are compiled as a whole"
        names, begun = attentions_of(model), _begun(walker.stretches)
        if len(names) != begun[-1] or not _is_one_a_layer(names):
            names, begun = (), ()  # more than attentions stands between the pieces, or less, or in what order
        return Boundaries(self._shape(model, walker.stretches), level, why, names, begun)

    def _shape(self, model: Any, stretches: Stretches) -> PassShape:
        """Of the pass; where the layers of the model do not tell, all attentions and all others are alike."""
        is_fine = self._granularity is not BoundaryLevel.LAYER
        known = stretches_of_layers(model, before_attention=is_fine)
        if len(known) == stretches.count:
            return shape_of(known)
        if not is_fine:
            return PassShape.even(stretches.count)
        at_attention = [float(is_so) for is_so in stretches.at_attention]
        even = PassShape.of([1.0 - each for each in at_attention], at_attention)
        return PassShape(even.done)

    def _make(
        self,
        original: Callable[..., Any],
        code: str,
        submod_callables: dict[str, Callable[..., Any]],
        submod_names: list[str],
        consts: list[Any] | None = None,
    ) -> Callable[..., Any]:
        whole: partial[Any] = original(code, submod_callables, submod_names, consts)
        try:
            stretches = cut(code, before=self._granularity is not BoundaryLevel.LAYER)
        except (NotInPiecesError, SyntaxError) as error:
            self._problems.append(str(error))
            return whole
        walker = Walker(whole, stretches, consts)
        self._walkers.append(walker)
        return walker
