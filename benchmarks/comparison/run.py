"""SlackServe and Ray Serve LLM's own prefill/decode application on the same requests, at the same loads.

Arms: stock (first come, first served, whole prompts), stock with chunked prefill whose chunk is tuned in a
pilot at the middle load, and ours without and with preemption; on request also `stock-priority`, with tuned
chunks and vLLM's own priorities. Urgent short prompts arrive among long ones, which are most of the work.
Loads are fractions of the prefill capacity, which a burst of the same mix on the stock server shows. Each
start of a server serves all loads; rounds take the arms in turn, every other one the other way round. In a
round every arm gets the same requests. What is found is written after every server.

    python -m benchmarks.comparison.run [--rounds 2] [--seconds 240] [--arms stock,stock-chunked,...]
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.comparison import load
from benchmarks.comparison.arms import (
    FIXED,
    MODEL_LEN,
    TUNED,
    Chunking,
    RunningServer,
    ServerArm,
    chunked,
    running,
)
from benchmarks.comparison.table import loads_table, summary, verdict
from benchmarks.report import write

DEFAULT_ARMS = "stock,stock-chunked,slackserve-off,slackserve"
DEFAULT_CHUNKS = "256,512,1024"
PILOT_ROUND = -1
_console = Console(width=120)


class Comparison:
    """The whole measurement, and what it has found so far."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self._options = options
        self._directory = directory
        self._mix = load.mix(options.urgent_ms, options.long_ms)
        self._capacity_ps = 0.0
        self._pilot: list[dict[str, Any]] = []
        self._starts: list[dict[str, Any]] = []
        self._runs: list[load.ArmRun] = []
        self._arms: dict[str, ServerArm] = dict(FIXED)

    def measure(self) -> None:
        """The capacity, the tuning, and all rounds of all arms."""
        with self._serving(FIXED["stock"], PILOT_ROUND):
            self._capacity_ps = self._starts[-1]["burst_prompt_tokens_ps"]
        for name in self._options.arms:
            if name in TUNED:
                self._arms[name] = chunked(name, self._tune(name))
        for number in range(self._options.rounds):
            for name in self._options.arms if number % 2 == 0 else reversed(self._options.arms):
                with self._serving(self._arms[name], number) as server:
                    for fraction in self._options.loads:
                        self._runs.append(
                            self._run(self._arms[name], server, fraction, number, self._options.seconds)
                        )
                write("comparison", self.results())

    def _tune(self, name: str) -> Chunking:
        """Try every chunk at the middle load; the best is that with the most requests in time."""
        fraction = sorted(self._options.loads)[len(self._options.loads) // 2]
        tried = []
        for chunking in self._options.chunks:
            arm = chunked(name, chunking)
            with self._serving(arm, PILOT_ROUND) as server:
                run = self._run(arm, server, fraction, PILOT_ROUND, self._options.pilot_seconds)
            self._pilot.append({"chunk_tokens": str(chunking), **asdict(run)})
            tried.append(((run.overall, run.urgent), chunking))
            write("comparison", self.results())
        best = max(tried, key=lambda item: item[0])[1]
        _console.print(f"{name}: chunks of {best}", highlight=False)
        return best

    @contextmanager
    def _serving(self, arm: ServerArm, number: int) -> Iterator[RunningServer]:
        """A server of an arm, warm, after its burst."""
        _console.print(f"round {number + 1}: {arm.name} {' '.join(arm.stock or ())}", highlight=False)
        with running(arm, self._directory) as server:
            warm = load.warm_up(arm, server)
            burst_ps = load.burst_tokens_ps(arm, server, self._mix, self._options.burst)
            found = {"arm": arm.name, "round": number, **warm, "burst_prompt_tokens_ps": burst_ps}
            self._starts.append({**found, "settings": arm.settings()})
            _console.print(
                f"  up in {warm['ready_s']:.0f} s; alone urgent {_listed(warm['urgent_alone_ms'])}, "
                f"long {_listed(warm['long_alone_ms'])} ms; burst {burst_ps:.0f} prompt tokens/s",
                highlight=False,
            )
            yield server

    def _run(
        self, arm: ServerArm, server: RunningServer, fraction: float, number: int, seconds: float
    ) -> load.ArmRun:
        tokens_ps = fraction * self._capacity_ps
        seed = load.SEED + 1000 * (number + 1) + round(100 * fraction)  # so that all arms get the same
        arrivals = load.offered(self._mix, tokens_ps, seconds, seed)
        run = load.run_at(arm, server, arrivals, number, fraction, tokens_ps)
        _console.print(
            f"  load {fraction:g}: urgent {run.urgent:.0%} of {run.requests['urgent']}, long {run.long:.0%} "
            f"of {run.requests['long']} in time, {run.prompt_tokens_ps:.0f} prompt tokens/s, "
            f"{run.preemptions} preemptions, refused {run.refused}, failed {run.failed}",
            highlight=False,
        )
        return run

    def results(self) -> dict[str, Any]:
        """Everything so far, as JSON."""
        rows = summary(self._runs)
        return {
            "settings": {
                **vars(self._options),
                "chunks": [str(chunking) for chunking in self._options.chunks],
                "seed": load.SEED,
                "urgent_share": load.URGENT_SHARE,
                "urgent_tokens": load.URGENT_TOKENS,
                "long_tokens": load.LONG_TOKENS,
                "output_tokens": load.OUTPUT_TOKENS,
                "max_model_len": MODEL_LEN,
                "mean_prompt_tokens": load.mean_tokens(self._mix),
                "capacity_prompt_tokens_ps": self._capacity_ps,
                "arms_settings": {name: self._arms[name].settings() for name in self._arms},
            },
            "starts": self._starts,
            "pilot": self._pilot,
            "runs": [asdict(run) for run in self._runs],
            "summary": rows,
            "verdict": verdict(rows),
        }


def _listed(times_ms: list[float]) -> str:
    return ", ".join(f"{time_ms:.0f}" for time_ms in times_ms)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=240, help="of arrivals at each load")
    parser.add_argument(
        "--pilot-seconds", type=float, default=120, help="the same for each chunk of the pilot"
    )
    parser.add_argument("--arms", type=_names, default=_names(DEFAULT_ARMS))
    parser.add_argument("--loads", type=_numbers, default=_numbers("0.5,0.7,0.9"))
    parser.add_argument("--chunks", type=_chunks, default=_chunks(DEFAULT_CHUNKS), help="512, or 512/384")
    parser.add_argument("--burst", type=int, default=40, help="requests by which the capacity is measured")
    parser.add_argument("--urgent-ms", type=float, default=800)
    parser.add_argument("--long-ms", type=float, default=20_000)
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.split(",")
    known = [*FIXED, *TUNED]
    if wrong := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(known)}")
    return names


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _chunks(text: str) -> list[Chunking]:
    return [Chunking.parse(part) for part in text.split(",")]


def main() -> None:
    """Measure, and print one table."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped
    with tempfile.TemporaryDirectory() as directory:
        comparison = Comparison(options, Path(directory))
        comparison.measure()
    results = comparison.results()
    _console.print(loads_table(results["summary"]))
    _console.print_json(data=results["verdict"])
    print(write("comparison", results))


if __name__ == "__main__":
    main()
