"""Why S-EDF with suspend-and-resume is ahead where objectives are hardly longer than a prompt's own time.

The blog's mix (`simulator.study.presets`), on streams that no constant was chosen on: the peer as it is
compared, its rules where SlackServe can stop, and SlackServe as it is, with stops at once, without fairness
between the classes, and with the peer's boundaries besides. Of each what is in time, what all are worth by
the weights of their tiers, and what nobody had answered when the last request was due.

    python -m benchmarks.cores.preemption.tight [--streams 5] [--processes 2]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any, Final

from benchmarks.report import print_rows, write
from simulator.arms.arm import Arm
from simulator.arms.arms import ARMS, FLOWPREFILL, JOIN_TOKENS, SERVERS, Scheduling
from simulator.cost.passes import Granularity
from simulator.study.presets import PRESETS
from simulator.study.run import run
from slo.queue.order import QueueOrder

PRESET: Final = PRESETS["blog-70b"]
FIRST_SEED: Final = 201
_AT_ONCE: Final = replace(SERVERS, preemption=replace(SERVERS.preemption, patience=0.0))
_UNFAIR: Final = replace(_AT_ONCE, is_fair=False)
_PEER_HERE: Final = Scheduling(
    FLOWPREFILL,
    QueueOrder.SEDF,
    SERVERS.granularity,
    SERVERS.launch_ahead_s,
    SERVERS.stop_within_s,
    SERVERS.cpu_stop_within_s,
)
_CHANGED: Final[Mapping[str, Scheduling]] = {
    "its rules, SlackServe's boundaries": _PEER_HERE,
    "SlackServe": SERVERS,
    "… stops at once": _AT_ONCE,
    "… and without fairness": _UNFAIR,
    "… and the peer's boundaries": replace(_UNFAIR, granularity=Granularity.OPERATOR, launch_ahead_s=0.0),
}
_PEER: Final = ARMS["sedf-resume"]
COMPARED: Final[Mapping[str, Arm]] = {
    _PEER.title: _PEER,
    **{title: Arm("slackserve", title, scheduling.build) for title, scheduling in _CHANGED.items()},
}
SHARES: Final = ("urgent", "relaxed", "all", "value", "unanswered")


def shares(title: str, rate_rps: float, seed: int, requests: int) -> dict[str, float]:
    """Of one stream, as fractions."""
    arrivals = PRESET.workload.stream(rate_rps, requests, seed)
    jobs = run(COMPARED[title], PRESET.hardware, arrivals, {"join_tokens": float(JOIN_TOKENS)}).jobs
    by_kind = {
        kind: statistics.fmean(job.is_on_time for job in jobs if job.arrival.kind == kind)
        for kind in PRESET.objective_ms
    }
    return {
        **by_kind,
        "all": statistics.fmean(job.is_on_time for job in jobs),
        "value": sum(job.weight for job in jobs if job.is_on_time) / sum(job.weight for job in jobs),
        "unanswered": statistics.fmean(not job.is_finished() for job in jobs),
    }


def main() -> None:
    """Simulate, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--processes", type=int)
    options = parser.parse_args()
    rates = PRESET.rates_rps
    assert rates is not None
    seeds = range(FIRST_SEED, FIRST_SEED + options.streams)
    jobs = [*product(COMPARED, rates, seeds, [options.requests])]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.processes) as pool:
        found = [*pool.map(shares, *zip(*jobs, strict=True))]
    for title, rate_rps in product(COMPARED, rates):
        streams = [of for job, of in zip(jobs, found, strict=True) if job[:2] == (title, rate_rps)]
        means = {share: statistics.fmean(of[share] for of in streams) for share in SHARES}
        rows.append({"arm": title, "rate_rps": rate_rps, **means, "streams": streams})
    print_rows("fractions", rows, {name: name for name in ("arm", "rate_rps", *SHARES)})
    about = {"preset": PRESET.name, "first_seed": seeds[0], "requests": options.requests}
    print(write("cores/tight", {**about, "rows": rows}))


if __name__ == "__main__":
    main()
