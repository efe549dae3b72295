"""What preemption does to an urgent request and to the long prefill that it meets, through the whole server.

Serves the embedded model once with preemption and once without. In each, rounds alternate between: an urgent
prompt alone, a long prompt alone, and an urgent prompt that arrives while the long one is being prefilled, at
evenly spread moments. Prompts are random tokens, so nothing comes from the prefix cache.

    python -m benchmarks.engines.preemption [--rounds 8]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.local_server import client, embedded_settings, logged, served
from benchmarks.harness.urgent_among_long import rounds
from benchmarks.report import print_rows, quantiles, write
from simulator.workload.arrivals import Arrival
from slo.tiers import BACKGROUND, PREMIUM

PORT = 18438
SEED = 3000
URGENT = Arrival(0, 0.0, "urgent", tokens=64, output_tokens=2, ttft_s=1.0, tier=PREMIUM)
LONG = Arrival(0, 0.0, "long", tokens=3000, output_tokens=2, ttft_s=None, tier=BACKGROUND)
LAYERS = 30
POINTS = ("p50", "p90", "p100")


async def _measured(count: int) -> dict[str, list[float]]:
    async with client(PORT, SEED) as asked:
        return await rounds(asked, URGENT, LONG, count)


def serve(mode: str, count: int, directory: Path) -> tuple[dict[str, list[float]], str]:
    """Measure one mode of preemption; the times and the server's log."""
    # Without preemption urgent requests are late, for which the monitor would refuse the long ones.
    settings = embedded_settings(port=PORT, preemption={"mode": mode}, monitor={"shed": False})
    with served(directory, settings):
        return asyncio.run(_measured(count)), (directory / "log").read_text()


def summary(times: dict[str, list[float]], log: str) -> dict[str, Any]:
    """Medians and spreads of one mode, milliseconds."""
    times_ms = {name: [t * 1e3 for t in values] for name, values in times.items()}
    order_to_stop_ms = logged(log, "prefill_stopped", "stop_ms")
    return {
        "ttft": {name: {"ms": values, **quantiles(values, 50, 90, 100)} for name, values in times_ms.items()},
        "stops": len(order_to_stop_ms),
        "order_to_stop_ms": order_to_stop_ms,
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
    results = {mode: summary(*run) for mode, run in runs.items()}
    rows = [
        {"preemption": mode, "TTFT": name, **{point: found["ttft"][name][point] for point in POINTS}}
        for name in ("urgent_alone", "urgent", "long_alone", "long")
        for mode, found in results.items()
    ]
    print_rows("Time to first token, ms", rows)
    stops = results["resume"]["stops"]
    if stops != arguments.rounds:
        raise SystemExit(f"{stops} of {arguments.rounds} rounds were preempted: the result means nothing")
    bounds = verdict(runs["resume"][0], runs["off"][0])
    print(json.dumps(bounds, indent=2))
    print(write("engines/preemption", {"rounds": arguments.rounds, "modes": results, "bounds": bounds}))


if __name__ == "__main__":
    main()
