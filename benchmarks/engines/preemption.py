"""What preemption does to an urgent request and to the long prefill that it meets, through the whole server.

Serves the embedded model once with preemption and once without. In each, rounds alternate between: an urgent
prompt alone, a long prompt alone, and an urgent prompt that arrives while the long one is being prefilled, at
evenly spread moments. Prompts are random tokens, so nothing comes from the prefix cache.

    python -m benchmarks.engines.preemption [--rounds 8]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.engines.local_server import embedded_settings, logged, serve_until_ready
from benchmarks.report import quantiles, write

PORT = 18438
SEED = 3000
URGENT_TOKENS = 64
LONG_TOKENS = 3000
URGENT_TTFT_MS = 1000
LAYERS = 30
VOCABULARY = range(1000, 40000)


class Client:
    """Sends streaming requests and takes their time to first token."""

    def __init__(self) -> None:
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=120)
        self._rng = random.Random(SEED)  # noqa: S311 - reproducible, not secret

    async def model(self) -> str:
        """The name of the model that is served."""
        return str((await self._http.get("/v1/models")).json()["data"][0]["id"])

    async def ttft_s(self, model: str, tokens: int, headers: dict[str, str]) -> float:
        """Seconds to the first chunk of a random prompt."""
        prompt = self._rng.choices(VOCABULARY, k=tokens)
        body = {"model": model, "prompt": prompt, "max_tokens": 2, "stream": True, "ignore_eos": True}
        started_s = time.perf_counter()
        ttft_s = 0.0
        async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                raise RuntimeError((await response.aread()).decode())
            async for _ in response.aiter_bytes():
                ttft_s = ttft_s or time.perf_counter() - started_s
        return ttft_s

    async def urgent_s(self, model: str) -> float:
        """TTFT of an urgent request."""
        headers = {"x-slo-tier": "premium", "x-slo-ttft-ms": str(URGENT_TTFT_MS)}
        return await self.ttft_s(model, URGENT_TOKENS, headers)

    async def long_s(self, model: str) -> float:
        """TTFT of a long request without a deadline."""
        return await self.ttft_s(model, LONG_TOKENS, {"x-slo-tier": "background"})


async def rounds(count: int) -> dict[str, list[float]]:
    """TTFTs, seconds: alone and together."""
    client = Client()
    model = await client.model()
    for _ in range(2):  # the first touches memory
        await client.urgent_s(model)
        long_s = await client.long_s(model)
    times: dict[str, list[float]] = {"urgent_alone": [], "long_alone": [], "urgent": [], "long": []}
    for number in range(count):
        times["urgent_alone"].append(await client.urgent_s(model))
        times["long_alone"].append(await client.long_s(model))
        running = asyncio.create_task(client.long_s(model))
        # Not in the last quarter: there the long one may end in time for the urgent one by itself.
        await asyncio.sleep(long_s * (0.1 + 0.5 * (number + 0.5) / count))
        times["urgent"].append(await client.urgent_s(model))
        times["long"].append(await running)
    return times


def serve(mode: str, count: int, directory: Path) -> tuple[dict[str, list[float]], str]:
    """Measure one mode of preemption; the times and the server's log."""
    # Without preemption urgent requests are late, for which the monitor would refuse the long ones.
    settings = embedded_settings(port=PORT, preemption={"mode": mode}, monitor={"shed": False})
    config, log = directory / f"{mode}.yaml", directory / f"{mode}.log"
    config.write_text(yaml.safe_dump(settings))
    server = serve_until_ready(log, PORT, "--config", str(config), "--verbose")
    try:
        return asyncio.run(rounds(count)), log.read_text()
    finally:
        server.terminate()
        server.wait(60)


def summary(times: dict[str, list[float]], log: str) -> dict[str, Any]:
    """Medians and spreads of one mode, milliseconds."""
    shown = {name: {"ms": [t * 1e3 for t in values]} for name, values in times.items()}
    for name, values in times.items():
        shown[name] |= quantiles([t * 1e3 for t in values], 50, 90, 100)
    return {
        "ttft": shown,
        "stops": len(logged(log, "prefill_stopped", "stop_ms")),
        "order_to_stop_ms": logged(log, "prefill_stopped", "stop_ms"),
        "stop_to_urgent_ms": [s * 1e3 for s in logged(log, "prefill_served", "after_stop_s")],
        "suspended_ms": [s * 1e3 for s in logged(log, "prefill_resumed", "suspended_s")],
        "resume_overhead_ms": [s * 1e3 for s in logged(log, "prefill_resumed", "overhead_s")],
    }


def verdict(resume: dict[str, list[float]], off: dict[str, list[float]]) -> dict[str, Any]:
    """The two bounds that suspend-and-resume is held to, and what happens without it; seconds."""
    middle = {name: statistics.median(values) for name, values in resume.items()}
    layer_s = middle["long_alone"] / LAYERS
    urgent_bound_s = middle["urgent_alone"] + 2 * layer_s + 0.05
    long_bound_s = middle["long_alone"] * 1.05 + middle["urgent"]
    return {
        "layer_s": layer_s,
        "urgent_bound_s": urgent_bound_s,
        "urgent_s": middle["urgent"],
        "urgent_within": middle["urgent"] <= urgent_bound_s,
        "urgent_within_each": sum(value <= urgent_bound_s for value in resume["urgent"]),
        "long_bound_s": long_bound_s,
        "long_s": middle["long"],
        "long_within": middle["long"] <= long_bound_s,
        "urgent_without_preemption_s": statistics.median(off["urgent"]),
    }


def main() -> None:
    """Measure both modes and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        runs = {mode: serve(mode, arguments.rounds, Path(directory)) for mode in ("resume", "off")}
    table = Table("TTFT, ms (p50 / p90 / max)", "with preemption", "without")
    results = {mode: summary(*run) for mode, run in runs.items()}
    for name in ("urgent_alone", "urgent", "long_alone", "long"):
        cells = [
            " / ".join(f"{results[mode]['ttft'][name][p]:.0f}" for p in ("p50", "p90", "p100"))
            for mode in runs
        ]
        table.add_row(name.replace("_", " "), *cells)
    console = Console()
    console.print(table)
    stops = results["resume"]["stops"]
    if stops != arguments.rounds:
        raise SystemExit(f"{stops} of {arguments.rounds} rounds were preempted: the result means nothing")
    bounds = verdict(runs["resume"][0], runs["off"][0])
    console.print_json(data=bounds)
    print(write("preemption", {"rounds": arguments.rounds, "modes": results, "bounds": bounds}))


if __name__ == "__main__":
    main()
