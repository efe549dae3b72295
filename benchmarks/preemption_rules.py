"""How long the rules of preemption take, and what they are worth on one replica.

Times `slo.order` and `slo.preemption` with 10, 30 and 100 waiting prefills. Then serves short, medium and
long prompts in virtual time (`virtual_replica`) under every order and policy, arriving one by one or in
bursts, at several loads: an 8B model of 32 layers, 0.08 ms per token and 15 ms per pass. Load 1 is what the
replica could just do with one prompt per pass; passes are shared, so that it can do somewhat more.

    python benchmarks/preemption_rules.py
"""

from __future__ import annotations

import math
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from report import quantiles, write
from rich.console import Console
from rich.table import Table
from virtual_replica import ForwardModel, Request, VirtualReplica

from slo.forecast import Forecast
from slo.order import QueueOrder, order
from slo.predictor import PrefillPredictor
from slo.preemption import (
    Keep,
    Limits,
    PreemptionMode,
    PreemptionPolicy,
    PreemptionRules,
    Prefill,
    ReplicaState,
    RunningStep,
    decide,
)
from slo.request import JobId

SEED = 20260216
STREAMS = 6
REQUESTS = 4000
ARRIVALS = ((1, 0.5), (1, 0.7), (1, 0.9), (1, 1.1), (12, 0.3), (12, 0.7))
"""Mean number of requests that arrive at once, and load."""
DECISIONS = 2000
MODEL = ForwardModel(PrefillPredictor(per_token_s=0.000_08, fixed_s=0.015))
STOP_LATENCY_S = 0.001


class Kind(NamedTuple):
    """A kind of request: its share, the range of its prompts (log-uniform), its objective and its worth."""

    share: float
    min_tokens: int
    max_tokens: int
    ttft_s: float
    weight: float

    @property
    def mean_s(self) -> float:
        """Mean predicted time of one request's prefill."""
        tokens = (self.max_tokens - self.min_tokens) / math.log(self.max_tokens / self.min_tokens)
        return MODEL.line.fixed_s + MODEL.line.per_token_s * tokens


KINDS = {
    "short": Kind(0.7, 200, 1500, 0.25, 4.0),
    "medium": Kind(0.2, 2000, 8000, 4.0, 2.0),
    "long": Kind(0.1, 8000, 30000, 6.0, 1.0),
}


class Arm(NamedTuple):
    """What is compared: the order of the queue, and what stops a pass."""

    order: QueueOrder
    mode: PreemptionMode
    policy: PreemptionPolicy

    @property
    def rules(self) -> PreemptionRules:
        """The rules with their default limits."""
        limits = Limits.default_for(self.mode)
        return PreemptionRules(self.mode, self.policy, limits=limits, stop_latency_s=STOP_LATENCY_S)


ARMS = tuple(
    Arm(kind, mode, policy)
    for kind in QueueOrder
    for mode, policy in (
        (PreemptionMode.OFF, PreemptionPolicy.RESCUE),
        (PreemptionMode.RESUME, PreemptionPolicy.CONSERVATIVE),
        (PreemptionMode.RESUME, PreemptionPolicy.AGGRESSIVE),
        (PreemptionMode.RESUME, PreemptionPolicy.RESCUE),
        (PreemptionMode.RESUME, PreemptionPolicy.ON_TIME_SET),
        (PreemptionMode.RECOMPUTE, PreemptionPolicy.RESCUE),
    )
)


def stream(burst: int, load: float, seed: int) -> list[Request]:
    """Bursts of all kinds as a Poisson process, their sizes geometric with mean `burst`."""
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    rate = load / burst / sum(kind.share * kind.mean_s for kind in KINDS.values())
    requests: list[Request] = []
    now_s = 0.0
    for number in range(REQUESTS):
        if rng.random() < 1 / burst:
            now_s += rng.expovariate(rate)
        name = rng.choices([*KINDS], [kind.share for kind in KINDS.values()])[0]
        kind = KINDS[name]
        tokens = int(math.exp(rng.uniform(math.log(kind.min_tokens), math.log(kind.max_tokens))))
        job = JobId(str(number))
        requests.append(Request(job, name, tokens, kind.weight, now_s, now_s + kind.ttft_s))
    return requests


