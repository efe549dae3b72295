"""What the whole serving path adds to the time to first token of a bare engine, at concurrency 1.

Serves a tiny random model with `slackserve serve` and runs the same model in a bare vLLM engine of this
process, on the cores that the prefill replica has. Requests alternate between the two, so that whatever else
the machine does hits both. Prints medians and quantiles of the TTFT of each and of their difference, and
where the time goes by the server's own log.

    python -m benchmarks.engines.serving_path [--requests 40]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.engines.local_server import Client, client, logged, served
from benchmarks.engines.offline_engine import async_engine
from benchmarks.engines.tiny_models import build_tiny_llama
from benchmarks.report import print_rows, quantiles, write
from deployments.local.cpu_plan import plan_cores
from simulator.workload.arrivals import Arrival
from slo.tiers import STANDARD

SEED = 59681
PORT = 18437
LENGTHS = (32, 512, 2048)
VOCABULARY = range(200)


def prompts(requests: int) -> list[list[int]]:
    """Random prompts, each used once: no prefix is ever cached."""
    rng = random.Random(SEED)  # noqa: S311 - reproducible, not secret
    return [rng.choices(VOCABULARY, k=LENGTHS[n % len(LENGTHS)]) for n in range(requests)]


async def bare_ttft_s(engine: Any, prompt: list[int], number: int) -> float:
    """Seconds to the first token of the bare engine."""
    from vllm import SamplingParams

    started_s = time.perf_counter()
    ttft_s = 0.0
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    async for _ in engine.generate({"prompt_token_ids": prompt}, sampling, f"bare-{number}"):
        ttft_s = ttft_s or time.perf_counter() - started_s
    return ttft_s


async def alternate(engine: Any, asked: Client, requests: int) -> list[tuple[int, float, float]]:
    """(prompt tokens, bare TTFT, served TTFT) of each pair."""
    pairs = []
    for number, prompt in enumerate(prompts(requests)):
        bare_s = await bare_ttft_s(engine, prompt, number)
        (served_s,) = await asked.ttfts_s(Arrival(0, 0.0, "", len(prompt), 2, None, STANDARD))
        pairs.append((len(prompt), bare_s, served_s))
    return pairs


async def run(directory: Path, model: Path, requests: int) -> dict[str, Any]:
    """Measure and summarise."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    cores = plan_cores(sorted(os.sched_getaffinity(0)), 1, 1, 1, 1).prefill[0]
    with async_engine(model, cores=cores, max_model_len=4096) as (engine, _):
        for number, prompt in enumerate(prompts(len(LENGTHS) * 4)):
            await bare_ttft_s(engine, prompt, -number - 1)
        settings = {"model": str(model), "model_name": "tiny", "port": PORT, "max_model_len": 4096}
        with served(directory, settings):
            async with client(PORT, SEED, VOCABULARY) as asked:
                await alternate(engine, asked, len(LENGTHS) * 4)
                pairs = await alternate(engine, asked, requests)
            await asyncio.sleep(1)
    at_prefill_s = logged((directory / "log").read_text(), "prefill_ended", "seconds")[-requests:]
    by_length: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for (tokens, bare_s, served_s), prefill_s in zip(pairs, at_prefill_s, strict=True):
        by_length[tokens].append((bare_s, served_s, prefill_s))
    return {str(tokens): _summary(rows) for tokens, rows in sorted(by_length.items())}


def _summary(rows: list[tuple[float, float, float]]) -> dict[str, Any]:
    bare, served, prefill = ([value * 1e3 for value in column] for column in zip(*rows, strict=True))
    added = [one - other for one, other in zip(served, bare, strict=True)]
    return {
        "pairs": len(rows),
        "bare_ttft_ms": quantiles(bare, 50, 90, 99),
        "served_ttft_ms": quantiles(served, 50, 90, 99),
        "at_prefill_replica_ms": quantiles(prefill, 50, 90),
        "added_ms": quantiles(added, 50, 90, 99),
        "added_ms_stdev": statistics.stdev(added),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=90)
    requests = parser.parse_args().requests
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        results = asyncio.run(run(directory, build_tiny_llama(directory / "tiny"), requests))
    rows = [
        {
            "prompt tokens": tokens,
            "bare p50 ms": row["bare_ttft_ms"]["p50"],
            "served p50 ms": row["served_ttft_ms"]["p50"],
            "at prefill p50 ms": row["at_prefill_replica_ms"]["p50"],
            "added p50 ms": row["added_ms"]["p50"],
            "added p90 ms": row["added_ms"]["p90"],
        }
        for tokens, row in results.items()
    ]
    print_rows("Time to first token", rows)
    print(write("serving_path", {"seed": SEED, "by_prompt_tokens": results}))


if __name__ == "__main__":
    main()
