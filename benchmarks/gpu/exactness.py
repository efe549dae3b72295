"""Whether a pass that stopped and went on ends as it would have; what that costs, and what it keeps."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.decoder import KVCache, random_decoder
from benchmarks.gpu.device import Device
from benchmarks.gpu.variants import Bench, Fitted, Prompt, Variant
from benchmarks.report import quantiles
from prefill_node.worker.checkpoint import Checkpoint
from prefill_node.worker.forward import Signal
from simulator.cost.operators import ModelShape

_PAGE_BYTES = 4096
"""What a checkpoint may keep beside its rows: placeholders of what is not needed again."""


@dataclass(slots=True)
class StopAt:
    """A vote for a stop at one boundary."""

    boundary: int
    is_first_pass: bool = False

    def vote(self, step_id: int, boundary: int, wish: bool) -> bool:  # noqa: ARG002, FBT001 - the protocol
        """Whether this is where."""
        return boundary == self.boundary


def exactness(
    bench: Bench, fitted: Fitted, prompt: Prompt, other: Prompt, max_stops: int, rng: random.Random
) -> dict[str, Any]:
    """Stop at each boundary, or at `max_stops` random ones, run another prompt, go on, compare bit by bit.

    The layers that run after the stop must write the keys and values again: the cache is poisoned before.
    """
    bench.use(None)
    expected = _outcome(bench, None, prompt)
    count = fitted.count
    chosen = sorted(rng.sample(range(count), max_stops)) if count > max_stops else [*range(count)]
    bench.use(fitted)
    differing, largest_bytes = [], 0
    for boundary in chosen:
        for layer in prompt.cache.layers:
            layer.fill_(float("nan"))
        checkpoint = _stop(bench, fitted, prompt, boundary)
        bench.run(fitted, other)
        largest_bytes = max(largest_bytes, checkpoint.size_bytes)
        outcome = _outcome(bench, fitted, prompt, checkpoint)
        if not all(map(torch.equal, outcome, expected)):
            differing.append(boundary)
    limit = 2 * len(prompt) * bench.decoder.shape.hidden * bench.decoder.embed_tokens.element_size()
    return {
        "variant": fitted.variant.name,
        "tokens": len(prompt),
        "boundaries": count,
        "stopped_at": len(chosen),
        "bitwise_equal": len(chosen) - len(differing),
        "differing": differing,
        "checkpoint_bytes": largest_bytes,
        "two_rows_bytes": limit,
        "within_two_rows": largest_bytes <= limit + _PAGE_BYTES,
    }


def resume_overhead(
    bench: Bench, fitted: Fitted, prompt: Prompt, repeats: int, limit_s: float, rng: random.Random
) -> dict[str, Any]:
    """How much longer a pass takes that stops at a random boundary and goes on at once, than a whole one."""
    bench.use(fitted)
    added: list[float] = []
    until_s = time.monotonic() + limit_s
    for done in range(repeats):
        if done and time.monotonic() > until_s:
            break
        whole_s = bench.seconds(fitted, prompt)
        started_s = time.perf_counter()
        checkpoint = _stop(bench, fitted, prompt, rng.randrange(fitted.count))
        bench.device.wait()
        bench.run(fitted, prompt, checkpoint)
        bench.device.wait()
        added.append((time.perf_counter() - started_s - whole_s) * 1e3)
    return {
        "variant": fitted.variant.name,
        "tokens": len(prompt),
        "repeats": len(added),
        "added_ms": statistics.median(added),
        "quartiles_ms": [*quantiles(added, 25, 75).values()],
    }


def against_float64(
    shape: ModelShape,
    vocabulary: int,
    variant: Variant,
    device: Device,
    signal: Signal,
    seed: int,
    tokens: int,
) -> dict[str, Any] | None:
    """Relative error of a small model's bf16 logits to float64, undisturbed and stopped at each boundary."""
    decoder = random_decoder(shape, vocabulary, torch.bfloat16, device.torch, seed)
    exact = random_decoder(shape, vocabulary, torch.float64, device.torch, seed)
    exact.load_state_dict({name: value.double() for name, value in decoder.state_dict().items()})
    bench = Bench(decoder, device, signal, None, seed)
    if (fitted := bench.fit(variant)) is None:
        return None
    prompt = bench.prompt("small", tokens)
    reference = exact(prompt.tokens, KVCache(exact, len(prompt)))
    undisturbed = _error(decoder(prompt.tokens, prompt.cache), reference)
    bench.warm_up([fitted], prompt)
    bench.use(fitted)
    errors = [
        _error(bench.run(fitted, prompt, _stop(bench, fitted, prompt, boundary))[0], reference)
        for boundary in range(fitted.count)
    ]
    return {"variant": variant.name, "undisturbed": undisturbed, "stopped_most": max(errors)}


def _error(given: torch.Tensor, reference: torch.Tensor) -> float:
    return float((given.double() - reference).norm() / reference.norm())


def _stop(bench: Bench, fitted: Fitted, prompt: Prompt, boundary: int) -> Checkpoint:
    """Stop a fresh pass at a boundary."""
    forward, votes = fitted.forward, fitted.forward.votes
    forward.votes = StopAt(boundary)
    try:
        _, stop = bench.run(fitted, prompt)
    finally:
        forward.votes = votes
    assert stop is not None
    assert stop.checkpoint.boundary <= boundary
    return stop.checkpoint


def _outcome(
    bench: Bench, fitted: Fitted | None, prompt: Prompt, resume: Checkpoint | None = None
) -> list[torch.Tensor]:
    """What a whole pass leaves behind: logits, and the keys and values of all layers."""
    logits, stop = bench.run(fitted, prompt, resume)
    assert stop is None
    return [each.clone() for each in (logits, *prompt.cache.layers)]
