"""Whether short prompts come sooner when decode computes them (`kv_transfer.local_below`), on a real server.

The embedded model, one replica of each tier. Prompts of exactly `local_below` tokens may be computed by
decode, those of one token more never are: the same load is asked for with the one and with the other length,
in turns, so that whatever else the machine does hits both. Three loads: nothing else; four streams on decode;
two streams, and long prompts on prefill. Writes results/engines/local_below.json:

    python -m benchmarks.engines.local_below [--rounds 6]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.local_server import Client, client, embedded_settings, served
from benchmarks.report import print_rows, quantiles, write
from deployments.bench.answer import Answer
from simulator.workload.arrivals import Arrival
from slo.tiers import BACKGROUND, PREMIUM

PORT, SEED = 18461, 20261
BELOW = 16
SHORT, EVERY_S, TOKENS = 8, 0.4, 8
"""So many short prompts in a round, one every so many seconds, with answers of so many tokens."""
LOADS = {"alone": (0, 0), "four streams": (4, 0), "two streams, long prompts": (2, 3)}
"""Streams, and prompts of 900 tokens, in a round."""
ARMS = {"by decode": BELOW, "by prefill": BELOW + 1}


def arrivals(tokens: int, streams: int, longs: int) -> list[Arrival]:
    """A round: the streams, then short prompts of so many tokens and, among them, the long ones."""
    lasting = [Arrival(0, 0.0, "stream", 64, 110, None, BACKGROUND) for _ in range(streams)]
    long = [Arrival(0, 1.0 + 1.1 * n, "long", 900, TOKENS, None, BACKGROUND) for n in range(longs)]
    short = [Arrival(0, 1.2 + EVERY_S * n, "short", tokens, TOKENS, 60.0, PREMIUM) for n in range(SHORT)]
    return sorted([*lasting, *long, *short], key=lambda arrival: arrival.at_s)


async def measure(ask: Client, rounds: int) -> dict[str, dict[str, dict[str, list[Answer]]]]:
    """The answers by load, arm and kind of request."""
    found: dict[str, dict[str, dict[str, list[Answer]]]] = {}
    await ask.answers(*arrivals(BELOW, 1, 1))
    for load, (streams, longs) in LOADS.items():
        by_arm = found.setdefault(load, {arm: {} for arm in ARMS})
        for number in range(rounds):
            for arm in [*ARMS][:: -1 if number % 2 else 1]:
                asked = arrivals(ARMS[arm], streams, longs)
                for arrival, answer in zip(asked, await ask.answers(*asked), strict=True):
                    by_arm[arm].setdefault(arrival.kind, []).append(answer)
    return found


def shown(answers: Sequence[Answer]) -> dict[str, Any]:
    """Times of the answers to one kind of request, ms."""
    firsts = [1e3 * (answer.ttft_s or 0.0) for answer in answers]
    wholes = [1e3 * (answer.ended_s - answer.sent_s) for answer in answers]
    paces = [1e3 * answer.tpot_s for answer in answers if answer.tpot_s is not None]
    return {
        "answers": len(answers),
        "ttft_ms": quantiles(firsts, 50, 90),
        "whole_ms": quantiles(wholes, 50, 90),
        "tpot_ms": quantiles(paces, 50),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    settings = embedded_settings(port=PORT)
    settings["kv_transfer"] = {**settings["kv_transfer"], "local_below": BELOW}
    with tempfile.TemporaryDirectory() as directory, served(Path(directory), settings):

        async def run() -> dict[str, dict[str, dict[str, list[Answer]]]]:
            async with client(PORT, SEED) as ask:
                return await measure(ask, rounds)

        found = asyncio.run(run())
        by_decode = (Path(directory) / "log").read_text().count("reason=cheaper_on_decode")
    results = {
        load: {arm: {kind: shown(answers) for kind, answers in kinds.items()} for arm, kinds in arms.items()}
        for load, arms in found.items()
    }
    rows = [
        {"arm": arm, "kind": kind, **row, "load": load}
        for load, arms in results.items()
        for arm, kinds in arms.items()
        for kind, row in kinds.items()
    ]
    print_rows("Prompts computed by decode and by prefill", rows)
    print(f"computed by decode: {by_decode}")
    about = {"rounds": rounds, "below": BELOW, "computed_by_decode": by_decode}
    write("engines/local_below", {**about, "loads": results})


if __name__ == "__main__":
    main()
