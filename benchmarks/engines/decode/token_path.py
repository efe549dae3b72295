"""What a streamed token costs between the engine and its client, and how many a second come through.

Serves a tiny random model, whose steps take next to nothing, and has some streams read at a time, each of
many tokens. Reports tokens per second, the gaps between a stream's events, tokens per event, and the CPU time
of each process for each token: a process has one thread for Python, so that a replica brings through no more
tokens a second than the inverse of its time. With `--before DIR`, a checkout of an earlier commit in turns
with this one's; with `--ray`, Ray Serve LLM's own prefill/decode application, which by default sends at once
what comes within 50 ms.

    python -m benchmarks.engines.decode.token_path [--turns 1] [--streams 1 16 64] [--before DIR] [--ray]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from benchmarks.harness.busy_cores import cpu_s
from benchmarks.harness.local_server import ended, environment, served, start_until
from benchmarks.harness.tiny_models import build_tiny_llama
from benchmarks.report import commit, quantiles, write
from deployments.local.launcher import get_json

SEED = 31847
PORT = 18451
TOKENS = 200
PROMPT_TOKENS = 16
ROUNDS = 4
"""Streams of each reader, one after the other."""
VOCABULARY = range(200)
_ROOT = Path(__file__).parents[3]


@dataclass
class Stream:
    """One answer: when each of its events came, seconds, and its tokens."""

    events_s: list[float]
    tokens: int


async def stream(session: aiohttp.ClientSession, model: str, rng: random.Random) -> Stream:
    """One answer of `TOKENS` tokens.

    Raises:
        RuntimeError: when it has fewer.
    """
    body = {
        "model": model,
        "prompt": rng.choices(VOCABULARY, k=PROMPT_TOKENS),
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    events_s, rest, tokens = [], b"", 0
    headers = {"content-type": "application/json", "x-slo-tier": "premium"}
    async with session.post("v1/completions", data=msgspec.json.encode(body), headers=headers) as response:
        response.raise_for_status()
        async for piece in response.content.iter_any():
            now_s = time.perf_counter()
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if b'"choices":[{' in line:
                    events_s.append(now_s)
                elif b'"completion_tokens":' in line:
                    usage = msgspec.json.decode(line.removeprefix(b"data: "))["usage"]
                    tokens = usage["completion_tokens"]
    if tokens != TOKENS:
        raise RuntimeError(f"an answer has {tokens} of {TOKENS} tokens")
    return Stream(events_s, tokens)


async def read(model: str, streams: int, rounds: int, seed: str) -> list[Stream]:
    """So many readers, each with several answers, one after the other."""
    rng = random.Random(seed)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{PORT}/") as session:

        async def reader() -> list[Stream]:
            return [await stream(session, model, rng) for _ in range(rounds)]

        return [one for each in await asyncio.gather(*(reader() for _ in range(streams))) for one in each]


def measure(pid: int, model: str, streams: int, seed: str) -> dict[str, Any]:
    """What so many streams at a time get of the server, whose command is `pid`, and use."""
    asyncio.run(read(model, streams, 1, f"warm {seed}"))
    root, this = psutil.Process(pid), psutil.Process()
    before, here = cpu_s(root), sum(this.cpu_times()[:2])
    started_s = time.perf_counter()
    answers = asyncio.run(read(model, streams, ROUNDS, seed))
    elapsed_s = time.perf_counter() - started_s
    after = cpu_s(root)
    tokens = sum(each.tokens for each in answers)
    used = Counter({name: after[name] - before[name] for name in after})
    used["client"] = sum(this.cpu_times()[:2]) - here
    gaps = [(then - at) * 1e3 for each in answers for at, then in itertools.pairwise(each.events_s)]
    return {
        "tokens_per_s": tokens / elapsed_s,
        "tokens_per_event": tokens / sum(len(each.events_s) for each in answers),
        "gap_ms": quantiles(gaps, 50, 99),
        "cpu_us_per_token": {name: value / tokens * 1e6 for name, value in sorted(used.items())},
    }


@contextmanager
def ray_serve_llm(directory: Path, model: Path) -> Iterator[tuple[int, str]]:
    """Ray Serve LLM's own application; its command's process and the model's name."""
    log = directory / "log"
    command = ["benchmarks.comparison.stock_server", "--port", str(PORT), "--model", str(model)]
    command += ["--max-model-len", "2048", "--batching-ms", "50"]
    url = f"http://127.0.0.1:{PORT}/v1/models"
    up = start_until(lambda: bool((get_json(url) or {}).get("data")), command, log, environment())
    with ended(up) as server:
        yield server.pid, (get_json(url) or {})["data"][0]["id"]


@contextmanager
def ours(directory: Path, model: Path, checkout: Path) -> Iterator[tuple[int, str]]:
    """The same of `slackserve serve` of a checkout."""
    settings = {"model": str(model), "model_name": "tiny", "port": PORT, "max_model_len": 2048}
    with served(directory, settings, checkout=checkout) as server:
        yield server.pid, "tiny"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--before", type=Path)
    parser.add_argument("--ray", action="store_true")
    asked = parser.parse_args()
    checkouts = {} if asked.before is None else {"before": asked.before.resolve()}
    checkouts["after"] = _ROOT
    found: dict[str, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = build_tiny_llama(directory / "tiny", layers=1)
        for turn in range(asked.turns):
            for arm in [*checkouts, *(["ray"] if asked.ray else [])]:
                place = directory / f"{arm}-{turn}"
                place.mkdir()
                is_ours = arm in checkouts
                up = ours(place, model, checkouts[arm]) if is_ours else ray_serve_llm(place, model)
                with up as (pid, model_name):
                    for streams in asked.streams:
                        turns = found[arm][streams]
                        turns.append(measure(pid, model_name, streams, f"{SEED} {turn} {streams}"))
                        print(arm, streams, turns[-1], flush=True)
    results = {
        arm: {"commit": commit(checkouts.get(arm, _ROOT)), "turns_by_streams": turns}
        for arm, turns in found.items()
    }
    settings = {"seed": SEED, "tokens": TOKENS, "rounds": ROUNDS, "cores": os.cpu_count()}
    print(write("engines/token_path", {"settings": settings, **results}))


if __name__ == "__main__":
    sys.exit(main())
