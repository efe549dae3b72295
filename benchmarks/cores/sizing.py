"""What the two comparisons of sizing rules share: the loads, the counts, and who is compared with whom."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass
from functools import partial
from itertools import pairwise, product
from operator import itemgetter
from typing import Any, Final

from benchmarks.report import print_rows, result, write
from simulator.fleet.sizers import ByRequests

SEED: Final = 1
MOST: Final = 8
START_S: Final = 60.0
TARGET: Final = 0.95
DAY_S: Final = 2400.0
SIZES: Final = range(2, 8)
"""Of fixed fleets."""
CONSTANT: Final = (0.5, 1.0, 2.0, 3.0)
SETTLED_S: Final = 600.0
RAY_DEFAULT: Final = (2.0, 30.0, 600.0)
Load = Callable[[float], float]
RaySetting = tuple[float, float, float]
"""Requests per replica, and how long Ray's policy waits before it grows and shrinks, in seconds."""
NOBODY_REFUSED: Final = "nobody refused"
"""One way to take requests."""


def step(at_s: float) -> float:
    """Work that arrives per second: for half a replica, and six times as much for a quarter of an hour."""
    begins_s, ends_s = 600, 1500
    return 3.0 if begins_s <= at_s < ends_s else 0.5


def day(at_s: float) -> float:
    """A night and a day, from a half to four replicas' work."""
    return 2.25 - 1.75 * math.cos(2 * math.pi * at_s / DAY_S)


def constantly(load: float) -> Load:
    """Always the same work."""
    return partial(_same, load)


LOADS: Final[Mapping[str, tuple[Load, float]]] = {"step": (step, 2400.0), "day": (day, DAY_S)}


def most_of(load: Load, seconds: float) -> float:
    """The most that a load asks for."""
    return max(load(float(second)) for second in range(int(seconds)))


@dataclass(frozen=True, slots=True)
class Sizing:
    """What became of one way to size a tier.

    Attributes:
        attainment: Of all requests, those in time.
        left_out: Of all requests, those refused (prefill), or for which there was no memory when they came
            (decode).
        per_replica_hour: Requests in time.
        turns: How often the size went up after down, or down after up.
    """

    attainment: float
    left_out: float
    replica_hours: float
    per_replica_hour: float
    max_replicas: int
    changes: int
    turns: int


Run = Callable[[str, Callable[[], Any], int, int], Sizing]
"""Serves the load of a name, with what makes its sizer, the replicas at the begin, and a seed."""


def sized(in_time: Sequence[bool], left_out: float, sizes: Sequence[int], replica_s: float) -> Sizing:
    """From whether each request was in time, and the sizes that the tier had in turn."""
    moves = [after - before for before, after in pairwise(sizes)]
    hours = replica_s / 3600
    return Sizing(
        sum(in_time) / len(in_time),
        left_out,
        hours,
        sum(in_time) / hours,
        max(sizes),
        len(moves),
        sum((one > 0) != (other > 0) for one, other in pairwise(moves)),
    )


def settled(sizes: Sequence[tuple[float, int]]) -> dict[str, int]:
    """The fewest and the most replicas, from (time in seconds, size), once the tier has settled."""
    before = [size for at_s, size in sizes if at_s <= SETTLED_S][-1]
    late = [before, *(size for at_s, size in sizes if at_s > SETTLED_S)]
    return {"low": min(late), "high": max(late)}


def rays(setting: RaySetting) -> ByRequests:
    """Ray's policy, with a setting."""
    return ByRequests((1, MOST), *setting)


def fixed(replicas: int) -> Callable[[object, float], int]:
    """Always as many."""
    return partial(_stay, replicas)


def compare(
    pool: ProcessPoolExecutor,
    runs: Mapping[str, Run],
    ours: Callable[[], Any],
    ray_settings: Sequence[RaySetting],
) -> dict[str, Any]:
    """Every sizer under every varying load.

    `runs` has, by its name, each way to take requests. Ours runs in the first; Ray's policy and the fixed
    fleets in all, and what is shown of them is the best of these, too.
    """
    found: dict[str, Any] = {}
    for load in LOADS:
        own = pool.submit(next(iter(runs.values())), load, ours, 1, SEED)
        ray: dict[Any, Future[Sizing]] = {
            (setting, way): pool.submit(run, load, partial(rays, setting), 1, SEED)
            for setting, (way, run) in product(ray_settings, runs.items())
        }
        fleets: dict[Any, Future[Sizing]] = {
            (size, way): pool.submit(run, load, partial(fixed, size), size, SEED)
            for size, (way, run) in product(SIZES, runs.items())
        }
        all_ray = [_row("setting", key, future) for key, future in ray.items()]
        all_fixed = [_row("replicas", key, future) for key, future in fleets.items()]
        found[load] = {
            "ours": asdict(own.result()),
            "ray": _best([row for row in all_ray if row["setting"] == RAY_DEFAULT]),
            "ray_tuned": _best(all_ray),
            "fixed": _best(all_fixed),
            "all_ray": all_ray,
            "all_fixed": all_fixed,
        }
    return found


