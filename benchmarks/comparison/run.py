"""SlackServe and Ray Serve LLM's own prefill/decode application on the same requests, at the same loads.

Urgent short prompts arrive among long ones, which are most of the work. Arms:

- `stock`: first come, first served, whole prompts; `stock-shipped`: vLLM's default of 2,048 tokens a step,
  NIXL's progress threads spinning as its Python API has them; `stock-chunked` and `stock-priority`: chunks
  tuned in a pilot, and with these vLLM's priorities and a cap on what one prompt takes of a step;
  `stock-pools`: a server for urgent prompts and one for long ones, on the same cores, with tuned chunks;
- `slackserve-off`: our order without preemption; `slackserve-chunked`: the same with tuned chunks;
  `slackserve`; `slackserve-sedf`: the same with S-EDF and FlowPrefill's rule when to stop;
  `slackserve-whole`: with whole prompts, however long a stop takes.

Loads are fractions of the prefill capacity, which a burst of the same mix on the stock server shows. What is
offered is within 2 % of that, or the run fails. Each start of a server serves all loads; rounds take the arms
in turn, every other one the other way round. In a round every arm gets the same requests. What is found is
written after every server; `--more` adds rounds to a result that is there, with the chunks that its arms
have, unless its workload, machine or versions, or the settings of an arm, are not today's.

    python -m benchmarks.comparison.run [--rounds 6] [--seconds 110] [--arms stock,slackserve,...] [--more]
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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
from benchmarks.comparison.earlier import chunks_of_arms, unlike
from benchmarks.comparison.table import loads_table, paired, shared, summary, verdict
from benchmarks.harness.cut_model import cut_model
from benchmarks.report import about, commit, write, written

DEFAULT_ARMS = "stock-shipped,stock-chunked,stock-priority,stock-pools,slackserve-chunked,slackserve"
PILOT_ROUND = -1
NAME = "comparison"
_console = Console(width=120)


class Comparison:
    """The whole measurement, and what it has found so far."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self._options = options
        self._directory = directory
        self._model = cut_model(directory / "model", options.layers) if options.layers else None
        self._mix = load.mix(options.urgent_ms, options.long_ms)
        self._workload = {
            "seed": load.SEED,
            "urgent_share": load.URGENT_SHARE,
            "urgent_tokens": load.URGENT_TOKENS,
            "long_tokens": load.LONG_TOKENS,
            "output_tokens": load.OUTPUT_TOKENS,
            "max_model_len": MODEL_LEN,
            "mean_prompt_tokens": load.mean_tokens(self._mix),
            "mean_output_tokens": load.mean_output_tokens(self._mix),
        }
        self._capacity_ps = 0.0
        self._pilot: list[dict[str, Any]] = []
        self._starts: list[dict[str, Any]] = []
        self._runs: list[load.ArmRun] = []
        self._chosen: dict[str, str] = {}
        self._commits: dict[str, str] = {}
        """Of the rounds whose starts do not name theirs."""
        self._superseded: Mapping[str, Any] = {}
        """Runs that later ones replaced, and why."""

    def go_on(self, found: Mapping[str, Any]) -> None:
        """Add to the result of a file.

        Raises:
            SystemExit: when that was another measurement: its rounds and today's would be one row.
        """
        before = found["results"]
        self._capacity_ps = before["settings"]["capacity_prompt_tokens_ps"]
        self._pilot, self._starts = [*before["pilot"]], [*before["starts"]]
        self._chosen = chunks_of_arms(before)
        self._runs = [load.ArmRun(**run) for run in before["runs"]]
        self._commits = before["settings"]["commits"]
        self._superseded = before.get("superseded", {})
        known = [self._arm(name) for name in self._options.arms if name in FIXED or name in self._chosen]
        if differing := unlike(found, self._settings(), about(), known):
            raise SystemExit("--more would add to another measurement:\n" + "\n".join(differing))

    def measure(self) -> None:
        """The capacity, the tuning, and all rounds of all arms, after those that there are."""
        if not self._capacity_ps:
            with self._serving(FIXED["stock"], PILOT_ROUND) as server:
                self._capacity_ps = load.burst_tokens_ps(
                    FIXED["stock"], server, self._mix, self._options.burst
                )
            _console.print(f"capacity {self._capacity_ps:.0f} prompt tokens/s", highlight=False)
        for name in self._options.arms:
            if name in TUNED and name not in self._chosen:
                self._chosen[name] = self._tune(name)
        arms = {name: self._arm(name) for name in self._options.arms}
        first = max((run.round for run in self._runs), default=-1) + 1
        for number in range(first, first + self._options.rounds):
            for name in self._options.arms if number % 2 == 0 else reversed(self._options.arms):
                with self._serving(arms[name], number) as server:
                    self._runs += [
                        self._run(arms[name], server, fraction, number, self._options.seconds)
                        for fraction in self._options.loads
                    ]
                write(NAME, self.results())

    def _arm(self, name: str) -> ServerArm:
        """One whose chunks, if it has some, are chosen."""
        return chunked(name, Chunking.parse(self._chosen[name])) if name in TUNED else FIXED[name]

    def _tune(self, name: str) -> str:
        """Try every chunk at the highest load.

        The best has the most requests in time, then the most urgent ones, then the soonest of nine in ten.
        """
        fraction, tried = max(self._options.loads), []
        for given in getattr(self._options, _option(name)):
            arm = chunked(name, Chunking.parse(given))
            with self._serving(arm, PILOT_ROUND) as server:
                run = self._run(arm, server, fraction, PILOT_ROUND, self._options.pilot_seconds)
            self._pilot.append({"chunk_tokens": given, **asdict(run)})
            tried.append((*run.merit(), given))
            write(NAME, self.results())
        best = max(tried)[-1]
        _console.print(f"{name}: chunks of {best}", highlight=False)
        return best

    @contextmanager
    def _serving(self, arm: ServerArm, number: int) -> Iterator[RunningServer]:
        """A server of an arm, warm."""
        _console.print(f"round {number + 1}: {arm.name} {' '.join(arm.stock or ())}", highlight=False)
        with running(arm, self._directory, self._model) as server:
            warm = load.warm_up(arm, server)
            self._starts.append(
                {"arm": arm.name, "round": number, "commit": commit(), **warm, "settings": arm.settings()}
            )
            _console.print(
                f"  up in {warm['ready_s']:.0f} s; alone urgent {_listed(warm['urgent_alone_ms'])}, "
                f"long {_listed(warm['long_alone_ms'])} ms",
                highlight=False,
            )
            yield server

    def _run(
        self, arm: ServerArm, server: RunningServer, fraction: float, number: int, seconds: float
    ) -> load.ArmRun:
        plan = load.RunPlan(number, fraction, fraction * self._capacity_ps, seconds)
        run = load.run_at(arm, server, self._mix, plan)
        shown = ", ".join(f"{kind} {run.attained(kind):.0%} of {len(run.met[kind])}" for kind in run.met)
        _console.print(
            f"  load {fraction:g}: {shown} in time, {run.prompt_tokens_ps:.0f} prompt tokens/s, "
            f"{run.preemptions} preemptions, refused {run.refused}, failed {run.failed}",
            highlight=False,
        )
        return run

    def results(self) -> dict[str, Any]:
        """Everything so far, as JSON; the summary and the verdict are of the rounds that all arms served."""
        same = shared(self._runs, self._options.arms)
        rows = summary(same)
        return {
            "settings": self._settings(),
            "chosen": self._chosen,
            "starts": self._starts,
            "pilot": self._pilot,
            "runs": [asdict(run) for run in self._runs],
            "superseded": self._superseded,
            "summary": rows,
            "paired": paired(same),
            "verdict": verdict(rows),
            "all_rounds": summary(self._runs),
        }

    def _settings(self) -> dict[str, Any]:
        """The options and the workload; of the chunks that were to be tried those that the pilot did try."""
        tried = {
            _option(name): list(
                dict.fromkeys(run["chunk_tokens"] for run in self._pilot if run["arm"] == name)
            )
            for name in TUNED
        }
        return {
            **vars(self._options),
            **tried,
            **self._workload,
            "capacity_prompt_tokens_ps": self._capacity_ps,
            "commits": self._commits,
        }


