"""Accelerators by what they can do, and what follows for prefill and decode of a model on them.

Owns the numbers of the built-in ones, from their data sheets, and the scaling of measured operator times to
another accelerator, model or number of ranks. An accelerator that was not measured is taken to reach the same
fractions of its peak and of its memory bandwidth as the measured A100.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from simulator.cost.decode_steps import DecodeModel
from simulator.cost.operators import (
    LLAMA_3_8B,
    LLAMA_3_8B_A100,
    LLAMA_3_70B,
    LLAMA_3_70B_A100_TP4,
    OPERATORS,
    QWEN_2_5_14B,
    Line,
    ModelShape,
    OperatorTimes,
    scaled,
)
from simulator.cost.passes import Accelerator, CostModel
from slo.predict.prefill_time import PrefillPredictor

MATRICES: Final = frozenset({"attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj"})
"""Operators that compute; the others move memory."""
SHARDED: Final = MATRICES | {"attn_rope", "mlp_act"}
"""Operators whose work is divided among the ranks."""
VOCABULARY: Final = 128_256
"""Rows of the output matrix, which a decode step reads too; Llama 3's."""
WORKSPACE: Final = 0.1
"""Fraction of an accelerator's memory that is neither weights nor KV cache."""
BANDWIDTH_REACHED: Final = 0.8
"""Fraction of the memory bandwidth that reading weights and KV cache reaches."""
FLOPS_REACHED: Final = 0.5
"""Fraction of the peak that the matrices of a large decode batch reach."""
_DECODE_STEP_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class Chip:
    """One accelerator.

    Attributes:
        peak_flops: Dense, 16-bit.
        link_bytes_ps: Bus bandwidth of an all-reduce between ranks.
    """

    name: str
    peak_flops: float
    memory_bytes_ps: float
    memory_bytes: float
    link_bytes_ps: float


A100: Final = Chip("a100", 312e12, 2.039e12, 80e9, 235e9)
"""A100 SXM with 80 GB (NVIDIA's data sheet); the all-reduce as measured by others over NVLink 3."""
H100: Final = Chip("h100", 989e12, 3.35e12, 80e9, 370e9)
"""H100 SXM with 80 GB (NVIDIA's data sheet); the all-reduce in proportion to NVLink 4."""
CHIPS: Final[Mapping[str, Chip]] = {chip.name: chip for chip in (A100, H100)}
MODELS: Final[Mapping[str, ModelShape]] = {
    "llama-3-8b": LLAMA_3_8B,
    "qwen2.5-14b": QWEN_2_5_14B,
    "llama-3-70b": LLAMA_3_70B,
    "smollm2-135m": ModelShape(30, 576, 1536, 9, 3, head_dim=64),
}


def weight_bytes(shape: ModelShape) -> int:
    """Bytes of weights that a decode step reads: all layers and the output matrix, 16 bits."""
    layer = sum(shape.work_of(name) for name in MATRICES)
    return 2 * (shape.layers * layer + VOCABULARY * shape.hidden)


def kv_tokens(shape: ModelShape, chip: Chip, tensor_parallel: int) -> int:
    """Tokens whose KV fits beside the weights on all ranks together; none or less when these do not fit."""
    held = weight_bytes(shape) + 2 * VOCABULARY * shape.hidden
    room = tensor_parallel * chip.memory_bytes * (1 - WORKSPACE) - held
    return int(room // _kv_bytes_held(shape, tensor_parallel))


def _kv_bytes_held(shape: ModelShape, tensor_parallel: int) -> float:
    """Of one token, on all ranks together: more ranks than KV heads hold copies of these."""
    return shape.kv_bytes_per_token * max(1.0, tensor_parallel / shape.kv_heads)


def cost_model(shape: ModelShape, chip: Chip, tensor_parallel: int) -> CostModel:
    """Times of prefill passes, scaled from those of A100s: of four for several ranks, else of one."""
    measured, lines, ranks = LLAMA_3_8B, LLAMA_3_8B_A100, 1
    if tensor_parallel > 1:
        measured, lines, ranks = LLAMA_3_70B, LLAMA_3_70B_A100_TP4, 4
    operators: dict[str, Line] = {}
    for name, line in scaled(lines, measured, shape).items():
        share = ranks / tensor_parallel if name in SHARDED else 1.0
        moving = A100.memory_bytes_ps / chip.memory_bytes_ps
        working = A100.peak_flops / chip.peak_flops if name in MATRICES else moving
        operators[name] = Line(
            line.floor_s * share * moving, line.fixed_s * share * moving, line.per_token_s * share * working
        )
    accelerator = Accelerator(peak_flops=chip.peak_flops, link_bytes_ps=chip.link_bytes_ps)
    return CostModel(shape, operators, accelerator, tensor_parallel)


def calibrated_cost_model(shape: ModelShape, predictor: PrefillPredictor) -> CostModel:
    """Times of prefill passes from a measured curve, its linear part spread over operators as on an A100.

    Attention takes what the curve says of pairs; all-reduces and host time are in the linear part. No pass
    takes less than the curve's floor.
    """
    at = 2048
    parts = {name: line(at) for name, line in scaled(LLAMA_3_8B_A100, LLAMA_3_8B, shape).items()}
    whole = sum(parts.values()) + parts["add"]  # a layer adds twice
    operators: OperatorTimes = {
        name: Line(
            0.0,
            predictor.fixed_s / shape.layers * parts[name] / whole,
            predictor.per_token_s / shape.layers * parts[name] / whole,
        )
        for name in OPERATORS
    }
    flops = 4 * shape.head_dim * shape.heads * shape.layers
    peak_flops = flops / predictor.per_pair_s if predictor.per_pair_s > 0 else float("inf")
    measured = Accelerator(peak_flops, 1.0, link_bytes_ps=float("inf"), link_latency_s=0.0)
    return CostModel(shape, operators, measured, step_s=0.0, launch_s=predictor.floor_s)


def decode_model(
    shape: ModelShape, chip: Chip, tensor_parallel: int, kv: int | None = None, max_batch: int = 256
) -> DecodeModel:
    """Times of decode steps: weights and KV are read once a step, at a fraction of the memory bandwidth.

    The KV memory holds `kv` tokens, by default what fits beside the weights.
    """
    bandwidth = tensor_parallel * chip.memory_bytes_ps * BANDWIDTH_REACHED
    read = weight_bytes(shape)
    reduce_s = 0.0 if tensor_parallel == 1 else 2 * shape.layers * Accelerator().link_latency_s
    return DecodeModel(
        weights_s=read / bandwidth,
        request_s=read / (tensor_parallel * chip.peak_flops * FLOPS_REACHED),
        kv_token_s=_kv_bytes_held(shape, tensor_parallel) / bandwidth,
        fixed_s=_DECODE_STEP_S + reduce_s,
        kv_tokens=kv_tokens(shape, chip, tensor_parallel) if kv is None else kv,
        max_batch=max_batch,
    )