def serve(case: tuple[Arm, int, float, int]) -> dict[str, float]:
    """Percentages of one stream on time, stops per request, longest suspension."""
    arm, burst, load, seed = case
    requests = stream(burst, load, seed)
    replica = VirtualReplica(arm.order, arm.rules, MODEL, random.Random(seed))  # noqa: S311 - likewise
    replica.serve(requests)
    kinds = {name: [r for r in requests if r.kind == name] for name in KINDS}
    weight = sum(request.weight for request in requests)
    return {
        "weighted": 100 * sum(request.weight * request.is_on_time for request in requests) / weight,
        "all": 100 * statistics.mean(request.is_on_time for request in requests),
        **{name: 100 * statistics.mean(r.is_on_time for r in of_kind) for name, of_kind in kinds.items()},
        "stops": replica.stops / len(requests),
        "max_suspended_s": max(request.suspended_s for request in requests),
    }


def attainment() -> list[dict[str, Any]]:
    """Every arm on all arrivals: means over the streams, and the standard `error` of `weighted`."""
    cases = [(arm, burst, load, SEED + n) for burst, load in ARRIVALS for arm in ARMS for n in range(STREAMS)]
    with ProcessPoolExecutor() as pool:
        served = [*pool.map(serve, cases, chunksize=4)]
    rows = []
    for start in range(0, len(cases), STREAMS):
        arm, burst, load, _ = cases[start]
        results = served[start : start + STREAMS]
        means = {key: statistics.mean(result[key] for result in results) for key in results[0]}
        error = statistics.stdev(result["weighted"] for result in results) / math.sqrt(STREAMS)
        about: dict[str, Any] = {"burst": burst, "load": load, "order": arm.order, "mode": arm.mode}
        about["policy"] = "-" if arm.mode is PreemptionMode.OFF else arm.policy.value
        rows.append({**about, **means, "error": error})
    return rows


def timing(arm: Arm, waiting: int, *, crowded: bool) -> dict[str, float]:
    """Microseconds of CPU to decide with `waiting` prefills; of a crowded queue a third is late.

    That includes putting them in order where the policy asks for it. Where they are crowded, more arrives
    than can be done.
    """
    rng = random.Random(SEED)  # noqa: S311 - likewise
    rules = arm.rules
    forecast = Forecast()
    for n in range(300):
        forecast.arrived(0.15 if crowded else 0.05, rng.choice((1.0, 2.0, 4.0)), n * 0.1)
    times_us = []
    for _ in range(DECISIONS):
        horizon_s = waiting * (0.1 if crowded else 0.6)
        queue = [
            Prefill(
                JobId(str(n)),
                rng.choice((1.0, 2.0, 4.0)),
                rng.uniform(0.2, 1) * horizon_s,
                rng.uniform(0.02, 0.4),
                rng.random(),
            )
            for n in range(waiting)
        ]
        running = Prefill(JobId("running"), 1e9, 0.1, 0.1, 0.0)
        step = RunningStep(1, (running,) * 4, 0.1, 0.1)
        started_ns = time.thread_time_ns()
        if arm.policy is not PreemptionPolicy.ON_TIME_SET:
            queue = order(arm.order, queue, 0.0, forecast=forecast)
        decision = decide(ReplicaState(step, queue), 0.0, rules, forecast)
        times_us.append((time.thread_time_ns() - started_ns) / 1e3)
        assert isinstance(decision, Keep)
    return quantiles(times_us, 50, 99)


def timings() -> list[dict[str, Any]]:
    """`rescue` with either order and `on_time_set` with its own, undisturbed and crowded queues."""
    arms = [
        Arm(QueueOrder.SEDF, PreemptionMode.RESUME, PreemptionPolicy.RESCUE),
        Arm(QueueOrder.ON_TIME_SET, PreemptionMode.RESUME, PreemptionPolicy.RESCUE),
        Arm(QueueOrder.ON_TIME_SET, PreemptionMode.RESUME, PreemptionPolicy.ON_TIME_SET),
    ]
    return [
        {
            "order": arm.order,
            "policy": arm.policy,
            "waiting": n,
            "crowded": crowded,
            "us": timing(arm, n, crowded=crowded),
        }
        for arm in arms
        for crowded in (False, True)
        for n in (10, 30, 100)
    ]


def main() -> None:
    """Measure both, print tables, write JSON."""
    console = Console(width=150)
    times = timings()
    table = Table("order", "policy", "waiting", "crowded", "p50 µs", "p99 µs", title="order and decide")
    for row in times:
        numbers = (f"{value:.0f}" for value in row["us"].values())
        table.add_row(row["order"], row["policy"], str(row["waiting"]), str(row["crowded"]), *numbers)
    console.print(table)
    rows = attainment()
    table = Table(*rows[0], title="per cent on time")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)
    kinds = {name: kind._asdict() for name, kind in KINDS.items()}
    parameters = {"seed": SEED, "streams": STREAMS, "requests": REQUESTS, "kinds": kinds}
    print(write("preemption_rules", {**parameters, "timing": times, "attainment": rows}))


if __name__ == "__main__":
    main()
