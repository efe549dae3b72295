"""Times of the operators of one decoder layer, by the number of tokens.

Owns the built-in lines, the reading of measured tables, and what follows for a model of another shape.
Attention is not in here: it depends on more than the number of tokens (see `simulator.cost.passes`).

The built-in lines are least-squares fits, relative error, to the medians that Vidur (MLSys'24, MIT licence)
measured on an A100: the time of a layer is met within 2.6 % on average (Llama-3-8B, one GPU) and 2.3 %
(Llama-3-70B, four).
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Final, TypeAlias

import numpy as np

OperatorTime: TypeAlias = Callable[[int], float]
"""Seconds of one operator for so many tokens."""
OperatorTimes: TypeAlias = Mapping[str, OperatorTime]

BEFORE_ATTENTION: Final = ("input_layernorm", "attn_pre_proj", "attn_rope")
AFTER_ATTENTION: Final = ("attn_post_proj",)
MLP: Final = ("post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj")
OPERATORS: Final = (*BEFORE_ATTENTION, *AFTER_ATTENTION, *MLP, "add")
"""In the order in which a layer runs them; attention comes before `attn_post_proj`, `add` runs twice."""
ATTENTION: Final = "attn_prefill"
"""Attention of a prompt that runs alone in its pass: a column that a table of measured times may have."""


class OperatorTableError(ValueError):
    """A table of operator times that cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a decoder's times depend on.

    Attributes:
        hidden: Width of the hidden states.
        intermediate: Width of the MLP.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache of one token in 16-bit precision, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    def work_of(self, operator: str) -> int:
        """What the time of an operator is proportional to: weights of a matrix, else elements of a token."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "attn_pre_proj": self.hidden * (query + 2 * key_value),
            "attn_rope": query + key_value,
            "attn_post_proj": query * self.hidden,
            "mlp_up_proj": 2 * self.hidden * self.intermediate,
            "mlp_act": self.intermediate,
            "mlp_down_proj": self.intermediate * self.hidden,
        }.get(operator, self.hidden)


LLAMA_3_8B: Final = ModelShape(layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8)
QWEN_2_5_14B: Final = ModelShape(layers=48, hidden=5120, intermediate=13824, heads=40, kv_heads=8)
LLAMA_3_70B: Final = ModelShape(layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8)


@dataclass(frozen=True, slots=True)
class Line:
    """A time that is never below a floor: that of reading the weights, or of launching."""

    floor_s: float
    fixed_s: float
    per_token_s: float

    def __call__(self, tokens: int) -> float:
        """Seconds for `tokens` tokens."""
        return max(self.floor_s, self.fixed_s + self.per_token_s * tokens)

    def times(self, factor: float) -> Line:
        """The line of an operator with `factor` times the work."""
        return Line(self.floor_s * factor, self.fixed_s * factor, self.per_token_s * factor)


def _lines(**milliseconds: tuple[float, float, float]) -> dict[str, Line]:
    """Lines from (floor in ms, fixed part in ms, ms per 1,000 tokens)."""
    return {
        name: Line(floor / 1e3, fixed / 1e3, slope / 1e6)
        for name, (floor, fixed, slope) in milliseconds.items()
    }


LLAMA_3_8B_A100: Final[Mapping[str, Line]] = _lines(
    input_layernorm=(0.004, 0, 0.02508),
    attn_pre_proj=(0.035, 0.0163, 0.23945),
    attn_rope=(0.004, 0, 0.02343),
    attn_post_proj=(0.026, 0.0154, 0.15293),
    post_attention_layernorm=(0.005, 0, 0.02483),
    mlp_up_proj=(0.155, 0.0902, 1.00976),
    mlp_act=(0.012, 0.0051, 0.08316),
    mlp_down_proj=(0.082, 0.0484, 0.5072),
    add=(0.002, 0, 0.01356),
)
LLAMA_3_70B_A100_TP4: Final[Mapping[str, Line]] = _lines(
    input_layernorm=(0.007, 0, 0.04419),
    attn_pre_proj=(0.035, 0.0269, 0.18244),
    attn_rope=(0.003, 0.0006, 0.01132),
    attn_post_proj=(0.027, 0.0108, 0.15923),
    post_attention_layernorm=(0.007, 0, 0.04562),
    mlp_up_proj=(0.161, 0.1202, 0.96417),
    mlp_act=(0.005, 0.0009, 0.04231),
    mlp_down_proj=(0.079, 0.0374, 0.49967),
    add=(0.003, 0, 0.02695),
)


def scaled(times: Mapping[str, Line], measured: ModelShape, shape: ModelShape) -> dict[str, Line]:
    """Lines of a model that was not measured, from one that was, in proportion to the work."""
    return {name: line.times(shape.work_of(name) / measured.work_of(name)) for name, line in times.items()}


class Measured:
    """A measured operator, interpolated between lengths and extended in proportion beyond the longest."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self._tokens, self._seconds = zip(*sorted(points), strict=True)

    def __call__(self, tokens: int) -> float:
        """Seconds for `tokens` tokens."""
        beyond: float = max(1.0, tokens / self._tokens[-1])
        return beyond * float(np.interp(tokens, self._tokens, self._seconds))


