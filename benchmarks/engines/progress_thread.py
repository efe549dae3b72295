"""What NIXL's progress threads cost when they spin, as NIXL's Python API has them, and when they sleep.

Serves the embedded model in turns with either, and takes in each turn: the time to first token of a short
and of a long prompt alone, the time per output token of four streams, and the cores that the idle deployment
keeps busy. Prompts are random tokens, so nothing comes from the prefix cache.

    python -m benchmarks.engines.progress_thread [--turns 2] [--rounds 8]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.engines.local_server import embedded_settings, serve_until_ready
from benchmarks.report import write

PORT = 18442
SEED = 20261122
SHORT_TOKENS = 64
LONG_TOKENS = 2000
STREAMS = 4
STREAM_TOKENS = 24
IDLE_S = 20.0
VOCABULARY = range(1000, 40000)
_SPINNING = Path(__file__).parent / "spinning"


async def stream(http: httpx.AsyncClient, model: str, prompt: list[int], tokens: int) -> list[float]:
    """Seconds from the request to each of its pieces."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    started_s = time.perf_counter()
    async with http.stream(
        "POST", "/v1/completions", json=body, headers={"x-slo-tier": "premium"}
    ) as response:
        response.raise_for_status()
        return [
            time.perf_counter() - started_s
            async for line in response.aiter_lines()
            if line.startswith("data: {")
        ]


async def turn(rounds: int, rng: random.Random) -> dict[str, list[float]]:
    """The times of one turn, seconds."""
    found: dict[str, list[float]] = {"short_ttft_s": [], "long_ttft_s": [], "tpot_s": []}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=300) as http:
        model = str((await http.get("/v1/models")).json()["data"][0]["id"])

        async def sent(tokens: int, wanted: int) -> list[float]:
            return await stream(http, model, rng.choices(VOCABULARY, k=tokens), wanted)

        await sent(LONG_TOKENS, 2)  # memory is touched
        for _ in range(rounds):
            found["short_ttft_s"].append((await sent(SHORT_TOKENS, 2))[0])
            found["long_ttft_s"].append((await sent(LONG_TOKENS, 2))[0])
            streams = await asyncio.gather(*(sent(SHORT_TOKENS, STREAM_TOKENS) for _ in range(STREAMS)))
            paces = [(times[-1] - times[0]) / (STREAM_TOKENS - 1) for times in streams]
            found["tpot_s"].append(statistics.mean(paces))
    return found


def idle_cores(process: psutil.Process) -> float:
    """Cores that a process and all below it keep busy while nobody asks for anything."""
    time.sleep(5)
    before_s, started_s = _cpu_s(process), time.monotonic()
    time.sleep(IDLE_S)
    return (_cpu_s(process) - before_s) / (time.monotonic() - started_s)


def _cpu_s(process: psutil.Process) -> float:
    total_s = 0.0
    for each in (process, *process.children(recursive=True)):
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total_s += times.user + times.system
    return total_s


def serve(arm: str, rounds: int, directory: Path, rng: random.Random) -> dict[str, list[float]]:
    """One turn of one arm."""
    config = directory / "config.yaml"
    config.write_text(yaml.safe_dump(embedded_settings(port=PORT, monitor={"shed": False})))
    path = {"spinning": (_SPINNING,), "sleeping": ()}[arm]
    server = serve_until_ready(directory / f"{arm}.log", PORT, "--config", str(config), python_path=path)
    try:
        idle = idle_cores(psutil.Process(server.pid))
        return {**asyncio.run(turn(rounds, rng)), "idle_cores": [idle]}
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    rng = random.Random(SEED)  # noqa: S311 - reproducible, not secret
    found: dict[str, dict[str, list[float]]] = {"spinning": {}, "sleeping": {}}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(arguments.turns):
            for arm, times in found.items():
                for name, values in serve(arm, arguments.rounds, Path(directory), rng).items():
                    times.setdefault(name, []).extend(values)
    rows: dict[str, Any] = {}
    for name in found["spinning"]:
        medians = {arm: statistics.median(times[name]) for arm, times in found.items()}
        rows[name] = {**medians, "ratio": medians["sleeping"] / medians["spinning"]}
        print(
            f"{name:14} spinning {medians['spinning']:.3f}  sleeping {medians['sleeping']:.3f}  "
            f"{rows[name]['ratio']:.2f} x"
        )
    settings = {"seed": SEED, "turns": arguments.turns, "rounds": arguments.rounds, "cores": os.cpu_count()}
    print(write("progress_thread", {"settings": settings, "medians": rows, "values": found}))


if __name__ == "__main__":
    main()
