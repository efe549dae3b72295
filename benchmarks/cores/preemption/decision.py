"""How long it takes to put a queue in order and to decide on preemption.

Times `slo.queue.order` and `slo.preemption.decide` with 10, 30 and 100 waiting prefills: CPU time, which
other work on the machine does not lengthen much. Of a crowded queue a third is late, and more arrives than
can be done.

    python -m benchmarks.cores.preemption.decision
"""

from __future__ import annotations

import argparse
import random
import time

from benchmarks.report import print_rows, quantiles, write
from slo.preemption.decide import decide
from slo.preemption.types import Keep, PreemptionPolicy, PreemptionRules, ReplicaState, RunningStep
from slo.queue.arrival_forecast import Forecast
from slo.queue.class_targets import ClassTargets
from slo.queue.order import Aim, QueueOrder, order
from slo.queue.prefill import Prefill
from slo.request import JobId
from slo.tiers import DEFAULT_TIERS

SEED = 20260216
DECISIONS = 2000
WEIGHTS = (1.0, 2.0, 4.0)
WAITING = (10, 30, 100)
CASES = (
    (QueueOrder.SEDF, PreemptionPolicy.RESCUE, Aim.REQUESTS),
    (QueueOrder.FEASIBLE_SET, PreemptionPolicy.RESCUE, Aim.REQUESTS),
    (QueueOrder.FEASIBLE_SET, PreemptionPolicy.FEASIBLE_SET, Aim.REQUESTS),
    (QueueOrder.FEASIBLE_SET, PreemptionPolicy.FEASIBLE_SET, Aim.TARGETS),
)


def queue_of(waiting: int, rng: random.Random, *, crowded: bool) -> list[Prefill]:
    """Prefills whose deadlines leave each of them more than its work, or less."""
    horizon_s = waiting * (0.1 if crowded else 0.6)
    return [
        Prefill(
            JobId(str(number)),
            rng.choice(WEIGHTS),
            rng.uniform(0.2, 1) * horizon_s,
            rng.uniform(0.02, 0.4),
            rng.random(),
            tier=DEFAULT_TIERS.names[number % len(DEFAULT_TIERS.names)],
        )
        for number in range(waiting)
    ]


def measure(
    kind: QueueOrder, policy: PreemptionPolicy, aim: Aim, waiting: int, *, crowded: bool
) -> dict[str, float]:
    """Microseconds of CPU to decide, the order of the queue included where the policy asks for it."""
    rng = random.Random(SEED)
    rules = PreemptionRules(policy=policy)
    forecast = Forecast()
    for number in range(300):
        forecast.arrived(0.15 if crowded else 0.05, rng.choice(WEIGHTS), number * 0.1)
    account = ClassTargets(DEFAULT_TIERS.targets)
    for number in range(300):
        account.ended(DEFAULT_TIERS.names[number % 3], rng.uniform(-0.1, 1.0), 0.0)
    targets = account.state if aim is Aim.TARGETS else None
    running = Prefill(JobId("running"), 1e9, 0.1, 0.1, 0.0)
    step = RunningStep(1, (running,) * 4, 0.1, 0.1)
    times_us = []
    for _ in range(DECISIONS):
        queue = queue_of(waiting, rng, crowded=crowded)
        started_ns = time.thread_time_ns()
        if policy is not PreemptionPolicy.FEASIBLE_SET:
            queue = order(kind, queue, 0.0, forecast=forecast)
        decision = decide(ReplicaState(step, queue), 0.0, rules, forecast, targets)
        times_us.append((time.thread_time_ns() - started_ns) / 1e3)
        assert isinstance(decision, Keep)
    return quantiles(times_us, 50, 99)


def main() -> None:
    """Measure all and print one table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = [
        {
            "order": kind.value,
            "policy": policy.value,
            "aim": aim.value,
            "waiting": waiting,
            "crowded": crowded,
            "cpu_us": measure(kind, policy, aim, waiting, crowded=crowded),
        }
        for kind, policy, aim in CASES
        for crowded in (False, True)
        for waiting in WAITING
    ]
    print_rows("Microseconds of CPU for one decision", rows)
    print(write("cores/preemption_decision", {"seed": SEED, "decisions": DECISIONS, "rows": rows}))


if __name__ == "__main__":
    main()
