"""Comparisons that can be called by name, with what they rest on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from simulator.arms.arms import ABORT_ARMS, PAPER_ARMS, TIER_ARMS
from simulator.cost.operators import (
    LLAMA_3_8B,
    LLAMA_3_8B_A100,
    LLAMA_3_70B,
    LLAMA_3_70B_A100_TP4,
    QWEN_2_5_14B,
    ModelShape,
    OperatorTimes,
    measured_device,
    read_attention_flops_ps,
    read_operator_times,
    scaled,
)
from simulator.cost.passes import CostModel
from simulator.replica.hardware import Hardware
from simulator.workload.arrivals import Kind, LengthClass, Mix, Trace, TraceError, Workload, read_trace
from slo.tiers import BACKGROUND, PREMIUM, STANDARD

_OPERATORS: Final = (
    "Operator times are lines through Vidur's medians on an A100; attention runs at 50 % of the peak of 312 "
    "TFLOP/s."
)
_STEP: Final = "Every pass costs 3 ms on the host besides (scheduling, input preparation), in every arm."
_PEERS: Final = (
    "The peers' checks and synchronisations cost nothing; for each rate and level, chunk sizes and the "
    "tokens up to which prompts share a pass are the best of several for the peers, none of them between "
    "2,048 and 8,192, where SlackServe's own order in chunks has four more, and the default for SlackServe."
)
_LENGTHS: Final = (
    "Prompt lengths are log-normal about the published means (sigma 0.6, 0.3, 0.5, 0.8); the trace itself "
    "is not public."
)
_BLOG_LENGTHS: Final = (
    "Prompt lengths are log-normal, mean 1,400 tokens, sigma 0.8, so that the load is near the blog's: its "
    "lengths are known by their range only."
)
_BLOG_ORDER: Final = (
    "Checks and all-reduces cost nothing; the order among waiting prompts is S-EDF in every arm of the blog."
)
_PREFIXES: Final = (
    "Prefixes are taken from the trace's block hashes, where it has any; every replica caches what its KV "
    "memory holds."
)


@dataclass(frozen=True, slots=True)
class Preset:
    """A comparison.

    Attributes:
        model: The name of its model in Vidur's tables; empty when it is not in them.
        rates_rps: Rates at which it is looked at; by load, if there are none.
        objective_ms: By kind; None where it differs from request to request.
    """

    name: str
    title: str
    description: str
    assumptions: Sequence[str]
    hardware: Hardware
    workload: Workload
    objective_ms: Mapping[str, float | None]
    model: str = ""
    arms: Sequence[str] = PAPER_ARMS
    rates_rps: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class _Model:
    title: str
    shape: ModelShape
    operators: OperatorTimes
    tensor_parallel: int
    kv_tokens: int
    objectives_s: tuple[float, float, float, float]
    vidur: str = ""
    note: str = ""

    def hardware(self) -> Hardware:
        cost = CostModel(self.shape, self.operators, tensor_parallel=self.tensor_parallel)
        return Hardware(cost, self.kv_tokens)


_MODELS: Final = {
    "8b": _Model(
        "Llama-3-8B on one A100",
        LLAMA_3_8B,
        LLAMA_3_8B_A100,
        1,
        400_000,
        (0.25, 0.5, 4.0, 6.0),
        "Meta-Llama-3-8B",
    ),
    "14b": _Model(
        "Qwen2.5-14B on one A100",
        QWEN_2_5_14B,
        scaled(LLAMA_3_8B_A100, LLAMA_3_8B, QWEN_2_5_14B),
        1,
        180_000,
        (0.4, 0.8, 6.5, 9.0),
        note="Qwen2.5-14B was not measured: its operators are Llama-3-8B's, scaled by weights and widths.",
    ),
    "70b": _Model(
        "Llama-3-70B on four A100",
        LLAMA_3_70B,
        LLAMA_3_70B_A100_TP4,
        4,
        400_000,
        (1.0, 2.0, 15.0, 18.0),
        "Meta-Llama-3-70B",
        "All-reduces move their bytes at 235 GB/s and take at least 20 µs.",
    ),
}
_KINDS: Final = {
    "text": (0.69, 640, 0.6),
    "image": (0.07, 395, 0.3),
    "search": (0.20, 5057, 0.5),
    "file": (0.03, 3561, 0.8),
}
"""Share, mean prompt tokens and sigma."""


def qwen_trace_like(objectives_s: Sequence[float]) -> Mix:
    """The mix that FlowPrefill's authors show of their trace: shares and mean lengths are theirs."""
    rows = zip(_KINDS.items(), objectives_s, strict=True)
    return Mix({kind: Kind(share, mean, s, sigma=sigma) for (kind, (share, mean, sigma)), s in rows})


def _flowprefill(size: str) -> Preset:
    model = _MODELS[size]
    return Preset(
        name=f"flowprefill-{size}",
        title=f"Mixed prompts, {model.title}",
        description=(
            "One prefill replica under the QwenTrace-like mix of FlowPrefill (arXiv 2602.16603): 69 % text, "
            "7 % image, 20 % search, 3 % file, Poisson arrivals, the paper's objectives for the first "
            "token."
        ),
        assumptions=(_OPERATORS, *([model.note] if model.note else []), _LENGTHS, _STEP, _PEERS),
        hardware=model.hardware(),
        workload=qwen_trace_like(model.objectives_s),
        objective_ms=dict(zip(_KINDS, (s * 1e3 for s in model.objectives_s), strict=True)),
        model=model.vidur,
    )


