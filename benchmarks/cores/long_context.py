"""How soon a prefill behind a long context stops, with chunks of one length and with chunks that shrink.

Simulates one replica that prefills the last 8,192 tokens of prompts of 131,072 behind a cached context, over
and over, while short urgent prompts arrive at random. What shorter chunks cost is what a whole such prompt
takes alone, from its first token to its last. Then FlowPrefill's mixes, whose prompts are short: goodput, and
how soon their passes stop.

    python -m benchmarks.cores.long_context
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from benchmarks.report import print_rows, quantiles, write
from simulator.arms.arm import Arm
from simulator.arms.arms import SERVERS
from simulator.cost.accelerators import CHIPS, MODELS, cost_model
from simulator.cost.passes import Granularity
from simulator.replica.hardware import Hardware
from simulator.study.presets import PRESETS
from simulator.study.run import run
from simulator.study.study import Study
from simulator.workload.arrivals import Arrival
from slo.preemption.types import STOP_WITHIN_S
from slo.tiers import BACKGROUND, PREMIUM

PROMPT_TOKENS: Final = 131_072
NEW_TOKENS: Final = 8192
BLOCK_TOKENS: Final = 512
URGENT_TOKENS: Final = 64
URGENT_S: Final = 0.3
"""The objective of an urgent prompt: less than what is left of most passes, more than a stop takes."""
STOPS: Final = 400
SEED: Final = 1
MIXES: Final = ("flowprefill-8b", "flowprefill-14b", "flowprefill-70b")
REQUESTS: Final = 2000
RANKS: Final = {"llama-3-8b": 1, "llama-3-70b": 4}
CHUNKS: Final = {"8,192 tokens": math.inf, f"stop within {STOP_WITHIN_S * 1e3:.0f} ms": STOP_WITHIN_S}


def arrivals(prefill_s: float) -> Iterator[Arrival]:
    """The context, then its continuations, one in each `prefill_s`, and an urgent prompt besides."""
    rng = random.Random(SEED)
    context = tuple(range((PROMPT_TOKENS - NEW_TOKENS) // BLOCK_TOKENS))
    numbers = itertools.count()
    held = len(context) * BLOCK_TOKENS
    yield Arrival(next(numbers), 0.0, "context", held, 1, None, BACKGROUND, context, BLOCK_TOKENS)
    at_s = 100 * prefill_s
    for _ in range(STOPS):
        blocks = (*context, next(numbers) + len(context))
        yield Arrival(blocks[-1], at_s, "long", PROMPT_TOKENS, 1, None, BACKGROUND, blocks, BLOCK_TOKENS)
        urgent_s = at_s + rng.uniform(0.05, 0.8) * prefill_s
        yield Arrival(-blocks[-1], urgent_s, "urgent", URGENT_TOKENS, 1, URGENT_S, PREMIUM)
        at_s += 2 * prefill_s


def alone_s(arm: Arm, hardware: Hardware, tokens: int) -> float:
    """What a prompt takes on an idle replica."""
    (job,) = run(arm, hardware, [Arrival(0, 0.0, "long", tokens, 1, None, BACKGROUND)]).jobs
    return job.first_token_s


def row(chip: str, model: str, granularity: Granularity, chunks: str) -> dict[str, Any]:
    """What one replica does."""
    hardware = Hardware(cost_model(MODELS[model], CHIPS[chip], RANKS[model]))
    scheduling = replace(SERVERS, granularity=granularity, stop_within_s=CHUNKS[chunks])
    arm = Arm(chunks, chunks, scheduling.build)
    bound = scheduling.profile(hardware).bound
    context = PROMPT_TOKENS - NEW_TOKENS
    longest = (
        NEW_TOKENS if bound is None else min(NEW_TOKENS, bound.chunk_tokens(context, hardware.predictor()))
    )
    served = run(arm, hardware, [*arrivals(hardware.cost.prefill_s(NEW_TOKENS, context))])
    blocking_ms = [1e3 * seconds for seconds in served.replica.blocking_s]
    urgent = [job for job in served.jobs if job.arrival.kind == "urgent"]
    plain = Arm("", "", replace(scheduling, stop_within_s=math.inf).build)
    whole_s, whole_plain_s = (alone_s(each, hardware, PROMPT_TOKENS) for each in (arm, plain))
    short_s, short_plain_s = (alone_s(each, hardware, NEW_TOKENS) for each in (arm, plain))
    return {
        "accelerator": chip,
        "model": f"{model}, TP {RANKS[model]}",
        "stops at": granularity.value,
        "chunks": chunks,
        "chunk": int(longest),
        "stops": len(blocking_ms),
        "stop_ms": {**quantiles(blocking_ms, 50, 99), "max": max(blocking_ms)},
        "on time": 100 * sum(job.is_on_time for job in urgent) / len(urgent),
        "128k_s": whole_s,
        "128k_cost": 100 * (whole_s / whole_plain_s - 1),
        "8k_cost": 100 * (short_s / short_plain_s - 1),
    }


def on_mixes() -> list[dict[str, Any]]:
    """Goodput of the servers' defaults under short prompts, and how soon passes stop there."""
    rows = []
    for name in MIXES:
        found = Study(PRESETS[name], ["slackserve"], REQUESTS).findings(name).document()
        stops = found["blocking_ms"]["slackserve"]
        rows.append(
            {
                "preset": name,
                "goodput_rps": found["goodput_rps"]["slackserve"],
                "stop_ms": {part: stops[part] for part in ("mean", "p99", "max")},
            }
        )
    return rows


def main() -> None:
    """Simulate everything, print a table, write JSON."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = [
        row(chip, model, granularity, chunks)
        for chip in CHIPS
        for model in RANKS
        for granularity in (Granularity.REPLAYED, Granularity.COMPILED)
        for chunks in CHUNKS
    ]
    print_rows("stops behind 122,880 tokens", rows)
    mixes = on_mixes()
    print_rows("short prompts", mixes)
    settings = {"stops": STOPS, "seed": SEED, "urgent_tokens": URGENT_TOKENS, "urgent_s": URGENT_S}
    print(write("cores/long_context", {"settings": settings, "rows": rows, "mixes": mixes}))


if __name__ == "__main__":
    main()
