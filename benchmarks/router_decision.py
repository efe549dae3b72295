"""How long the router's pure core takes to place a request.

Places 1,000 requests over fleets of 8, 100 and 1,000 replicas, each with outstanding work, and prints the
distribution of the time per placement. The work outstanding stays the same: what is placed is taken back.

    python benchmarks/router_decision.py
"""

from __future__ import annotations

import random
import time

from report import quantiles, write
from rich.console import Console
from rich.table import Table

from router.core import RouterCore, RouterLimits
from router.decisions import Placed, PlacementRequested
from router.policies import POLICIES
from slo.objectives import Objective
from slo.predictor import PrefillPredictor
from slo.reports import DecodeReported, OutstandingJob, PrefillReported
from slo.request import JobId, ReplicaId
from slo.tiers import CLIENT_TIERS, DEFAULT_TIER_POLICIES

SEED = 20260216
PLACEMENTS = 1000
LINE = PrefillPredictor(per_token_s=0.000_06, fixed_s=0.01, handoff_s=0.02)


def fleet(policy: str, replicas: int, outstanding: int, rng: random.Random) -> RouterCore:
    """A router that has heard from `replicas` replicas with `outstanding` prefills each."""
    core = RouterCore(DEFAULT_TIER_POLICIES, POLICIES[policy](), RouterLimits(stale_after_s=1e9))
    for number in range(replicas):
        jobs = tuple(
            OutstandingJob(
                JobId(f"{number}-{job}"),
                rng.choice(CLIENT_TIERS),
                rng.randint(50, 8000),
                None if rng.random() < 0.2 else rng.uniform(0.1, 20.0),  # noqa: PLR2004
            )
            for job in range(outstanding)
        )
        report = PrefillReported(ReplicaId(f"p{number}"), LINE, jobs, jobs[0].job_id if jobs else None, 0.0)
        core.prefill_reported(report, 0.0)
    for number in range(max(1, replicas // 2)):
        core.decode_reported(DecodeReported(ReplicaId(f"d{number}"), rng.random(), 3), 0.0)
    return core


def measure(policy: str, replicas: int, outstanding: int) -> dict[str, float]:
    """Microseconds per placement."""
    rng = random.Random(SEED)  # noqa: S311 - reproducible, not secret
    core = fleet(policy, replicas, outstanding, rng)
    times_us = []
    for number in range(PLACEMENTS + 50):
        tier = rng.choice(CLIENT_TIERS)
        request = PlacementRequested(
            JobId(f"new-{number}"),
            Objective(tier, DEFAULT_TIER_POLICIES[tier].ttft_s, None),
            explicit_deadline=False,
            prompt_tokens=rng.randint(50, 8000),
            prompt_bytes=0,
        )
        started_ns = time.perf_counter_ns()
        decision = core.place(request, 0.001)
        times_us.append((time.perf_counter_ns() - started_ns) / 1e3)
        if isinstance(decision, Placed):
            core.job_ended(request.job_id, 0.001)
    return quantiles(times_us[50:], 50, 90, 99, 100)


def main() -> None:
    """Measure all and print one table."""
    table = Table("policy", "replicas", "outstanding each", "p50 µs", "p90 µs", "p99 µs", "max µs")
    rows = []
    for policy in POLICIES:
        for replicas, outstanding in ((8, 4), (8, 32), (100, 4), (100, 32), (1000, 32)):
            result = measure(policy, replicas, outstanding)
            rows.append({"policy": policy, "replicas": replicas, "outstanding": outstanding, "us": result})
            table.add_row(
                policy, str(replicas), str(outstanding), *(f"{value:.0f}" for value in result.values())
            )
    Console().print(table)
    print(write("router_decision", {"seed": SEED, "placements": PLACEMENTS, "rows": rows}))


if __name__ == "__main__":
    main()