def options_of(about: str | None) -> argparse.Namespace:
    """The options of a comparison, whose docstring is `about`."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--streams", type=int, default=0)
    return parser.parse_args()


def on_further_streams(
    asked: argparse.Namespace,
    runs: Mapping[str, Run],
    ours: Callable[[], Any],
    file: str,
) -> None:
    """What became of the sizers of the result `file` on as many streams more, printed and written."""
    seeds = range(SEED + 1, SEED + 1 + asked.streams)
    with ProcessPoolExecutor(asked.workers) as pool:
        rows = on_more_streams(pool, runs, ours, file, seeds)
    print_streams(rows)
    print(write(f"{file}_streams", {"seeds": [*seeds], "rows": rows}))


def on_more_streams(
    pool: ProcessPoolExecutor,
    runs: Mapping[str, Run],
    ours: Callable[[], Any],
    file: str,
    seeds: Sequence[int],
) -> list[dict[str, Any]]:
    """The sizers that a result shows, on further streams, with what was chosen on that of the result."""
    shown = result(file)["loads"]
    rows = []
    for load, arms in shown.items():
        size = arms["fixed"]["replicas"]
        sizers: dict[str, tuple[str, Callable[[], Any], int]] = {
            "ours": (next(iter(runs)), ours, 1),
            "ray": (arms["ray"]["way"], partial(rays, RAY_DEFAULT), 1),
            "ray_tuned": (arms["ray_tuned"]["way"], partial(rays, tuple(arms["ray_tuned"]["setting"])), 1),
            "fixed": (arms["fixed"]["way"], partial(fixed, size), size),
        }
        running = {
            arm: [pool.submit(runs[way], load, make, first, seed) for seed in seeds]
            for arm, (way, make, first) in sizers.items()
        }
        found = {arm: [future.result() for future in futures] for arm, futures in running.items()}
        rows += [
            {"load": load, "arm": arm, **over_streams(each, found["ours"])} for arm, each in found.items()
        ]
    return rows


def over_streams(sizings: Sequence[Sizing], ours: Sequence[Sizing]) -> dict[str, Any]:
    """Least, mean and most over the streams, and ours over it per replica hour, in pairs."""
    ratios = [mine.per_replica_hour / each.per_replica_hour for mine, each in zip(ours, sizings, strict=True)]
    return {
        "attainment": _span([each.attainment for each in sizings]),
        "replica_hours": _span([each.replica_hours for each in sizings]),
        "per_replica_hour": _span([each.per_replica_hour for each in sizings]),
        "ours over it": _span(ratios),
        "streams": [astuple(each) for each in sizings],
    }


def print_streams(rows: Sequence[Mapping[str, Any]]) -> None:
    """Least, mean and most over further streams."""
    columns = ("attainment", "replica_hours", "per_replica_hour", "ours over it")
    spans = [{name: " / ".join(f"{each:.4g}" for each in row[name]) for name in columns} for row in rows]
    named = [{"load": row["load"], "arm": row["arm"], **span} for row, span in zip(rows, spans, strict=True)]
    print_rows("further streams: least, mean, most", named)


def _span(values: Sequence[float]) -> list[float]:
    return [min(values), statistics.fmean(values), max(values)]


def print_loads(loads: Mapping[str, Any]) -> None:
    """A table for each load."""
    for load, arms in loads.items():
        rows = [
            {
                "arm": name,
                "in time %": 100 * arms[name]["attainment"],
                "left out %": 100 * arms[name]["left_out"],
                "replica hours": arms[name]["replica_hours"],
                "in time per replica hour": arms[name]["per_replica_hour"],
                "most replicas": arms[name]["max_replicas"],
                "turns": arms[name]["turns"],
            }
            for name in ("ours", "ray", "ray_tuned", "fixed")
        ]
        print_rows(load, rows)


def _row(of: str, key: tuple[Any, str], found: Future[Sizing]) -> dict[str, Any]:
    value, way = key
    return {of: value, "way": way, **asdict(found.result())}


def _best(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Most in time per replica and hour, among those that reach the target if any does."""
    reaching = [row for row in rows if row["attainment"] >= TARGET]
    if not reaching:
        return max(rows, key=itemgetter("attainment"))
    return max(reaching, key=itemgetter("per_replica_hour"))


def _stay(replicas: int, _: object, __: float) -> int:
    return replicas


def _same(load: float, _: float) -> float:
    return load
