"""Times of a layer's operators and of whole passes, as profiles that the simulator reads.

`operators.csv` has Vidur's columns and one more, `attn_prefill_ms`: attention of a prompt that runs alone
(`slackserve simulate --operator-times`). `profile.json` is the line through whole passes that
`slackserve calibrate` would write (`profile:` in a fleet file).
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.decoder import Decoder
from benchmarks.gpu.device import Device
from benchmarks.gpu.variants import Bench
from simulator.cost.operators import ATTENTION, OPERATORS
from slo.files.profile import PROFILE_FORMAT
from slo.predict.prefill_time import Sample, fit

WARM_UP = 2


def time_operators(
    decoder: Decoder, device: Device, lengths: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Median milliseconds of each operator of a layer, one row for each number of tokens."""
    return [
        {"num_tokens": tokens}
        | {f"{name}_ms": _median_ms(work, device, repeats) for name, work in _works(decoder, tokens).items()}
        for tokens in lengths
    ]


def time_passes(bench: Bench, lengths: Sequence[int], repeats: int) -> list[Sample]:
    """Whole passes of the bare decoder."""
    bench.use(None)
    samples = []
    for tokens in lengths:
        prompt = bench.prompt("profile", tokens)
        bench.seconds(None, prompt)
        samples += [Sample(tokens, bench.seconds(None, prompt)) for _ in range(repeats)]
    return samples


def write_operators(path: Path, device: str, model: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a table of operator times."""
    times = [f"{name}_ms" for name in (*OPERATORS, ATTENTION)]
    with path.open("w", newline="") as lines:
        table = csv.DictWriter(lines, ["device", "model", "tensor_parallel", "num_tokens", *times])
        table.writeheader()
        table.writerows({"device": device, "model": model, "tensor_parallel": 1} | dict(row) for row in rows)


def write_profile(path: Path, samples: Sequence[Sample], about: Mapping[str, Any]) -> None:
    """Write the line through whole passes."""
    result = fit(samples, has_floor=True)
    values = {
        "format": PROFILE_FORMAT,
        "about": dict(about),
        "predictor": asdict(result.predictor),
        "r_squared": result.r_squared,
        "mape": result.mape,
        "samples": [asdict(sample) for sample in samples],
    }
    path.write_text(json.dumps(values, indent=2) + "\n")


def _works(decoder: Decoder, tokens: int) -> dict[str, Callable[[], Any]]:
    """What to run for each operator, on random values."""
    layer, shape, weight = decoder.layers[0], decoder.shape, decoder.embed_tokens
    attention, mlp = layer.self_attn, layer.mlp

    def values(*size: int) -> torch.Tensor:
        return torch.randn(tokens, *size, dtype=weight.dtype, device=weight.device)

    hidden, residual = values(shape.hidden), values(shape.hidden)
    gate_up, inner = values(2 * shape.intermediate), values(shape.intermediate)
    query = values(shape.heads, shape.head_dim)
    key, value = values(shape.kv_heads, shape.head_dim), values(shape.kv_heads, shape.head_dim)
    out = values(shape.heads * shape.head_dim)
    positions = torch.arange(tokens, device=weight.device)
    cache = torch.empty(2, *key.shape, dtype=weight.dtype, device=weight.device)

    def attend() -> torch.Tensor:
        attention.attn.cache = cache
        return attention.attn(query, key, value)

    return {
        "input_layernorm": lambda: layer.input_layernorm.normed(hidden),
        "attn_pre_proj": lambda: attention.qkv_proj(hidden),
        "attn_rope": lambda: attention.rotary_emb(positions, query, key),
        "attn_post_proj": lambda: attention.o_proj(out),
        "post_attention_layernorm": lambda: layer.post_attention_layernorm.normed(hidden),
        "mlp_up_proj": lambda: mlp.gate_up_proj(hidden),
        "mlp_act": lambda: mlp.act_fn(gate_up),
        "mlp_down_proj": lambda: mlp.down_proj(inner),
        "add": lambda: residual.add_(hidden),
        ATTENTION: attend,
    }


def _median_ms(work: Callable[[], Any], device: Device, repeats: int) -> float:
    """Of single runs, each between two marks in the device's stream."""
    for _ in range(WARM_UP):
        work()
    marks = []
    device.hold()
    for _ in range(repeats):
        before, after = device.timing_mark(), device.timing_mark()
        before.record()
        work()
        after.record()
        marks.append((before, after))
    device.wait()
    return statistics.median(before.elapsed_time(after) for before, after in marks)
