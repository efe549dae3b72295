"""Compiled passes against eager ones through the whole server: how soon it is ready, and first tokens.

Serves the embedded model: compiled with nothing stored of that before, then in turn eagerly and compiled from
what was stored. Each time it asks for urgent prompts alone, a long prompt alone, and an urgent prompt that
arrives while the long one is being prefilled, at evenly spread moments. Prompts are random tokens, so nothing
comes from the prefix cache.

    python -m benchmarks.engines.compiled [--turns 2] [--rounds 8]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.local_server import client, embedded_settings, logged, served
from benchmarks.harness.urgent_among_long import among
from benchmarks.report import print_rows, quantiles, write
from simulator.workload.arrivals import Arrival
from slo.tiers import BACKGROUND, PREMIUM

PORT: Final = 18441
SEED: Final = 3100
ALONE: Final = (64, 256, 1024)
"""Tokens of the prompts that are alone."""
URGENT: Final = Arrival(0, 0.0, "urgent", tokens=64, output_tokens=2, ttft_s=1.0, tier=PREMIUM)
LONG: Final = Arrival(0, 0.0, "long", tokens=2000, output_tokens=2, ttft_s=None, tier=BACKGROUND)
WARM_UPS: Final = 2


@dataclass(slots=True)
class Found:
    """What was measured of one kind of passes, over all its turns; seconds."""

    ready_s: list[float] = field(default_factory=list)
    alone_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    long_alone_s: list[float] = field(default_factory=list)
    urgent_s: list[float] = field(default_factory=list)
    long_s: list[float] = field(default_factory=list)
    order_to_stop_ms: list[float] = field(default_factory=list)


async def rounds(count: int, found: Found) -> None:
    """First tokens, alone and together."""
    async with client(PORT, SEED) as asked:
        for _ in range(WARM_UPS):  # the first touches memory
            (long_s,) = await asked.ttfts_s(LONG)
        for number in range(count):
            for tokens in ALONE:
                found.alone_s[tokens] += await asked.ttfts_s(replace(URGENT, tokens=tokens, ttft_s=None))
            found.long_alone_s += await asked.ttfts_s(LONG)
            together = await asked.ttfts_s(LONG, among(URGENT, long_s, number, count))
            found.long_s.append(together[0])
            found.urgent_s.append(together[1])


def turn(*, compiled: bool, count: int, directory: Path, found: Found) -> None:
    """Start a server, see when it is ready, and ask it."""
    settings = embedded_settings(port=PORT, preemption={"compiled": compiled}, monitor={"shed": False})
    started_s = time.monotonic()
    with served(directory, settings):
        found.ready_s.append(time.monotonic() - started_s)
        asyncio.run(rounds(count, found))
        log = (directory / "log").read_text()
    found.order_to_stop_ms += logged(log, "prefill_stopped", "stop_ms")


def summary(found: Found) -> dict[str, Any]:
    """Medians and spreads of one kind."""
    times = {f"{tokens} tokens alone": seconds for tokens, seconds in found.alone_s.items()}
    times |= {f"{LONG.tokens} tokens alone": found.long_alone_s}
    times |= {f"{URGENT.tokens} tokens during {LONG.tokens}": found.urgent_s}
    times |= {f"{LONG.tokens} tokens, stopped": found.long_s}
    return {
        "ready_s": found.ready_s,
        "ttft_ms": {
            name: {"count": len(values), **quantiles([1e3 * value for value in values], 25, 50, 75, 90)}
            for name, values in times.items()
        },
        "order_to_stop_ms": found.order_to_stop_ms,
    }


def main() -> None:
    """Measure both kinds and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=2, help="servers of each kind")
    parser.add_argument("--rounds", type=int, default=8, help="of each server")
    arguments = parser.parse_args()
    fresh, eager, compiled = Found(), Found(), Found()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        os.environ |= {
            "VLLM_CACHE_ROOT": str(place / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
        }
        turn(compiled=True, count=1, directory=place, found=fresh)
        for _ in range(arguments.turns):
            turn(compiled=False, count=arguments.rounds, directory=place, found=eager)
            turn(compiled=True, count=arguments.rounds, directory=place, found=compiled)
    kinds = {"eager": summary(eager), "compiled": summary(compiled)}
    rows = [
        {"passes": kind, "TTFT": name, "p25": times["p25"], "p50": times["p50"], "p90": times["p90"]}
        for name in kinds["eager"]["ttft_ms"]
        for kind, found in kinds.items()
        for times in (found["ttft_ms"][name],)
    ]
    print_rows("Time to first token, ms", rows)
    ready = {"eager": eager.ready_s, "compiled": compiled.ready_s, "compiled_afresh": fresh.ready_s}
    print({name: [round(second, 1) for second in seconds] for name, seconds in ready.items()})
    results = {"turns": arguments.turns, "rounds": arguments.rounds, "ready_s": ready, "passes": kinds}
    print(write("engines/compiled", results))


if __name__ == "__main__":
    main()
