"""Whether the simulator foretells a real server: fixed streams at several loads, both ways.

Serves the embedded model's first layers on CPU, measures what prompts take alone, offers fixed streams of
short and long prompts, and simulates the same streams with the times that were measured. The recordings are
written to results/engines/validation.json, to be simulated again.

A load is the fraction of time that the prefills alone would take. What a prompt takes is measured before and
after each stream, since a shared machine is not always equally fast, and after a pause as most requests of
the stream find the server. The streams ask for one token each: on CPU the decode tier takes from the prefill
tier what it computes, and that is not simulated.

    python -m benchmarks.engines.validation [--requests 300] [--loads 0.35,0.6,0.9] [--layers 10]
        [--more | --again]

With `--more` what was found before, of other arms and loads, is kept; with `--again` nothing is measured, and
what was recorded is simulated again.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.comparison import load
from benchmarks.comparison.arms import FIXED, RunningServer, ServerArm, running
from benchmarks.harness.cut_model import cut_model
from benchmarks.harness.local_server import environment
from benchmarks.report import commit, print_rows, result, write, write_again
from simulator.cost.operators import Measured
from simulator.study.validation import Recorded, Recording, compare, faster
from simulator.workload.arrivals import Arrival, Kind, Mix
from slo.tiers import PREMIUM, STANDARD

_ROOT = Path(__file__).parents[2]
_RESULT = "engines/validation"
SEED = 5
FASTER = 0.95
ARMS = ("slackserve", "slackserve-off")
ALONE_TOKENS = (64, 128, 256, 512, 1024, 1536, 2000)
REPEATS = 3
PAUSE_S = 2.5
SHORT_S, LONG_S = 1.0, 8.0
KINDS = {
    "short": Kind(0.8, 0, SHORT_S, PREMIUM, output_tokens=1, range_tokens=(64, 512), is_uniform=True),
    "long": Kind(0.2, 0, LONG_S, STANDARD, output_tokens=1, range_tokens=(800, 2000), is_uniform=True),
}
_STOPPED = re.compile(r"prefill_stopped jobs=(\S+)")


def medians(*measured: dict[int, list[float]]) -> list[tuple[int, float]]:
    """(tokens, median seconds) over all measurements."""
    return [
        (tokens, statistics.median(t for times in measured for t in times[tokens])) for tokens in ALONE_TOKENS
    ]


def alone(arm: ServerArm, server: RunningServer) -> dict[int, list[float]]:
    """By tokens, seconds to the first token of prompts that have the server to themselves."""
    times: dict[int, list[float]] = {tokens: [] for tokens in ALONE_TOKENS}
    for _ in range(REPEATS):
        measured = load.alone_ms(arm, server, ALONE_TOKENS, output_tokens=1, pause_s=PAUSE_S)
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


def stream(prefill: list[tuple[int, float]], count: int, fraction: float) -> list[Arrival]:
    """So many requests, whose prefills alone take that fraction of the time in which they arrive."""
    *arrivals, after = Mix(KINDS).stream(1.0, count + 1, SEED)
    work_s = sum(map(Measured(prefill), (arrival.tokens for arrival in arrivals)))
    stretch = work_s / fraction / after.at_s
    return [replace(arrival, at_s=arrival.at_s * stretch) for arrival in arrivals]


Times = tuple[dict[int, list[float]], dict[int, list[float]]]
"""Seconds of prefills, and to the first token, of prompts that were alone."""


def record(
    arm: ServerArm, count: int, loads: list[float], layers: int, directory: Path
) -> Iterator[Recording]:
    """Measure on a real server, one load after the other."""
    model = cut_model(directory / "model", layers)
    with running(arm, directory, model) as server:
        load.warm_up(arm, server)
        profile = directory / "profile.json"

        def measured() -> Times:
            return calibrated(profile), alone(arm, server)

        before = measured()
        for fraction in loads:
            server.new_log()
            offered = load.ask(arm, server, stream(medians(before[0]), count, fraction))
            preemptions = sum(len(jobs.split(",")) for jobs in _STOPPED.findall(server.new_log()))
            after = measured()
            prefill, times = (medians(first, second) for first, second in zip(before, after, strict=True))
            requests = []
            for ended in offered.ended:
                arrival, ttft_s = ended.arrival, ended.answer.ttft_s
                if ttft_s is None or ended.answer.reason:
                    raise SystemExit(f"a request was not answered: {ended.answer.reason}")
                assert arrival.ttft_s is not None
                requests.append(
                    Recorded(
                        arrival.at_s + ended.late_s,
                        arrival.kind,
                        arrival.tier,
                        arrival.tokens,
                        arrival.ttft_s,
                        ttft_s,
                    )
                )
            yield Recording(arm.name, prefill, times, requests, layers, fraction, preemptions)
            before = after


def main() -> None:
    """Record, simulate, print both and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--loads", default="0.35,0.6,0.9")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    if asked.again:
        simulate_again()
        return
    loads, names = [*map(float, asked.loads.split(","))], asked.arms.split(",")
    rows, recordings = kept({*product(names, loads)}) if asked.more else ([], [])
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            for recording in record(FIXED[name], asked.requests, loads, asked.layers, Path(directory)):
                recordings.append(recording.document() | {"commit": commit(_ROOT)})
                rows += rows_of(recording)
                print_rows("Measured and simulated", rows)
    print(write(_RESULT, {"rows": rows, "recordings": recordings}))


def simulate_again() -> None:
    """Write what the simulator says of the recordings by now."""
    recordings = result(_RESULT)["recordings"]
    rows = [row for each in recordings for row in rows_of(Recording.of(each))]
    write_again(_RESULT, "simulated", {"rows": rows}, _ROOT)


def kept(measured_now: set[tuple[str, float]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and recordings of the results, without those of these arms and loads."""
    found = result(_RESULT)
    rows, recordings = (
        [each for each in found[what] if (each["arm"], each["load"]) not in measured_now]
        for what in ("rows", "recordings")
    )
    return rows, recordings


def rows_of(recording: Recording) -> list[dict[str, Any]]:
    """What a table says of a recording; "faster" is the simulator with prefills that take 5 % less."""
    sooner = compare(faster(recording, FASTER))
    return [
        {
            "arm": recording.arm,
            "load": recording.load,
            "of": what,
            "measured": measured,
            "simulated": simulated,
            "faster": sooner[what][1],
        }
        for what, (measured, simulated) in compare(recording).items()
    ]


if __name__ == "__main__":
    main()
