"""How long a forward pass takes on an accelerator, and where in it a stop can take effect.

Owns the arithmetic from operators to passes: attention by FLOPs, all-reduces by bytes, boundaries by
granularity. Who runs when is not decided here.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

import msgspec

from simulator.cost.operators import (
    AFTER_ATTENTION,
    BEFORE_ATTENTION,
    MLP,
    OPERATORS,
    ModelShape,
    OperatorTimes,
)
from slo.predict.pass_shape import PassShape


class Granularity(enum.StrEnum):
    """Where a forward pass can stop."""

    OPERATOR = "operator"
    """Before every operator, to go on with it."""
    COMPILED = "compiled"
    """Of a compiled pass: before and behind the attention of each layer."""
    REPLAYED = "replayed"
    """The servers' `operator`: at seven places in a layer, to go on from the start of the half layer."""
    SEGMENT = "segment"
    """Before a layer's attention, before its MLP, and between token segments of the MLP."""
    SUBLAYER = "sublayer"
    LAYER = "layer"
    NONE = "none"


REFERENCE_TOKENS: Final = 4096
LARGE_TOKENS: Final = 8192
"""With so many, every operator's time grows in proportion to the tokens."""
_RESUMABLE: Final = (0, 1, 4)
"""Of `REPLAYED`: the entry of a layer, its attention, its MLP."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What the operators' table does not say; by default of an A100 with NVLink.

    Attributes:
        peak_flops: Of one GPU, dense 16-bit.
        attention_fraction: Of the peak, reached by prefill attention.
        link_bytes_ps: Bus bandwidth of an all-reduce between the ranks, bytes per second.
        link_latency_s: Time of an empty all-reduce.
    """

    peak_flops: float = 312e12
    attention_fraction: float = 0.5
    link_bytes_ps: float = 235e9
    link_latency_s: float = 20e-6


class PassTimes(msgspec.Struct, frozen=True):
    """The times of one forward pass.

    Attributes:
        head_s: From its issue to its first operator: scheduling, input preparation.
        ends: End of each stretch between two boundaries within a layer, seconds from the layer's start.
        resumable: The boundaries within a layer where a stopped pass goes on, the last that it has reached;
            empty if it goes on wherever it stops.
    """

    head_s: float
    layer_s: float
    ends: tuple[float, ...]
    layers: int
    resumable: tuple[int, ...] = ()

    @property
    def total_s(self) -> float:
        """The whole pass."""
        return self.head_s + self.layer_s * self.layers

    @property
    def boundaries(self) -> int:
        """Places where it can stop."""
        return len(self.ends) * self.layers

    def done(self, boundary: int) -> float:
        """The fraction of its work that lies before a boundary."""
        return (self.at_s(boundary) - self.head_s) / (self.layer_s * self.layers)

    def resumes_at(self, boundary: int) -> int:
        """Where a pass goes on that stopped at a boundary."""
        if not self.resumable:
            return boundary
        part = boundary % len(self.ends)
        return boundary - part + max(start for start in self.resumable if start <= part)

    def at_s(self, boundary: int) -> float:
        """When the device reaches a boundary, seconds from the issue."""
        layer, part = divmod(boundary, len(self.ends))
        return self.head_s + layer * self.layer_s + (self.ends[part - 1] if part else 0.0)

    def passed(self, elapsed_s: float) -> int:
        """The last boundary that the device has reached; -1 before the first."""
        into_s = elapsed_s - self.head_s
        if into_s < 0:
            return -1
        layer = min(self.layers - 1, int(into_s / self.layer_s))
        rest_s = into_s - layer * self.layer_s
        part = bisect_right(self.ends, rest_s + 1e-12, hi=len(self.ends) - 1)
        return layer * len(self.ends) + part


