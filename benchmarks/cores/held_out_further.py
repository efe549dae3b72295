"""Goes on with results of `held_out`: above what they have found, and on more streams.

Every arm has the setting that was best for it. `held_out` finds that by bisection; here the search goes on
upwards. With `--streams` the streams after those of a result are searched too, each from the mean of what the
arm has on the others: its setting was not chosen on them. What several results have in common is searched
once, and kept in `--journal` as soon as it is found: from there the same commit goes on when interrupted. The
`commit` of a row is that of the search of its streams, and `more_commits` has those of streams added later.

    python -m benchmarks.cores.held_out_further held_out:slackserve [--streams 20] [--journal found.jsonl]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from benchmarks.cores.held_out import (
    ALL,
    LEVELS,
    WORST,
    Case,
    arm_of,
    attainments,
    compared,
    figure_of,
    goodput_rps,
    highest_that_attains,
    on_grid,
    place_of,
)
from benchmarks.report import commit, result, write_again

_FIGURES: Final = {figure_of(who, level): (who, level) for who, level in product((ALL, WORST), LEVELS)}
_STEPS_DOWN: Final = 4


@dataclass(frozen=True)
class Search:
    """One figure of one case.

    Attributes:
        rate_rps: Where the search begins: what was found, or the mean of what other streams have.
        is_found: Whether that was found on this very stream.
    """

    case: Case
    figure: str
    rate_rps: float
    is_found: bool


class Journal:
    """What was found by now, a line each.

    Args:
        path: Where it is kept; None for nowhere.

    Raises:
        ValueError: if it is of another commit.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.commit = commit()
        self.found: dict[Search, float] = {}
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        for line in lines:
            each = json.loads(line)
            if each["commit"] != self.commit:
                raise ValueError(f"{path} is of commit {each['commit']}, this is {self.commit}: give another")
            search = Search(Case(**each["case"]), each["figure"], each["rate_rps"], each["is_found"])
            self.found[search] = each["goodput_rps"]

    def add(self, search: Search, rate_rps: float) -> None:
        """Keep one that was found."""
        self.found[search] = rate_rps
        if self._path is not None:
            line = {"commit": self.commit, **asdict(search), "goodput_rps": rate_rps}
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def look_further(
    names: Sequence[str],
    ours: Sequence[str],
    processes: int | None,
    streams: int | None = None,
    journal: Path | None = None,
) -> None:
    """Search above what results have found, or on as many streams, once for all of them; write what is there.

    Raises:
        ValueError: if what was found does not hold any more, or the journal is of another commit.
    """
    kept = Journal(journal)
    known = [result(name) for name in names]
    searches = {
        search: None
        for results in known
        for row in results["rows"]
        for search in _searches(row, results, streams)
    }
    left = [search for search in searches if search not in kept.found]
    with ProcessPoolExecutor(processes) as pool:
        for search, rate_rps in zip(left, pool.map(look, left), strict=True):
            kept.add(search, rate_rps)
    for name, results, whose in zip(names, known, ours, strict=True):
        for row in results["rows"]:
            rates_rps = [kept.found[search] for search in _searches(row, results, streams)]
            if streams is None:
                row |= {"streams": rates_rps, "commit": kept.commit}
                row.pop("more_commits", None)
            else:
                row["streams"] = [*row["streams"], *rates_rps]
                row["more_commits"] = [*row.get("more_commits", []), *[kept.commit] * len(rates_rps)]
        made = {"rows": compared(results["rows"], whose)}
        if streams is None:
            write_again(name, "further", made)
        else:
            write_again(name, "more_streams", {**made, "streams": streams})


def _searches(row: Mapping[str, Any], results: Mapping[str, Any], streams: int | None) -> list[Search]:
    """Of each stream of a row, or of each that it lacks."""
    settings = [dict(setting) for setting in arm_of(row["arm"]).settings]
    setting, first_seed = settings.index(row["setting"]), results["first_seed"]
    base = Case(row["model"], row["arm"], setting, row["sigma"], first_seed, results["requests"])
    found = row["streams"]
    if streams is None:
        begins = list(enumerate(found))
    else:
        mean_rps = statistics.fmean(on_grid(row["model"], found))
        begins = [(stream, mean_rps) for stream in range(len(found), streams)]
    return [
        Search(replace(base, seed=first_seed + stream), row["figure"], rate_rps, streams is None)
        for stream, rate_rps in begins
    ]


def look(search: Search) -> float:
    """The goodput of one search, requests per second.

    Raises:
        ValueError: if what was found on this very stream does not hold any more.
    """
    case, (who, level) = search.case, _FIGURES[search.figure]
    attained, good = attainments(case, arm_of(case.arm)), place_of(case.model, search.rate_rps)

    def attains(place: int) -> bool:
        return place < 0 or attained(place, level)[who] >= level

    if not search.is_found:
        good = _attained_below(good, attains)
    elif not attains(good):
        raise ValueError(
            f"{case} does not attain {search.figure} at {search.rate_rps:g}/s any more: measure it anew"
        )
    return goodput_rps(case, highest_that_attains(attained, who, level, good))


def _attained_below(place: int, attains: Callable[[int], bool]) -> int:
    """A place that attains, the highest there is up to this one in steps of several; -1 for none."""
    while not attains(place):
        place = max(place - _STEPS_DOWN, -1)
    return place


def main() -> None:
    """Search on, and write what was found into the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("outputs", nargs="+", metavar="OUTPUT:OURS")
    parser.add_argument("--streams", type=int, help="search those that the outputs lack up to so many")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--journal", type=Path, help="where what was found is kept at once")
    options = parser.parse_args()
    outputs, ours = zip(*(each.split(":") for each in options.outputs), strict=True)
    names = [f"cores/{output}" for output in outputs]
    look_further(names, ours, options.processes, options.streams, options.journal)


if __name__ == "__main__":
    main()
