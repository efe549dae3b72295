"""What tracing adds to the time to first token, on real servers, at concurrency 1.

Serves a tiny random model twice with `slackserve serve`, without tracing and with it at a ratio, and asks
both in turns: the one without, the other, and the other with a request that its client has sampled. They
follow each other in a changing order, so that whatever else the machine does hits all of them. A collector
counts the spans.

    python -m benchmarks.engines.trace_overhead [--rounds 150] [--ratio 0.01]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from benchmarks.harness.local_server import served
from benchmarks.harness.tiny_models import build_tiny_llama
from benchmarks.report import print_rows, quantiles, write

SEED = 20260
OFF_PORT, TRACED_PORT, COLLECTOR_PORT = 18441, 18442, 18443
LENGTHS = (32, 512, 2048)
ARMS = ("off", "ratio", "sampled")
WARM_UP = 12
RESAMPLES = 2000


class SpanCounter(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc] # generated without types
    """Counts spans."""

    def __init__(self) -> None:
        self.spans = 0

    def Export(self, request: Any, _: Any) -> Any:  # noqa: N802 - the protocol's name
        """Take the spans of a process."""
        self.spans += sum(len(scope.spans) for each in request.resource_spans for scope in each.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[SpanCounter]:
    """A collector on its port."""
    collector = SpanCounter()
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    server.add_insecure_port(f"127.0.0.1:{COLLECTOR_PORT}")
    server.start()
    try:
        yield collector
    finally:
        server.stop(1).wait()


def settings(model: Path, port: int, **more: Any) -> dict[str, Any]:
    """Of one of the servers, on ports of its own."""
    first = 24000 if port == OFF_PORT else 28000
    return {
        "model": str(model),
        "model_name": "tiny",
        "port": port,
        "max_model_len": 4096,
        "kv_transfer": {"prefill_port": first, "decode_port": first + 2000},
        "monitor": {"port": first + 1000},
        **more,
    }


async def ttft_s(client: httpx.AsyncClient, arm: str, prompt: list[int]) -> float:
    """Seconds until the first event of the answer."""
    port = OFF_PORT if arm == "off" else TRACED_PORT
    headers = {}
    if arm == "sampled":
        headers["traceparent"] = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "ignore_eos": True, "stream": True}
    url, first_s = f"http://127.0.0.1:{port}/v1/completions", 0.0
    started_s = time.perf_counter()
    async with client.stream("POST", url, json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for _ in answer.aiter_bytes():
            first_s = first_s or time.perf_counter() - started_s
    return first_s


async def measure(rounds: int) -> dict[int, dict[str, list[float]]]:
    """Milliseconds by prompt length and arm; the n-th of each arm are neighbours in time."""
    rng = random.Random(SEED)
    times: dict[int, dict[str, list[float]]] = {tokens: {arm: [] for arm in ARMS} for tokens in LENGTHS}
    async with httpx.AsyncClient(timeout=120) as client:
        for number in range(-WARM_UP, rounds):
            for tokens in LENGTHS:
                for arm in rng.sample(ARMS, k=len(ARMS)):
                    seconds = await ttft_s(client, arm, rng.choices(range(200), k=tokens))
                    if number >= 0:
                        times[tokens][arm].append(seconds * 1e3)
    return times


def added(arm: list[float], off: list[float]) -> dict[str, float]:
    """The median difference of pairs, and its 95 % interval by bootstrap."""
    differences = np.subtract(arm, off)
    rng = np.random.default_rng(SEED)
    medians = np.median(rng.choice(differences, (RESAMPLES, len(differences))), axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return {"p50": float(np.median(differences)), "low": float(low), "high": float(high)}


def summary(times: dict[str, list[float]], ratio: float) -> dict[str, Any]:
    """What each arm adds, and what that makes of a stream of requests at the ratio."""
    off_ms = float(np.median(times["off"]))
    unsampled, sampled = (added(times[arm], times["off"]) for arm in ("ratio", "sampled"))
    bounds = {key: (1 - ratio) * unsampled[key] + ratio * sampled[key] for key in unsampled}
    return {
        "pairs": len(times["off"]),
        **{f"{arm}_ttft_ms": quantiles(times[arm], 50, 90) for arm in ARMS},
        "ratio_added_ms": unsampled,
        "sampled_added_ms": sampled,
        "part_of_ttft": {key: value / off_ms for key, value in bounds.items()},
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--ratio", type=float, default=0.01)
    arguments = parser.parse_args()
    ratio: float = arguments.ratio
    tracing = {"endpoint": f"http://127.0.0.1:{COLLECTOR_PORT}", "ratio": ratio}
    with tempfile.TemporaryDirectory() as name:
        model = build_tiny_llama(Path(name) / "tiny")
        off, traced = Path(name) / "off", Path(name) / "traced"
        off.mkdir()
        traced.mkdir()
        with (
            collecting() as collector,
            served(off, settings(model, OFF_PORT)),
            served(traced, settings(model, TRACED_PORT, tracing=tracing)),
        ):
            times = asyncio.run(measure(arguments.rounds))
            time.sleep(6)  # processes export every five seconds
            spans = collector.spans
    rows = {str(tokens): summary(each, ratio) for tokens, each in times.items()}
    shown = [
        {
            "prompt tokens": tokens,
            "off p50 ms": row["off_ttft_ms"]["p50"],
            "added at ratio ms": row["ratio_added_ms"]["p50"],
            "added sampled ms": row["sampled_added_ms"]["p50"],
            "part of TTFT %": row["part_of_ttft"]["p50"] * 100,
            "at most %": row["part_of_ttft"]["high"] * 100,
        }
        for tokens, row in rows.items()
    ]
    print_rows("Tracing", shown)
    results = {"seed": SEED, "ratio": ratio, "spans": spans, "by_prompt_tokens": rows}
    print(write("engines/trace_overhead", results))


if __name__ == "__main__":
    main()
