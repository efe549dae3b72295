"""Where each result is from: its benchmark, the commits that it was measured at, and the machine.

Whether a commit is in the history is not looked up here, as the history of a clone may be shallow or missing:
those that are in no clone are listed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from benchmarks import report

NOT_IN_HISTORY: Final = frozenset({"01c9415", "cab2825", "e907d29", "f4653f8"})
"""Commits that results name and that `git cat-file -e COMMIT` does not find in a whole clone."""
_COMMIT: Final = re.compile(r"\b[0-9a-f]{7,40}\b")
_BETWEEN: Final = re.compile(r"a working tree between (\w+) and (\w+)")
_KEYS: Final = ("commit", "commits", "more_commits")


def origins() -> str:
    """Every result with its benchmark, date, commits and machine, by path."""
    rows = []
    for path in sorted(report.RESULTS.rglob("*.json")):
        found = json.loads(path.read_text())
        about = found["about"]
        rows.append(
            [
                f"`{path.relative_to(report.RESULTS).with_suffix('')}`",
                f"`{_benchmark(about['command'])}`",
                about["date"],
                ", ".join(f"{name}{mark}" for name, mark in commits(found).items()),
                f"{about['cores']} {_cpu(about)}",
            ]
        )
    return report.markdown(["Result", "Benchmark", "Date", "Commits", "Cores"], rows)


def _benchmark(command: str) -> str:
    """The program of a command, without its arguments, which the result has."""
    words = command.removeprefix("python ").removeprefix("-m ").split()
    return words[0].removeprefix("benchmarks.").removeprefix("benchmarks/")


def _cpu(about: Mapping[str, Any]) -> str:
    gpu = about.get("device", {}).get("name", "").removeprefix("NVIDIA ")
    cpu = "EPYC" if "EPYC" in about["cpu"] else "Xeon"
    return f"{cpu}, {gpu}" if gpu else cpu


def commits(found: Any) -> dict[str, str]:
    """The commits that a result names, that of the whole first, each with its marks.

    `†` is in no history, `*` was a tree with changes that were not committed, `?` is one of which the
    result does not say.
    """
    states: dict[str, set[bool | None]] = {}
    for name, is_dirty in _named(found):
        states.setdefault(name, set()).add(is_dirty)
    return {
        name: ("†" if name in NOT_IN_HISTORY else "") + ("*" if True in of else "" if False in of else "?")
        for name, of in states.items()
    }


def _named(found: Any) -> Iterator[tuple[str, bool | None]]:
    """Each commit under a value, and whether its tree had changes, where that is said beside it."""
    if isinstance(found, Mapping):
        for key in _KEYS:
            text = json.dumps(found.get(key, ""))
            yield from ((f"{first} to {last}", True) for first, last in _BETWEEN.findall(text))
            yield from ((name, found.get("dirty")) for name in _COMMIT.findall(_BETWEEN.sub("", text)))
        found = [value for key, value in found.items() if key not in _KEYS]
    if isinstance(found, list):
        for value in found:
            yield from _named(value)


TABLES: Final[Mapping[str, Callable[[], str]]] = {"origins": origins}
