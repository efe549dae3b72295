"""What the serving path adds to the time to first token of a bare engine, and where it spends it.

Serves a tiny random model with `slackserve serve` and runs the same model in a bare vLLM engine of this
process, on the cores that the prefill replica has. Requests alternate between the two, one at a time, so that
whatever else the machine does hits both. Then traced requests at several concurrencies: their spans say how
long each stage takes. With `--before DIR`, a checkout of an earlier commit, the same of that one, in turns
with this one's server; one from before there were traces has no stages. `--embedded` has the embedded model
in place of the tiny one, as `make serve` serves it, and no traced requests.

    python -m benchmarks.engines.serving_path [--requests 90] [--traced 64] [--turns 1] [--before DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.harness.local_server import client, embedded_settings, served
from benchmarks.harness.offline_engine import async_engine
from benchmarks.harness.otlp import Received, Receiver, receiving
from benchmarks.harness.tiny_models import build_tiny_llama
from benchmarks.report import commit, print_rows, quantiles, write
from deployments.engines.cpu_plan import Workers, plan_cores
from deployments.models.store import ModelStore
from simulator.workload.arrivals import Arrival
from slo.tiers import STANDARD

SEED = 59681
PORT, SPANS_PORT = 18437, 18438
LENGTHS = (32, 512, 2048)
CONCURRENCIES = (1, 8, 32)
TRACED_TOKENS = 512
VOCABULARY = range(200)
_ROOT = Path(__file__).parents[2]
_EXPORTED_S = 60.0


@dataclass(frozen=True)
class TracedCall:
    """A traced request: its trace, and when it was sent and its first token came, seconds since the epoch."""

    trace_id: str
    sent_s: float
    first_s: float


def prompts(requests: int, arm: str) -> list[list[int]]:
    """Random prompts, others for each arm: no prefix is ever cached."""
    rng = random.Random(f"{SEED} {arm}")
    return [rng.choices(VOCABULARY, k=LENGTHS[n % len(LENGTHS)]) for n in range(requests)]


async def bare_ttft_s(engine: Any, prompt: list[int], number: str) -> float:
    """Seconds to the first token of the bare engine."""
    from vllm import SamplingParams

    started_s = time.perf_counter()
    ttft_s = 0.0
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    async for _ in engine.generate({"prompt_token_ids": prompt}, sampling, number):
        ttft_s = ttft_s or time.perf_counter() - started_s
    return ttft_s


async def alternate(engine: Any, requests: int, arm: str) -> list[tuple[int, float, float]]:
    """(prompt tokens, bare TTFT, served TTFT) of each pair."""
    pairs = []
    async with client(PORT, f"{SEED} {arm}", VOCABULARY) as asked:
        for number, prompt in enumerate(prompts(requests, arm)):
            bare_s = await bare_ttft_s(engine, prompt, f"{arm}-{number}")
            (served_s,) = await asked.ttfts_s(Arrival(0, 0.0, "", len(prompt), 2, None, STANDARD))
            pairs.append((len(prompt), bare_s, served_s))
    return pairs


async def traced(session: aiohttp.ClientSession) -> TracedCall:
    """One request that brings a sampled trace."""
    trace_id = secrets.token_hex(16)
    prompt = random.choices(VOCABULARY, k=TRACED_TOKENS)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "stream": True}
    data = msgspec.json.encode(body)
    headers = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01", "content-type": "application/json"}
    sent_s, first_s = time.time(), 0.0
    async with session.post("/v1/completions", data=data, headers=headers) as response:
        response.raise_for_status()
        async for line in response.content:
            first_s = first_s or (time.time() if b'"choices":[{' in line else 0.0)
    return TracedCall(trace_id, sent_s, first_s)


async def breakdown(receiver: Receiver, concurrency: int, requests: int) -> list[dict[str, float]]:
    """The stages of each request, milliseconds, with so many requests at a time."""
    async with aiohttp.ClientSession(f"http://127.0.0.1:{PORT}") as session:

        async def one_after_the_other() -> list[TracedCall]:
            return [await traced(session) for _ in range(max(2, requests // concurrency))]

        calls = await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))
    return [await stages(receiver, call) for each in calls for call in each]


async def stages(receiver: Receiver, call: TracedCall) -> dict[str, float]:
    """Milliseconds of each stage of a request; all but the last add up to its time to first token."""
    names = {"ingress", "place", "decode_request", "tokenise", "prefill_call", "prefill_request"}
    names |= {"prefill_run", "handoff", "decode"}
    deadline_s = time.monotonic() + _EXPORTED_S
    while not names <= {span.name for span in receiver.trace(call.trace_id)}:
        if time.monotonic() > deadline_s:
            raise RuntimeError(
                f"not exported: {names - {span.name for span in receiver.trace(call.trace_id)}}"
            )
        await asyncio.sleep(0.5)
    found: dict[str, Received] = {span.name: span for span in receiver.trace(call.trace_id)}
    ingress, decode, prefill = found["ingress"], found["decode_request"], found["prefill_request"]
    handed_s = decode.events.get(
        "first_token", found["decode"].start_s
    )  # earlier, they were at the same time
    seconds = {
        "client to ingress": ingress.start_s - call.sent_s,
        "ingress": found["place"].start_s - ingress.start_s,
        "placement": found["place"].seconds,
        "call to decode": decode.start_s - found["place"].end_s,
        "tokenise": found["tokenise"].seconds,
        "call to prefill": prefill.start_s - found["prefill_call"].start_s,
        "engine queue": found["prefill_run"].start_s - prefill.start_s,
        "pass, out of the engine": found["prefill_run"].seconds,
        "answer to decode": found["prefill_call"].end_s - prefill.end_s,
        "first token out of decode": handed_s - found["prefill_call"].end_s,
        "stream to client": call.first_s - handed_s,
        "time to first token": call.first_s - call.sent_s,
        "KV transfer and first decode step": found["handoff"].seconds,
    }
    return {stage: value * 1e3 for stage, value in seconds.items()}


@dataclass
class Found:
    """What all turns of a checkout have found, milliseconds.

    Attributes:
        pairs: By prompt tokens, TTFT of the bare engine and of the server.
        stages: By concurrency, the stages of each request.
    """

    pairs: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    stages: dict[int, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))

    def quantiles(self) -> dict[str, Any]:
        """Their quantiles, as they are written."""
        spent = {
            str(many): {stage: quantiles([row[stage] for row in rows], 50, 99) for stage in rows[0]}
            for many, rows in self.stages.items()
        }
        pairs = {str(tokens): _summary(rows) for tokens, rows in sorted(self.pairs.items())}
        return {"by_prompt_tokens": pairs, "stages_ms_by_concurrency": spent}


async def measure(
    engine: Any,
    found: Found,
    checkout: Path,
    directory: Path,
    settings: dict[str, Any],
    sizes: tuple[int, int],
) -> None:
    """One turn of one checkout."""
    requests, traces = sizes
    has_traces = (checkout / "deployments" / "config" / "tracing.py").exists()
    if not has_traces:
        settings = {key: value for key, value in settings.items() if key != "tracing"}
    with receiving(SPANS_PORT) as receiver, served(directory, settings, checkout=checkout):
        await alternate(engine, len(LENGTHS) * 4, f"{directory.name}-warm")
        for tokens, bare_s, served_s in await alternate(engine, requests, directory.name):
            found.pairs[tokens].append((bare_s * 1e3, served_s * 1e3))
        if has_traces and traces:
            await breakdown(receiver, max(CONCURRENCIES), traces)  # warm
            for many in CONCURRENCIES:
                found.stages[many] += await breakdown(receiver, many, traces)


async def run(
    directory: Path,
    model: Path,
    settings: dict[str, Any],
    checkouts: dict[str, Path],
    turns: int,
    sizes: tuple[int, int],
) -> dict[str, Any]:
    """Measure all checkouts, served with these settings, beside one bare engine."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    cores = plan_cores(sorted(os.sched_getaffinity(0)), Workers())[0].prefill[0]
    tracing = {"endpoint": f"http://127.0.0.1:{SPANS_PORT}", "ratio": 0.0}
    settings |= {"port": PORT, "max_model_len": 4096, "tracing": tracing}
    with async_engine(model, cores=cores, max_model_len=4096) as (engine, _):
        for number, prompt in enumerate(prompts(len(LENGTHS) * 4, "bare")):
            await bare_ttft_s(engine, prompt, f"warm-{number}")
        found = {name: Found() for name in checkouts}
        for turn in range(turns):
            for name, checkout in checkouts.items():
                place = directory / f"{name}-{turn}"
                await measure(engine, found[name], checkout, place, settings, sizes)
    return {
        name: {"commit": commit(checkout), **found[name].quantiles()} for name, checkout in checkouts.items()
    }


