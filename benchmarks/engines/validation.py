"""Whether the simulator foretells a real server: the embedded model on CPU, one fixed stream, both ways.

Serves the embedded model, measures what prompts take alone, offers a fixed stream of short and long prompts,
and simulates the same stream with the times that were measured. The recording is written to
results/engines/validation.json, to be simulated again.

What a prompt takes alone is measured before and after the stream, since a shared machine is not always
equally fast, and after a pause as most requests of the stream find the server. The stream asks for one token
each: on CPU the decode tier takes from the prefill tier what it computes, and that is not simulated.

    python -m benchmarks.engines.validation [--requests 60] [--load 0.35]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.comparison import load
from benchmarks.comparison.arms import FIXED, RunningServer, running
from benchmarks.harness.local_server import environment
from benchmarks.report import print_rows, write
from simulator.study.validation import Recorded, Recording, compare
from simulator.workload.arrivals import Arrival, Kind, Mix
from slo.tiers import PREMIUM, STANDARD

SEED = 5
ARM = FIXED["slackserve"]
ALONE_TOKENS = (64, 128, 256, 512, 1024, 1536, 2000)
REPEATS = 3
PAUSE_S = 2.5
KINDS = {
    "short": Kind(0.8, 0, 2.0, PREMIUM, output_tokens=4, range_tokens=(64, 512), is_uniform=True),
    "long": Kind(0.2, 0, 20.0, STANDARD, output_tokens=4, range_tokens=(800, 2000), is_uniform=True),
}


def medians(*measured: dict[int, list[float]]) -> list[tuple[int, float]]:
    """(tokens, median seconds) over all measurements."""
    return [
        (tokens, statistics.median(t for times in measured for t in times[tokens])) for tokens in ALONE_TOKENS
    ]


def alone(server: RunningServer) -> dict[int, list[float]]:
    """By tokens, seconds to the first token of prompts that have the server to themselves."""
    times: dict[int, list[float]] = {tokens: [] for tokens in ALONE_TOKENS}
    for _ in range(REPEATS):
        measured = load.alone_ms(ARM, server, ALONE_TOKENS, output_tokens=1, pause_s=PAUSE_S)
        for tokens, ms in zip(ALONE_TOKENS, measured, strict=True):
            times[tokens].append(ms / 1e3)
    return times


def calibrated(profile: Path) -> dict[int, list[float]]:
    """By tokens, seconds of prefills, as `slackserve calibrate` measures them on the running server."""
    command = [sys.executable, "-m", "deployments.cli", "calibrate", "--output", str(profile)]
    command += ["--handoff-ms", "0", "--lengths", ",".join(map(str, ALONE_TOKENS))]
    subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)  # noqa: S603
    times: dict[int, list[float]] = {tokens: [] for tokens in ALONE_TOKENS}
    for sample in json.loads(profile.read_text())["samples"]:
        if sample["context_tokens"] == 0:
            times[sample["tokens"]].append(sample["measured_s"])
    return times


def stream(times: list[tuple[int, float]], count: int, fraction: float) -> list[Arrival]:
    """The stream at a fraction of what the server can do one prompt after the other."""
    mix = Mix(KINDS)
    (low, low_s), (high, high_s) = times[0], times[-1]
    slope = (high_s - low_s) / (high - low)
    mean_s = statistics.fmean(low_s + slope * (a.tokens - low) for a in mix.stream(1.0, 2000, SEED))
    return [replace(arrival, output_tokens=1) for arrival in mix.stream(fraction / mean_s, count, SEED)]


def record(count: int, fraction: float) -> Recording:
    """Measure on the real server."""
    with tempfile.TemporaryDirectory() as directory, running(ARM, Path(directory)) as server:
        load.warm_up(ARM, server)
        profile = Path(directory) / "profile.json"
        before = calibrated(profile), alone(server)
        offered = load.ask(ARM, server, stream(medians(before[1]), count, fraction))
        after = calibrated(profile), alone(server)
    requests = []
    for ended in offered.ended:
        arrival, ttft_s = ended.arrival, ended.answer.ttft_s
        if ttft_s is None or ended.answer.reason:
            raise SystemExit(f"a request was not answered: {ended.answer.reason}")
        assert arrival.ttft_s is not None
        at_s = arrival.at_s + ended.late_s
        requests.append(Recorded(at_s, arrival.kind, arrival.tier, arrival.tokens, arrival.ttft_s, ttft_s))
    prefill, times = (medians(first, second) for first, second in zip(before, after, strict=True))
    return Recording(ARM.name, prefill, times, requests)


def main() -> None:
    """Record, simulate, print both and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--load", type=float, default=0.35)
    arguments = parser.parse_args()
    recording = record(arguments.requests, arguments.load)
    found = compare(recording)
    rows = [
        {
            "TTFT": name,
            "measured, ms": real * 1e3,
            "simulated, ms": ours * 1e3,
            "off by": f"{ours / real - 1:+.1%}",
        }
        for name, (real, ours) in found.items()
    ]
    print_rows("Measured and simulated", rows)
    results = {"recording": recording.document(), "quantiles_s": found, "load": arguments.load}
    print(write("engines/validation", results))


if __name__ == "__main__":
    main()
