"""What orders of the queue, policies of preemption, its margin and its limits do on one replica.

Simulates a replica as it serves by default (Llama-3-8B on one A100), all else unchanged: every order with
every policy, arriving one by one or in bursts, at several loads; then the default with other margins and
other limits. Short prompts are due soon and weigh much, long ones late and weigh little. Load 1 is what the
replica could just do with one prompt per pass; passes are shared, so that it can do somewhat more.

    python -m benchmarks.cores.preemption.rules
"""

from __future__ import annotations

import argparse
import math
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from benchmarks.report import print_rows, write
from simulator.arms.arm import Arm
from simulator.arms.arms import NO_LIMITS, OURS, SERVERS
from simulator.study.goodput import Experiment, point
from simulator.study.presets import PRESETS
from simulator.study.run import Run
from simulator.workload.arrivals import Kind, Mix
from slo.preemption.types import Limits, PreemptionMode, PreemptionPolicy, PreemptionRules
from slo.queue.order import QueueOrder
from slo.tiers import BACKGROUND, PREMIUM, STANDARD

PRESET = "flowprefill-8b"
SEEDS = range(1, 7)
REQUESTS = 1000
ARRIVALS = ((1, 0.5), (1, 0.9), (1, 1.5), (12, 0.3), (12, 0.7))
"""Mean number of requests that arrive at once, and load."""
SHOWN = ((1, 0.9), (1, 1.5), (12, 0.7))
"""Those under which margins and limits are compared."""
KINDS = {
    "short": Kind(0.7, 0, 0.25, PREMIUM, range_tokens=(200, 1500), is_uniform=True),
    "medium": Kind(0.2, 0, 4.0, STANDARD, range_tokens=(2000, 8000), is_uniform=True),
    "long": Kind(0.1, 0, 6.0, BACKGROUND, range_tokens=(8000, 30_000), is_uniform=True),
}
RULES = (
    PreemptionRules(PreemptionMode.OFF),
    PreemptionRules(
        PreemptionMode.RECOMPUTE,
        PreemptionPolicy.RESCUE,
        limits=Limits.default_for(PreemptionMode.RECOMPUTE),
    ),
    *(replace(OURS, policy=policy) for policy in PreemptionPolicy),
)
DEFAULT = OURS
LIMITS = Limits()
VARIATIONS = {
    "the defaults": DEFAULT,
    **{f"margin {margin:g}": replace(DEFAULT, margin=margin) for margin in (1, 1.5, 6)},
    "no patience": replace(DEFAULT, patience=0.0),
    "no limits": replace(DEFAULT, limits=NO_LIMITS),
    "4 stops of a request": replace(DEFAULT, limits=replace(LIMITS, max_preemptions=4)),
    "1 stop of a request": replace(DEFAULT, limits=replace(LIMITS, max_preemptions=1)),
    "5 s of suspension": replace(DEFAULT, limits=replace(LIMITS, max_suspended_s=5.0)),
    "1 s of suspension": replace(DEFAULT, limits=replace(LIMITS, max_suspended_s=1.0)),
    "2 suspended steps": replace(DEFAULT, limits=replace(LIMITS, max_suspended_steps=2)),
    "256 MiB of checkpoints": replace(DEFAULT, limits=replace(LIMITS, max_suspended_bytes=256 << 20)),
}


class RulesCase(NamedTuple):
    """One way to decide, under one kind of arrivals."""

    burst: int
    load: float
    order: QueueOrder
    rules: PreemptionRules


def serve(case: RulesCase) -> dict[str, float]:
    """Percentages on time, stops per request, and the percentage of the work that was done again.

    `weighted` is by weight, and `error` its standard error over the streams.
    """
    experiment = Experiment(PRESETS[PRESET].hardware, Mix(KINDS, burst=case.burst), REQUESTS, SEEDS)
    arm = Arm("rules", "", replace(SERVERS, order=case.order, preemption=case.rules).build)
    rate_rps = case.load * experiment.capacity_rps()
    runs = experiment.runs(arm, rate_rps, {})
    weighted = [_weighted(run) for run in runs]
    found = point(rate_rps, runs, {})
    return {
        "weighted": statistics.mean(weighted),
        "error": statistics.stdev(weighted) / math.sqrt(len(weighted)),
        "all": 100 * found.attainment,
        **{kind: 100 * found.by_kind[kind] for kind in KINDS},
        "stops": found.preemptions,
        "again": 100 * found.wasted_work,
    }


def _weighted(run: Run) -> float:
    met = sum(job.weight for job in run.jobs if job.is_on_time)
    return 100 * met / sum(job.weight for job in run.jobs)


def described(case: RulesCase) -> dict[str, Any]:
    """The columns that say what was simulated."""
    mode, policy = case.rules.mode, case.rules.policy
    return {
        "burst": case.burst,
        "load": case.load,
        "order": case.order.value,
        "mode": mode.value,
        "policy": "-" if mode is PreemptionMode.OFF else policy.value,
    }


def main() -> None:
    """Simulate everything, print two tables, write JSON."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rules = [
        RulesCase(burst, load, kind, preemption)
        for burst, load in ARRIVALS
        for kind in QueueOrder
        for preemption in RULES
    ]
    varied = [
        (name, RulesCase(burst, load, SERVERS.order, preemption))
        for burst, load in SHOWN
        for name, preemption in VARIATIONS.items()
    ]
    with ProcessPoolExecutor() as pool:
        found = pool.map(serve, [*rules, *(case for _, case in varied)])
        compared = [{**described(case), **next(found)} for case in rules]
        variations = [
            {"burst": case.burst, "load": case.load, "rules": name, **next(found)} for name, case in varied
        ]
    print_rows("per cent on time: orders, modes and policies", compared)
    print_rows("per cent on time: margins and limits", variations)
    results = {
        "preset": PRESET,
        "seeds": [*SEEDS],
        "requests": REQUESTS,
        "kinds": {name: asdict(kind) for name, kind in KINDS.items()},
        "rules": compared,
        "variations": variations,
    }
    print(write("cores/preemption_rules", results))


if __name__ == "__main__":
    main()