def _blog() -> Preset:
    model = _MODELS["70b"]
    hardware = model.hardware()
    urgent = Kind(0.2, 1400, None, PREMIUM, sigma=0.8, range_tokens=(256, 8000), ttft_scale=(1.0, 1.3))
    relaxed = replace(urgent, share=0.8, tier=STANDARD, ttft_scale=(3.0, 10.0))
    kinds = {"urgent": urgent, "relaxed": relaxed}
    return Preset(
        name="blog-70b",
        title="The abort variant that gained nothing, Llama-3-70B on four A100",
        description=(
            "One prefill replica under chat prompts of 256 to 8,000 tokens, Poisson arrivals at 2, 4 and 6 "
            "requests/s; 20 % must have their first token within 1.0 to 1.3 times their own prefill time, "
            "the others within 3 to 10 times. The variant aborts a pass for a more urgent prompt and starts "
            "it over; arrivals during a pass are not seen, victims run in one pass with those that preempted "
            "them, and slack counts the whole prefill of what runs. Each condition is lifted."
        ),
        assumptions=(_OPERATORS, model.note, _BLOG_LENGTHS, _STEP, _BLOG_ORDER),
        hardware=hardware,
        workload=Mix(kinds, prefill_s=hardware.cost.prefill_s),
        objective_ms=dict.fromkeys(kinds, None),
        model=model.vidur,
        arms=ABORT_ARMS,
        rates_rps=(2.0, 4.0, 6.0),
    )


def _tiers() -> Preset:
    model = _MODELS["70b"]
    kinds = {
        "premium": Kind(0.25, 300, 0.4, PREMIUM),
        "standard": Kind(0.50, 800, 1.5, STANDARD),
        "background": Kind(0.25, 2500, 10.0, BACKGROUND, sigma=0.8),
    }
    return Preset(
        name="tiers-70b",
        title="Three tiers, Llama-3-70B on four A100",
        description=(
            "One prefill replica under a quarter of premium prompts (mean 300 tokens, 0.4 s to the first "
            "token), half standard (800, 1.5 s) and a quarter background (2,500, 10 s): first come first "
            "served, by tier, by our order without preemption, with it, and with admission by shares "
            "besides."
        ),
        assumptions=(_OPERATORS, model.note, "Prompt lengths are log-normal.", _STEP, _PEERS),
        hardware=model.hardware(),
        workload=Mix(kinds),
        objective_ms={
            name: None if kind.ttft_s is None else kind.ttft_s * 1e3 for name, kind in kinds.items()
        },
        model=model.vidur,
        arms=TIER_ARMS,
    )


PRESETS: Final[Mapping[str, Preset]] = {
    preset.name: preset for preset in (*map(_flowprefill, _MODELS), _blog(), _tiers())
}

TAKE_TRACES: Final = tuple(name for name, preset in PRESETS.items() if "text" in preset.objective_ms)
"""Those with objectives for text, search and files."""


def on_trace(preset: Preset, path: Path) -> Preset:
    """The same replica under a recorded trace.

    Prompts of up to 2,048 tokens are taken for text, up to 8,192 for search, longer ones for files.

    Raises:
        TraceError: when the trace cannot be read, or the preset has no objectives for these kinds.
    """
    if preset.name not in TAKE_TRACES:
        raise TraceError(
            f"{preset.name} has no objectives for the requests of a trace; {', '.join(TAKE_TRACES)} have"
        )
    classes = []
    for kind, max_tokens in (("text", 2048), ("search", 8192), ("file", math.inf)):
        objective_ms = preset.objective_ms[kind]
        assert objective_ms is not None
        classes.append(LengthClass(max_tokens, kind, objective_ms / 1e3, STANDARD))
    return replace(
        preset,
        name=f"{preset.name}@{path.stem}",
        title=f"{path.stem}, {preset.title.partition(', ')[2]}",
        description=(
            f"One prefill replica under the recorded trace {path.name}, its time stretched to each rate. "
            "Prompts of up to 2,048 tokens have the objective of text, up to 8,192 that of search, longer "
            "ones that of files, but at least twice what the prompt takes alone."
        ),
        assumptions=(*preset.assumptions[:1], _PREFIXES, *preset.assumptions[-2:]),
        workload=Trace(read_trace(path), classes, preset.hardware.cost.prefill_s),
        objective_ms=dict.fromkeys((item.kind for item in classes), None),
    )


def with_operator_times(preset: Preset, path: Path) -> Preset:
    """The same preset with a table of measured operators instead of the built-in lines."""
    cost = preset.hardware.cost
    model, ranks = preset.model or preset.title, cost.tensor_parallel
    device = measured_device(path, model, ranks, usual="a100")
    operators = read_operator_times(path, device, model, ranks)
    accelerator = cost.accelerator
    if (flops_ps := read_attention_flops_ps(path, device, model, ranks, cost.shape)) is not None:
        accelerator = replace(accelerator, peak_flops=flops_ps, attention_fraction=1.0)
    cost = replace(cost, operators=operators, accelerator=accelerator, _by_tokens={})
    return replace(
        preset,
        hardware=replace(preset.hardware, cost=cost),
        assumptions=(f"Operator times are the medians in {path.name}.", *preset.assumptions[1:]),
    )
