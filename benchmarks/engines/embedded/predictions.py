"""How far predicted first tokens and forward passes are off: the embedded model under its mix, here.

Serves the embedded model as `make serve` does, offers short urgent prompts beside long ones from the server's
first request on, and compares what the router predicted for each with what its ingress measured. The error of
passes is the monitor's own, over each replica's latest.

    python -m benchmarks.engines.embedded.predictions [--seconds 600] [--rate 0.2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.harness.local_server import client, embedded_settings, environment, logged, served
from benchmarks.report import print_rows, quantiles, write
from deployments.bench.mixes import load_workload

SEED = 20261122
PORT = 18439
PARTS = 3


async def offered(seconds: float, rate_rps: float) -> tuple[int, Counter[str]]:
    """Send the mix and wait for all answers; the number of these, and of what was refused by reason."""
    arrivals = load_workload("embedded").mix(None).stream(rate_rps, round(seconds * rate_rps), SEED)
    async with client(PORT, SEED) as asked:
        answers, refused = await asked.answers_and_refusals(*arrivals)
    return len(answers), refused


def passes() -> dict[str, Any]:
    """What the monitor says of predicted forward passes."""
    command = [sys.executable, "-m", "deployments.cli", "top", "--once", "--json"]
    run = subprocess.run(command, capture_output=True, check=True, env=environment())  # noqa: S603
    found: dict[str, Any] = json.loads(run.stdout)["monitor"]
    return {name: found[name] for name in ("error", "ttft_error")}


def errors(log: str) -> list[tuple[float, float]]:
    """(measured TTFT, error of its prediction over it) of each request, in the order of their ends."""
    lines = "\n".join(
        line for line in log.splitlines() if "predicted_ttft_s=" in line and "request_ended" in line
    )
    measured, predicted = (logged(lines, "request_ended", name) for name in ("ttft_s", "predicted_ttft_s"))
    return [(ttft, said / ttft - 1) for ttft, said in zip(measured, predicted, strict=True)]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--rate", type=float, default=0.2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with served(directory, embedded_settings(port=PORT)):
            count, refused = asyncio.run(offered(asked.seconds, asked.rate))
            of_passes = passes()
        found = errors((directory / "log").read_text())
    assert len(found) == count
    rows = []
    for part in range(PARTS):
        inside = found[count * part // PARTS : count * (part + 1) // PARTS]
        rows.append(_summary(f"requests of third {part + 1}", inside))
    rows.append(_summary("all", found))
    for kind, low, high in (("up to 0.6 s", 0.0, 0.6), ("longer", 0.6, float("inf"))):
        rows.append(_summary(f"first tokens of {kind}", [pair for pair in found if low <= pair[0] < high]))
    print_rows("Predicted over measured time to first token", rows)
    print("passes:", of_passes, "refused:", dict(refused))
    settings = {"seconds": asked.seconds, "rate_rps": asked.rate, "seed": SEED}
    measured = {"first_tokens": rows, "refused": refused, "monitor": of_passes}
    print(write("engines/predictions", {"settings": settings, **measured}))


def _summary(what: str, found: list[tuple[float, float]]) -> dict[str, Any]:
    if not found:
        return {"of": what, "requests": 0}
    off = [abs(error) for _, error in found]
    bias = statistics.median(error for _, error in found)
    return {
        "of": what,
        "requests": len(found),
        "mape": statistics.fmean(off),
        "median bias": bias,
        **quantiles(off, 90),
    }


if __name__ == "__main__":
    main()