@dataclass(slots=True)
class CostModel:
    """Times of the passes of one model on one kind of replica.

    Attributes:
        operators: Times of its operators on each rank.
        mlp_segments: Into how many token segments `SEGMENT` cuts an MLP.
        segment_tokens: An MLP of fewer tokens per segment is not cut.
        step_s: Host time per pass that the device does not work: scheduling, preparing inputs, sampling.
        check_s: Time that a boundary adds to the pass although nobody stops.
        launch_s: What no pass takes less than: the device waits for the host to launch an eager pass, or it
            was measured.
    """

    shape: ModelShape
    operators: OperatorTimes
    accelerator: Accelerator = field(default_factory=Accelerator)
    tensor_parallel: int = 1
    granularity: Granularity = Granularity.SUBLAYER
    mlp_segments: int = 4
    segment_tokens: int = 512
    step_s: float = 0.003
    check_s: float = 0.0
    launch_s: float = 0.0
    _by_tokens: dict[int, tuple[dict[str, float], float]] = field(default_factory=dict)

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        """Seconds of a prompt that runs alone in one pass, behind a context whose KV is there."""
        return self.times([(tokens, context_tokens)]).total_s

    def added_s(self, tokens: int, context_tokens: int = 0) -> float:
        """Seconds that a prompt behind a context adds to a large pass, which no sharing makes less."""
        large = (LARGE_TOKENS, 0)
        return self.times([large, (tokens, context_tokens)]).total_s - self.times([large]).total_s

    def times(self, members: Sequence[tuple[int, int]]) -> PassTimes:
        """The times of a pass; of each prefill in it, tokens to compute and tokens before them with KV."""
        tokens = sum(new for new, _ in members)
        times, reduce_s = self._of(tokens)
        work = sum(new * (context + new / 2) for new, context in members)
        pair_flops = 4 * self.shape.head_dim * self.shape.heads / self.tensor_parallel
        flops_ps = self.accelerator.peak_flops * self.accelerator.attention_fraction
        attention_s = work * (pair_flops / flops_ps)
        parts = self._parts(tokens, times, attention_s, reduce_s)
        late = max(1.0, self.launch_s / (sum(parts) * self.shape.layers))
        ends = tuple(accumulate(part * late + self.check_s for part in parts))
        resumable = _RESUMABLE if self.granularity is Granularity.REPLAYED else ()
        return PassTimes(self.step_s, ends[-1], ends, self.shape.layers, resumable)

    def shape_of_passes(self) -> PassShape:
        """Where the boundaries lie, with the operators weighed as they are for `REFERENCE_TOKENS`."""
        times, reduce_s = self._of(REFERENCE_TOKENS)
        tokens = self._parts(REFERENCE_TOKENS, times, 0.0, reduce_s)
        with_attention = self._parts(REFERENCE_TOKENS, times, 1.0, reduce_s)
        pairs = [both - alone for both, alone in zip(with_attention, tokens, strict=True)]
        return PassShape.of([*tokens] * self.shape.layers, [*pairs] * self.shape.layers)

    def _of(self, tokens: int) -> tuple[dict[str, float], float]:
        """The times of the operators, and of an all-reduce between the ranks."""
        if (known := self._by_tokens.get(tokens)) is None:
            times = {name: self.operators[name](tokens) for name in OPERATORS}
            ranks, link = self.tensor_parallel, self.accelerator
            moved = 2 * (ranks - 1) / ranks * tokens * self.shape.hidden * 2
            reduce_s = link.link_latency_s + moved / link.link_bytes_ps if ranks > 1 else 0.0
            self._by_tokens[tokens] = known = times, reduce_s
        return known

    def _parts(
        self, tokens: int, times: dict[str, float], attention_s: float, reduce_s: float
    ) -> Sequence[float]:
        """The stretches between the boundaries of a layer."""
        before = [times[name] for name in BEFORE_ATTENTION]
        after = [times[name] for name in AFTER_ATTENTION]
        mlp = [times[name] for name in MLP]
        after[-1] += reduce_s
        mlp[0] += times["add"]
        mlp[-1] += times["add"] + reduce_s
        match self.granularity:
            case Granularity.OPERATOR:
                return [*before, attention_s, *after, *mlp]
            case Granularity.COMPILED:
                return [attention_s, sum(after) + sum(mlp) + sum(before)]
            case Granularity.REPLAYED:
                norm_s, *rest = before
                second_norm_s, up_s, *down = mlp
                return [norm_s, sum(rest), attention_s, sum(after) + second_norm_s, up_s, *down]
            case Granularity.SUBLAYER:
                return [sum(before) + attention_s + sum(after), sum(mlp)]
            case Granularity.SEGMENT:
                return [sum(before) + attention_s + sum(after), *self._segments(tokens, sum(mlp))]
            case Granularity.LAYER | Granularity.NONE:
                return [sum(before) + attention_s + sum(after) + sum(mlp)]

    def _segments(self, tokens: int, whole_s: float) -> Sequence[float]:
        """An MLP in parts of the tokens; for each part the weights are read anew."""
        part_tokens = math.ceil(tokens / self.mlp_segments)
        if part_tokens < self.segment_tokens:
            return [*[0.0] * (self.mlp_segments - 1), whole_s]
        times, reduce_s = self._of(part_tokens)
        part_s = sum(times[name] for name in MLP) + 2 * times["add"] + reduce_s
        return [part_s] * self.mlp_segments