def _option(name: str) -> str:
    """Which chunks are tried for an arm."""
    return f"{name.replace('-', '_')}_chunks"


def _listed(times_ms: list[float]) -> str:
    return ", ".join(f"{time_ms:.0f}" for time_ms in times_ms)


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Those of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=110, help="of arrivals at each load")
    parser.add_argument(
        "--pilot-seconds", type=float, default=110, help="the same for each chunk of the pilot"
    )
    parser.add_argument("--arms", type=_names, default=_names(DEFAULT_ARMS))
    parser.add_argument("--loads", type=_numbers, default=_numbers("0.5,0.7,0.9"))
    for name, chunks in TUNED.items():
        parser.add_argument(f"--{name}-chunks", type=_chunks, default=chunks, help="512,512/384,…")
    parser.add_argument("--burst", type=int, default=40, help="requests by which the capacity is measured")
    parser.add_argument("--layers", type=int, help="the embedded model's first ones; by default all")
    parser.add_argument("--urgent-ms", type=float, default=800)
    parser.add_argument("--long-ms", type=float, default=20_000)
    parser.add_argument("--more", action="store_true", help="add rounds to the result that is there")
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    names = text.split(",")
    known = [*FIXED, *TUNED]
    if wrong := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(known)}")
    return names


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _chunks(text: str) -> list[str]:
    return [str(Chunking.parse(part)) for part in text.split(",")]


def main() -> None:
    """Measure, and print one table."""
    given = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped
    with tempfile.TemporaryDirectory() as directory:
        comparison = Comparison(given, Path(directory))
        if given.more:
            comparison.go_on(written(NAME))
        comparison.measure()
    results = comparison.results()
    _console.print(loads_table(results["summary"]))
    _console.print_json(data=results["verdict"])
    print(write(NAME, results))


if __name__ == "__main__":
    main()