def read_operator_times(path: Path, device: str, model: str, tensor_parallel: int) -> dict[str, Measured]:
    """Read a table of medians: columns device, model, tensor_parallel, num_tokens and OPERATOR_ms."""
    if not path.is_file():
        raise OperatorTableError(f"{path}: there is no such file")
    found: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in OPERATORS}
    have = set()
    with path.open(newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), start=2):
            try:
                key = row["device"], row["model"], int(row["tensor_parallel"])
                have.add(key)
                if key == (device, model, tensor_parallel):
                    for name in OPERATORS:
                        found[name][int(row["num_tokens"])].append(float(row[f"{name}_ms"]) / 1e3)
            except (KeyError, ValueError, TypeError) as error:
                raise OperatorTableError(f"{path}, line {number}: cannot be read ({error!r})") from None
    if (device, model, tensor_parallel) not in have:
        known = ", ".join(f"{d} {m} tp{t}" for d, m, t in sorted(have)) or "nothing"
        raise OperatorTableError(f"{path}: no times of {device} {model} tp{tensor_parallel}; it has {known}")
    return {
        name: Measured([(tokens, median(times)) for tokens, times in by_tokens.items()])
        for name, by_tokens in found.items()
    }


def measured_device(path: Path, model: str, tensor_parallel: int, usual: str) -> str:
    """The device of a table's times of a model: the usual one if it has it, else the only one."""
    found = {row.get("device", "") for row in _rows(path, model, tensor_parallel)}
    if usual in found or not found:
        return usual
    if len(found) > 1:
        names = ", ".join(sorted(found))
        raise OperatorTableError(f"{path}: times of {model} tp{tensor_parallel} on several devices: {names}")
    return found.pop()


def read_attention_flops_ps(
    path: Path, device: str, model: str, tensor_parallel: int, shape: ModelShape
) -> float | None:
    """FLOPs per second that causal attention reaches at the longest prompt; None when it was not measured."""
    column = f"{ATTENTION}_ms"
    rows = [row for row in _rows(path, model, tensor_parallel) if row.get("device") == device]
    try:
        measured = [(int(row["num_tokens"]), float(row[column]) / 1e3) for row in rows if row.get(column)]
    except (KeyError, ValueError) as error:
        raise OperatorTableError(f"{path}: {column} cannot be read ({error!r})") from None
    if not measured:
        return None
    longest, seconds = max(measured, key=itemgetter(0))
    return 4 * shape.head_dim * shape.heads / tensor_parallel * longest**2 / 2 / seconds


def _rows(path: Path, model: str, tensor_parallel: int) -> list[dict[str, str]]:
    if not path.is_file():
        raise OperatorTableError(f"{path}: there is no such file")
    with path.open(newline="") as lines:
        key = model, str(tensor_parallel)
        return [row for row in csv.DictReader(lines) if (row.get("model"), row.get("tensor_parallel")) == key]
