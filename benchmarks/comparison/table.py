"""The results of `comparison.run`: what was attained with its interval, the verdict, the tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Column, Table

if TYPE_CHECKING:
    import numpy.typing as npt

    from benchmarks.comparison.load import ArmRun

OURS = "slackserve"
STOCK = "stock"
KINDS = ("urgent", "long")
BOOTSTRAPS = 4000
ROUNDS_OF_AN_INTERVAL = 5
"""Of fewer rounds there is no interval: a bootstrap of two gives back little more than the two."""
GOAL_RATIO = 1.15
GOAL_POINTS = 0.02
GOAL_THROUGHPUT = 0.03
GOAL_LONG_P99 = 1.5
"""Over the best stock arm: urgent requests in time; what no class may lose; throughput; long prompts' p99."""


def summary(runs: Sequence[ArmRun]) -> list[dict[str, Any]]:
    """A row for each load and arm, over the requests of all its rounds."""
    found = []
    for load in sorted({run.load for run in runs}):
        for arm in dict.fromkeys(run.arm for run in runs):
            same = [run for run in runs if (run.load, run.arm) == (load, arm)]
            if same:
                row: dict[str, Any] = {"load": load, "arm": arm, "rounds": len(same)}
                for kind in (*KINDS, None):
                    row[kind or "all"] = {
                        "attained": _attained(same, kind),
                        "by_round": [run.attained(kind) for run in sorted(same, key=_round)],
                        **_ends(attainment_interval(same, kind)),
                    }
                row["requests"] = {kind: sum(len(run.met.get(kind, ())) for run in same) for kind in KINDS}
                row["ttft_ms"] = {kind: _quantiles(same, kind) for kind in KINDS}
                row["prompt_tokens_ps"] = _tokens_ps(same)
                row["preemptions"] = sum(run.preemptions for run in same)
                row["unserved"] = sum(run.unserved for run in same)
                found.append(row)
    return found


def shared(runs: Sequence[ArmRun], arms: Sequence[str]) -> list[ArmRun]:
    """The runs of these arms in rounds that they all served at all loads: the same requests for each.

    All their runs, where there is no such round.
    """
    some = [run for run in runs if run.arm in arms]
    cases = {(run.arm, run.load) for run in some}
    whole = {
        number
        for number in {run.round for run in some}
        if {(run.arm, run.load) for run in some if run.round == number} == cases
    }
    return [run for run in some if run.round in whole] or some


def paired(runs: Sequence[ArmRun]) -> list[dict[str, Any]]:
    """At each load: ours less each other arm, request by request of the rounds that both served.

    Points of attainment by kind, of all, of each round, and 95 % of a bootstrap, in which rounds and requests
    of each are drawn; prompt tokens per second of all these rounds as a ratio.
    """
    found = []
    for load in sorted({run.load for run in runs}):
        here = [run for run in runs if run.load == load]
        ours = {run.round: run for run in here if run.arm == OURS}
        for arm in dict.fromkeys(run.arm for run in here if run.arm != OURS):
            theirs = sorted((run for run in here if run.arm == arm and run.round in ours), key=_round)
            pairs = [(ours[run.round], run) for run in theirs]
            if pairs:
                row: dict[str, Any] = {"load": load, "arm": arm, "rounds": len(pairs)}
                row |= {kind: _difference(pairs, kind) for kind in KINDS}
                row["throughput_ratio"] = _tokens_ps([mine for mine, _ in pairs]) / _tokens_ps(theirs)
                found.append(row)
    return found


def _tokens_ps(runs: Sequence[ArmRun]) -> float:
    return sum(run.prompt_tokens_ps * run.wall_s for run in runs) / sum(run.wall_s for run in runs)


def _round(run: ArmRun) -> int:
    return run.round


def _difference(pairs: Sequence[tuple[ArmRun, ArmRun]], kind: str) -> dict[str, Any]:
    differences = [np.subtract(a.met[kind], b.met[kind], dtype=float) for a, b in pairs]
    return {
        "points": statistics.fmean(np.concatenate(differences)),
        "by_round": [statistics.fmean(some) for some in differences],
        **_ends(_interval(differences)),
    }


def _ends(interval: tuple[float, float] | None) -> dict[str, float]:
    return {} if interval is None else {"low": interval[0], "high": interval[1]}


def _interval(rounds: Sequence[npt.NDArray[np.float64]]) -> tuple[float, float] | None:
    """95 % of the mean, by a bootstrap: rounds are drawn, and of each drawn round its requests.

    None of fewer rounds than `ROUNDS_OF_AN_INTERVAL`.
    """
    if len(rounds) < ROUNDS_OF_AN_INTERVAL:
        return None
    rng = np.random.default_rng(1)
    drawn = []
    for _ in range(BOOTSTRAPS):
        picked = [rounds[at] for at in rng.integers(len(rounds), size=len(rounds))]
        again = [values[rng.integers(values.size, size=values.size)] for values in picked]
        drawn.append(np.concatenate(again).mean())
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(low), float(high)


