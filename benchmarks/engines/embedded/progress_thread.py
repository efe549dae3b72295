"""What NIXL's progress threads cost when they spin, as NIXL's Python API has them, and when they sleep.

Serves the embedded model in turns with either, and takes in each turn: the time to first token of a short
and of a long prompt alone, the time per output token of four streams, and the cores that the idle deployment
keeps busy. Prompts are random tokens, so nothing comes from the prefix cache. With `--before DIR`, a checkout
of an earlier commit, the turns are that commit's and this one's instead; with `--dtype bfloat16`, this one's
with float32 and with that.

    python -m benchmarks.engines.embedded.progress_thread [--turns 2] [--rounds 8] [--before DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.busy_cores import idle_cores
from benchmarks.harness.local_server import SPINNING, client, embedded_settings, served
from benchmarks.report import commit, write
from simulator.workload.arrivals import Arrival
from slo.tiers import PREMIUM

PORT = 18442
SEED = 20261122
SHORT_TOKENS = 64
LONG_TOKENS = 2000
STREAMS = 4
STREAM_TOKENS = 24
SETTLED_S, IDLE_S = 5.0, 20.0
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Arm:
    """A checkout's server, with folders before its packages and with settings."""

    name: str
    checkout: Path = _ROOT
    python_path: tuple[Path, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


def request(tokens: int, output_tokens: int = 2) -> Arrival:
    """One that is due soon."""
    return Arrival(0, 0.0, "", tokens, output_tokens, ttft_s=None, tier=PREMIUM)


async def turn(rounds: int, number: int) -> dict[str, list[float]]:
    """The times of one turn, seconds."""
    found: dict[str, list[float]] = {"short_ttft_s": [], "long_ttft_s": [], "tpot_s": []}
    async with client(PORT, SEED + number) as asked:
        await asked.ttfts_s(request(LONG_TOKENS))  # memory is touched
        for _ in range(rounds):
            found["short_ttft_s"] += await asked.ttfts_s(request(SHORT_TOKENS))
            found["long_ttft_s"] += await asked.ttfts_s(request(LONG_TOKENS))
            streams = await asked.answers(*[request(SHORT_TOKENS, STREAM_TOKENS)] * STREAMS)
            found["tpot_s"].append(statistics.mean(answer.tpot_s or 0.0 for answer in streams))
    return found


def serve(arm: Arm, rounds: int, number: int) -> dict[str, list[float]]:
    """One turn of one arm."""
    settings = embedded_settings(port=PORT, monitor={"shed": False}, **arm.settings)
    with (
        tempfile.TemporaryDirectory() as directory,
        served(Path(directory), settings, arm.python_path, arm.checkout) as server,
    ):
        idle = sum(idle_cores(server.pid, SETTLED_S, IDLE_S).values())
        return {**asyncio.run(turn(rounds, number)), "idle_cores": [idle]}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit")
    parser.add_argument("--dtype", help="of the second arm")
    arguments = parser.parse_args()
    arms: tuple[Arm, Arm]
    if arguments.dtype:
        name, arms = (
            "embedded_dtype",
            (Arm("float32"), Arm(arguments.dtype, settings={"dtype": arguments.dtype})),
        )
    elif arguments.before:
        name, arms = "embedded_before", (Arm("before", arguments.before.resolve()), Arm("now"))
    else:
        name, arms = "progress_thread", (Arm("spinning", python_path=(SPINNING,)), Arm("sleeping"))
    found: dict[str, dict[str, list[float]]] = {arm.name: {} for arm in arms}
    for number in range(arguments.turns):
        for arm in arms:
            for of, values in serve(arm, arguments.rounds, number).items():
                found[arm.name].setdefault(of, []).extend(values)
    first, second = found
    rows: dict[str, Any] = {}
    for of in found[first]:
        medians = {arm: statistics.median(times[of]) for arm, times in found.items()}
        rows[of] = {**medians, "ratio": medians[second] / medians[first]}
        print(
            f"{of:14} {first} {medians[first]:.3f}  {second} {medians[second]:.3f}  {rows[of]['ratio']:.2f} x"
        )
    settings = {
        "seed": SEED,
        "turns": arguments.turns,
        "rounds": arguments.rounds,
        "cores": os.cpu_count(),
        "commits": {arm.name: commit(arm.checkout) for arm in arms},
    }
    print(write(f"engines/{name}", {"settings": settings, "medians": rows, "values": found}))


if __name__ == "__main__":
    main()
