"""How long the router's pure core takes to place a request.

Places 1,000 requests over fleets of 8, 100 and 1,000 replicas, each with outstanding work, and prints the
distribution of the CPU time per placement, which other work on the machine does not lengthen much. The work
outstanding stays the same: what is placed is taken back. In the last rows every replica has more to do than
can be on time, so that a request is hardly ever free anywhere, and half of the prompts share a prefix that a
tenth of the replicas has. A second table has one replica with thousands of prefills without a deadline: what
a placement takes beside them, and what the router takes for a report of them and the placement after it.

    python -m benchmarks.cores.router_decision
"""

from __future__ import annotations

import argparse
import pickle
import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks.report import print_rows, quantiles, write
from router.core import RouterCore
from router.fleet.view import RouterLimits
from router.messages import JobEnded, Placed, PlacementRequested
from router.placement.registry import POLICIES
from slo.objectives import Objective
from slo.predict.prefill_time import PrefillPredictor
from slo.reports import DecodeReported, OutstandingJob, PrefillReported
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, DEFAULT_TIERS

SEED = 20260216
PLACEMENTS = 1000
CASES = (
    (8, 4, False),
    (8, 32, False),
    (100, 32, False),
    (1000, 32, False),
    (100, 32, True),
    (1000, 32, True),
)
BATCHES = (32, 1000, 4000)
"""Prefills without a deadline that are outstanding on one replica."""
TIMES = 100
PREFIX = tuple(range(16))
"""Hashes of a prefix of 2,048 tokens."""
LINE = PrefillPredictor(per_token_s=0.000_06, fixed_s=0.01, handoff_s=0.02)


def fleet(
    policy: str, replicas: int, outstanding: int, rng: random.Random, *, overloaded: bool
) -> RouterCore:
    """A router that has heard from `replicas` replicas with `outstanding` prefills each."""
    latest_s = 2.0 if overloaded else 20.0
    core = RouterCore(DEFAULT_TIERS, POLICIES[policy](rng.randrange), RouterLimits(stale_after_s=1e9))
    for number in range(replicas):
        jobs = tuple(
            OutstandingJob(
                JobId(f"{number}-{job}"),
                rng.choice(DEFAULT_TIERS.names),
                rng.randint(50, 8000),
                None if not overloaded and rng.random() < 0.2 else rng.uniform(0.1, latest_s),  # noqa: PLR2004
            )
            for job in range(outstanding)
        )
        running = jobs[0].job_id if jobs else None
        preemptible_in_s = 0.01 if overloaded else None
        report = PrefillReported(ReplicaId(f"p{number}"), LINE, jobs, running, 0.0, preemptible_in_s)
        core.prefill_reported(report, 0.0)
    for number in range(max(1, replicas // 2)):
        core.view.decode_reported(DecodeReported(ReplicaId(f"d{number}"), rng.random(), 3), 0.0)
    return core


def measure(policy: str, replicas: int, outstanding: int, *, overloaded: bool = False) -> dict[str, float]:
    """Microseconds of CPU per placement."""
    rng = random.Random(SEED)
    core = fleet(policy, replicas, outstanding, rng, overloaded=overloaded)
    if overloaded:
        for number in range(0, replicas, 10):
            before = JobId(f"before-{number}")
            core.view.prefixes.placed(ReplicaId(f"p{number}"), before, PREFIX, 128)
            core.view.prefixes.computed(before)
    times_us = []
    for number in range(PLACEMENTS + 50):
        tier = rng.choice(DEFAULT_TIERS.names)
        request = PlacementRequested(
            JobId(f"new-{number}"),
            Objective(tier, DEFAULT_TIERS[tier].ttft_s, None),
            explicit_deadline=False,
            prompt_tokens=rng.randint(50, 8000),
            prompt_bytes=0,
            prefix_hashes=PREFIX if overloaded and number % 2 else (),
            hash_block=128,
        )
        started_ns = time.thread_time_ns()
        decision = core.place(request, 0.001)
        times_us.append((time.thread_time_ns() - started_ns) / 1e3)
        if isinstance(decision, Placed):
            core.job_ended(JobEnded(request.job_id), 0.001)
    return quantiles(times_us[50:], 50, 90, 99, 100)


def beside_a_batch(outstanding: int) -> list[dict[str, Any]]:
    """Microseconds of CPU for a placement, for taking a report that came, and for the placement after it."""
    rng = random.Random(SEED)
    core = fleet("least_harm", 1, 0, rng, overloaded=False)
    jobs = tuple(
        OutstandingJob(JobId(f"batch-{number}"), BACKGROUND, 1000, None, LINE.prefill_s(1000))
        for number in range(outstanding)
    )
    sent = pickle.dumps(PrefillReported(ReplicaId("p0"), LINE, jobs, None, 0.0))
    objective = Objective(DEFAULT_TIERS.top, 1.0, None)
    urgent = PlacementRequested(
        JobId("urgent"), objective, explicit_deadline=False, prompt_tokens=1000, prompt_bytes=0
    )

    def report() -> None:
        core.prefill_reported(pickle.loads(sent), 0.0)  # noqa: S301 - made above

    def place() -> None:
        core.place(urgent, 0.001)

    def end() -> None:
        core.job_ended(JobEnded(urgent.job_id), 0.001)

    report()
    times_us: dict[str, list[float]] = {"placement": [], "report": [], "placement after it": []}
    for _ in range(TIMES):
        times_us["report"].append(_cpu_us(report))
        times_us["placement after it"].append(_cpu_us(place))
        end()
        times_us["placement"].append(_cpu_us(place))
        end()
    return [
        {"outstanding": outstanding, "what": what, "cpu_us": quantiles(times, 50, 99)}
        for what, times in times_us.items()
    ]


def _cpu_us(call: Callable[[], None]) -> float:
    started_ns = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - started_ns) / 1e3


def main() -> None:
    """Measure all and print two tables."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = [
        {
            "policy": policy,
            "replicas": replicas,
            "outstanding": outstanding,
            "load": "overloaded" if overloaded else "mixed",
            "cpu_us": measure(policy, replicas, outstanding, overloaded=overloaded),
        }
        for policy in POLICIES
        for replicas, outstanding, overloaded in CASES
    ]
    print_rows("Microseconds of CPU for one placement", rows)
    batches = [row for outstanding in BATCHES for row in beside_a_batch(outstanding)]
    print_rows("Microseconds of CPU beside prefills without a deadline on one replica", batches)
    found = {"seed": SEED, "placements": PLACEMENTS, "rows": rows, "batches": batches}
    print(write("cores/router_decision", found))


if __name__ == "__main__":
    main()