def _attained(runs: Sequence[ArmRun], kind: str | None) -> float:
    return statistics.fmean(flag for run in runs for flag in run.flags(kind))


def _quantiles(runs: Sequence[ArmRun], kind: str) -> dict[str, float]:
    times = [ms for run in runs for ms in run.ttfts_ms.get(kind, ())]
    if not times:
        return {}
    found = np.percentile(times, (50, 90, 99))
    quantiles = {f"p{point}": float(value) for point, value in zip((50, 90, 99), found, strict=True)}
    return quantiles | {"longest": max(times)}


def attainment_interval(runs: Sequence[ArmRun], kind: str | None) -> tuple[float, float] | None:
    """95 % of what is attained, by a bootstrap over rounds and requests; None of few rounds.

    Where all were in time, or none, there is nothing to draw from: Clopper and Pearson's bound is taken.
    """
    rounds = [np.array(run.flags(kind), float) for run in runs]
    rounds = [flags for flags in rounds if flags.size]
    if len(rounds) < ROUNDS_OF_AN_INTERVAL:
        return None
    every = np.concatenate(rounds)
    if every.min() == every.max():
        bound = 0.025 ** (1 / every.size)
        return (bound, 1.0) if every[0] else (0.0, 1 - bound)
    return _interval(rounds)


def verdict(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At each load: ours against the stock arm that has most urgent requests in time."""
    found = []
    for load in sorted({row["load"] for row in rows}):
        here = {row["arm"]: row for row in rows if row["load"] == load}
        stock = [row for name, row in here.items() if name.startswith(STOCK)]
        if OURS not in here or not stock:
            continue
        ours, best = here[OURS], max(stock, key=lambda row: row["urgent"]["attained"])
        attained = best["urgent"]["attained"]
        ratio = ours["urgent"]["attained"] / attained if attained else None
        points = {kind: ours[kind]["attained"] - best[kind]["attained"] for kind in KINDS}
        throughput = ours["prompt_tokens_ps"] / best["prompt_tokens_ps"] - 1
        long_p99 = _ratio(ours["ttft_ms"]["long"], best["ttft_ms"]["long"])
        found.append(
            {
                "load": load,
                "best_stock": best["arm"],
                "urgent_ratio": ratio,
                "points": points,
                "throughput_difference": throughput,
                "long_p99_ratio": long_p99,
                "goals": {
                    "urgent_ratio": ratio is None or ratio >= GOAL_RATIO,
                    "points": min(points.values()) >= -GOAL_POINTS,
                    "throughput": throughput >= -GOAL_THROUGHPUT,
                    "long_p99": long_p99 is not None and long_p99 <= GOAL_LONG_P99,
                },
            }
        )
    return found


def _ratio(ours: dict[str, float], best: dict[str, float]) -> float | None:
    return ours["p99"] / best["p99"] if "p99" in ours and "p99" in best else None


def spread(cell: Mapping[str, Any], shown: Callable[[float], str], to: str = " to ") -> str:
    """The interval of a share or a difference, or what each round had."""
    if "low" in cell:
        return to.join(shown(cell[end]) for end in ("low", "high"))
    return ", ".join(map(shown, cell["by_round"]))


LONGEST = ("p99", "longest")
"""What is shown of each kind's longest times: of a few dozen long prompts a p99 lies beside the longest."""
_COLUMNS = (
    "urgent\nin time",
    "(95 % or\nby round)",
    "long\nin time",
    "(95 % or\nby round)",
    "urgent TTFT\np50/p99, ms",
    "long TTFT\np50/longest, ms",
    "tokens\n/s",
    "stops",
    "unserved",
)


def loads_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One row for each load and arm."""
    table = Table("load", Column("arm", no_wrap=True))
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    before = None
    for row in rows:
        if before not in (None, row["load"]):
            table.add_section()
        before = row["load"]
        cells = []
        for kind in KINDS:
            cells += [f"{row[kind]['attained']:.0%}", spread(row[kind], "{:.0%}".format, "-")]
        for kind, end in zip(KINDS, LONGEST, strict=True):
            times = row["ttft_ms"][kind]
            cells.append(f"{times.get('p50', 0):.0f}/{times.get(end, 0):.0f}")
        cells += [f"{row['prompt_tokens_ps']:.0f}", str(row["preemptions"]), str(row["unserved"])]
        table.add_row(f"{row['load']:g}", row["arm"], *cells)
    return table