def _summary(rows: list[tuple[float, float]]) -> dict[str, Any]:
    bare, served_ms = zip(*rows, strict=True)
    return {
        "pairs": len(rows),
        "bare_ttft_ms": quantiles(bare, 50, 90, 99),
        "served_ttft_ms": quantiles(served_ms, 50, 90, 99),
        "added_ms": quantiles([two - one for one, two in rows], 50, 90, 99),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=90)
    parser.add_argument("--traced", type=int, default=64)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--embedded", action="store_true")
    asked = parser.parse_args()
    before = {} if asked.before is None else {"before": asked.before.resolve()}
    checkouts = before | {"after": _ROOT}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for arm in checkouts:
            for turn in range(asked.turns):
                (directory / f"{arm}-{turn}").mkdir()
        if asked.embedded:
            model, settings = Path(ModelStore().resolve(None).source), embedded_settings()
        else:
            model = build_tiny_llama(directory / "tiny")
            settings = {"model": str(model), "model_name": "tiny"}
        sizes = asked.requests, 0 if asked.embedded else asked.traced
        results = asyncio.run(run(directory, model, settings, checkouts, asked.turns, sizes))
    for arm, found in results.items():
        rows = [
            {"prompt tokens": tokens, **row["added_ms"]} for tokens, row in found["by_prompt_tokens"].items()
        ]
        print_rows(f"Added to the bare engine's TTFT, ms: {arm} ({found['commit']})", rows)
        if not (by_concurrency := found["stages_ms_by_concurrency"]):
            continue
        rows = [
            {"stage": stage, **{many: spent[stage]["p50"] for many, spent in by_concurrency.items()}}
            for stage in by_concurrency["1"]
        ]
        print_rows(f"Stages, p50 ms by concurrency: {arm}", rows)
    print(
        write(
            "engines/serving_path" + "_embedded" * asked.embedded,
            {"seed": SEED, "turns": asked.turns, **results},
        )
    )


if __name__ == "__main__":
    main()
