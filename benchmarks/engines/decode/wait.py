"""First tokens while decode has no memory: what the router predicts with the wait for it, and without.

The whole server on CPU with a tiny random model, whose decode replica has room for a few answers at a time.
Requests come faster than their answers end. Two in three are held to a grammar, so that decode samples their
first token, which the KV cache waits for; of the others prefill's token is the first. A grammar also says how
long an answer gets, which neither router nor engine reads from it: each request may have 1,024 tokens. Both
predictions are of the same requests in one run. The check of a new grammar is no wait for memory and not
predicted: each has been seen before.

    python -m benchmarks.engines.decode.wait [--seconds 240] [--rate 1.5]
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import openai

from benchmarks.harness.local_server import served
from benchmarks.harness.tiny_models import build_tiny_llama
from benchmarks.report import print_rows, quantiles, write

SEED: Final = 20261124
PORT: Final = 18451
EXPIRED: Final = "expired KV blocks"
"""What vLLM logs of a KV cache whose lease ends before anybody has pulled it."""
BLOCKS: Final = 24
"""Of 128 tokens."""
PROMPT: Final = 200
MEDIAN: Final = 200
"""Tokens of an answer; lognormal with sigma 0.5, at most 1,000."""
_SETTLES_S: Final = 3.0
"""Several reports: what showing the grammars has left behind is forgotten by then."""
APART: Final = 20
"""Answers have a multiple of so many tokens, so that they have few grammars."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as the ingress has logged it, seconds."""

    ttft_s: float
    predicted_s: float
    wait_s: float


def settings(directory: Path) -> dict[str, Any]:
    """A prefill and a decode replica, the latter short of memory."""
    return {
        "model": str(build_tiny_llama(directory / "tiny")),
        "model_name": "tiny",
        "port": PORT,
        "kv_transfer": {"prefill_port": 24400, "decode_port": 26400},
        "max_model_len": 2048,
        "warmup_tokens": [32, 512],
        "pressure": {"enabled": True},
        "decode": {"engine_kwargs": {"num_gpu_blocks_override": BLOCKS, "max_num_batched_tokens": 2048}},
        "monitor": {"port": 0, "shed": False},
        "tiers": {
            "premium": {"ttft_ms": 60_000, "sheddable": False, "weight": 4},
            "standard": {"ttft_ms": 60_000, "weight": 2},
            "background": {"weight": 1},
        },
    }


def grammar(length: int) -> dict[str, Any]:
    """Holds an answer to so many tokens."""
    return {"structured_outputs": {"regex": f"[a-z]{{{length}}}"}}


def client() -> openai.AsyncOpenAI:
    """Asks the server."""
    url = f"http://127.0.0.1:{PORT}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300)


async def show_grammars() -> None:
    """Have each grammar checked, by requests of a tier whose lengths say nothing of the others'."""
    async with client() as asks:
        for length in range(APART, 1000 + APART, APART):
            await asks.completions.create(
                model="tiny",
                prompt=[1, 2, 3],
                max_tokens=1,
                extra_body=grammar(length),
                extra_headers={"x-slo-tier": "background"},
            )


async def offered(seconds: float, rate_rps: float) -> Counter[str]:
    """Send all and wait for their ends; how many ended how."""
    rng = Random(SEED)
    asked, now_s = [], 0.0
    while (now_s := now_s + rng.expovariate(rate_rps)) < seconds:
        length = APART * max(1, min(1000 // APART, round(MEDIAN * rng.lognormvariate(0.0, 0.5) / APART)))
        prompt = [rng.randrange(200) for _ in range(PROMPT)]
        plain = {"ignore_eos": True}
        asked.append((now_s, prompt, length, plain if len(asked) % 3 == 0 else grammar(length)))

    async def one(
        asks: openai.AsyncOpenAI, at_s: float, prompt: list[int], length: int, how: dict[str, Any]
    ) -> str:
        await asyncio.sleep(at_s)
        most = length if "ignore_eos" in how else 1024
        try:
            stream = await asks.completions.create(
                model="tiny",
                prompt=prompt,
                max_tokens=most,
                temperature=1,
                stream=True,
                extra_body=how,
                extra_headers={"x-slo-tier": "standard"},
            )
            async for _ in stream:
                pass
        except openai.APIStatusError as error:
            return str(error.code)
        return "answered"

    async with client() as asks:
        return Counter(await asyncio.gather(*[one(asks, *each) for each in asked]))


def seen(log: str) -> list[Seen]:
    """All requests that had a first token."""
    pattern = r"request_ended .*?\bttft_s=([\d.e+-]+) predicted_ttft_s=([\d.e+-]+) decode_wait_s=([\d.e+-]+)"
    return [Seen(*map(float, found)) for found in re.findall(pattern, log)]


def row(of: str, found: list[Seen]) -> dict[str, Any]:
    """How far predictions were off, with the wait for decode's memory and without."""
    if not found:
        return {"of": of, "requests": 0}
    errors = {
        "with": [one.predicted_s / one.ttft_s - 1 for one in found],
        "without": [(one.predicted_s - one.wait_s) / one.ttft_s - 1 for one in found],
    }
    figures = {
        f"{figure} {name}": value
        for name, error in errors.items()
        for figure, value in (
            ("mape", statistics.fmean(map(abs, error))),
            ("median error", statistics.median(error)),
        )
    }
    ttft = quantiles([one.ttft_s for one in found], 90)
    return {
        "of": of,
        "requests": len(found),
        **figures,
        **{f"ttft {name}": one for name, one in ttft.items()},
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--rate", type=float, default=1.5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with served(directory, settings(directory)):
            asyncio.run(show_grammars())
            time.sleep(_SETTLES_S)
            before = len((directory / "log").read_text())
            ends = asyncio.run(offered(asked.seconds, asked.rate))
        log = (directory / "log").read_text()[before:]
    found = seen(log)
    rows = [
        row("all", found),
        row("those that were to wait", [one for one in found if one.wait_s > 0]),
        row("the others", [one for one in found if one.wait_s == 0]),
    ]
    print_rows("Predicted over measured time to first token", rows)
    kv = {"expired leases": log.count(EXPIRED), "failed pulls": log.count("cause=pull_failed")}
    print(dict(ends), kv)
    given = vars(asked) | {
        "apart": APART,
        "seed": SEED,
        "blocks": BLOCKS,
        "prompt": PROMPT,
        "median_answer": MEDIAN,
    }
    print(
        write("engines/decode_wait", {"settings": given, "ends": dict(ends), "kv": kv, "first_tokens": rows})
    )


if __name__ == "__main__":
    main()
