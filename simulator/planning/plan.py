"""Capacity planning: the fewest replicas that keep the objectives of a load, found by simulating it.

Owns the search. Attainment is taken to rise with the number of replicas. A stream may be too short for a
queue that grows to make anybody late, so what replicas keep up with is told by their work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from simulator.fleet.fleet import simulate
from simulator.fleet.outcome import FleetRun
from simulator.fleet.setup import Failure, FleetSetup
from simulator.planning.decode_plan import (
    decode_load,
    decodes,
    max_replicas,
    min_decode_replicas,
    min_replicas,
)
from simulator.workload.arrivals import Arrival, Workload

Tried: TypeAlias = Callable[[int], None]
"""Called with every number of replicas that has been simulated."""


@dataclass(frozen=True, slots=True)
class Outage:
    """Prefill replicas that die at once, and others that take their places.

    Attributes:
        replicas: How many; all of a fleet that has no more.
        at_s: When they die, from the beginning of the stream.
        for_s: How long nobody has their places.
    """

    replicas: int
    at_s: float
    for_s: float

    def failures(self, of: int) -> list[Failure]:
        """The same for a fleet with so many prefill replicas."""
        back_s = self.at_s + self.for_s
        return [Failure(replica, self.at_s, back_s) for replica in range(min(self.replicas, of))]


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """What a fleet is planned for.

    Attributes:
        requests: Of the stream that is simulated; a minute or more shows what a queue does.
        target: Fraction of each tier's requests whose objective is to be met.
        outage: What is to happen meanwhile; None for nothing.
    """

    workload: Workload
    rate_rps: float
    requests: int
    seed: int = 1
    target: float = 0.95
    outage: Outage | None = None

    def stream(self) -> list[Arrival]:
        """The requests."""
        return self.workload.stream(self.rate_rps, self.requests, self.seed)


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """A fleet with so many prefill replicas under the load.

    Attributes:
        refused: Fraction of all requests that were refused; they are not in time.
        utilisation: Of the prefill replicas' device time.
        load: Prefill work that was done for the stream, seconds per second of it and replica. Who was refused
            and what a prefix cache held took none.
    """

    replicas: int
    attainment: float
    by_tier: Mapping[str, float]
    refused: float
    utilisation: float
    load: float
    setting: Mapping[str, float]

    @property
    def keeps_up(self) -> bool:
        """Whether its queue does not grow for as long as the load lasts."""
        return self.load < 1.0

    def reaches(self, target: float) -> bool:
        """Whether every tier does, for as long as the load lasts."""
        return self.keeps_up and min(self.by_tier.values(), default=1.0) >= target


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What was found.

    Attributes:
        points: Everything that was simulated, by number of prefill replicas.
        chosen: The fewest prefill replicas that keep up and reach the target for every tier; None when no
            number does.
        decode_replicas: The fewest that keep TPOT for every tier and have memory at once for the target's
            part of all requests, the outage apart; None when no number does.
        load: Prefill work that is offered, seconds per second on one replica, one prompt after the other.
        tpot_by_tier: With the chosen numbers, the fraction of requests that keep their TPOT objective.
        decode_kv_usage: With them, the part of the decode replicas' KV memory in use on average.
        outage: What happens meanwhile to prefill replicas.
    """

    arm: str
    rate_rps: float
    requests: int
    seed: int
    target: float
    points: Sequence[PlanPoint]
    chosen: int | None
    decode_replicas: int | None
    load: float
    tpot_by_tier: Mapping[str, float]
    decode_kv_usage: float
    outage: Outage | None = None

    @property
    def best(self) -> PlanPoint:
        """The point that was chosen; if none was, that with the most replicas."""
        return next((point for point in self.points if point.replicas == self.chosen), self.points[-1])

    @property
    def capacity_points(self) -> list[tuple[int, float, Mapping[str, float]]]:
        """As `simulator.report.plots.capacity_plot` takes them."""
        return [(point.replicas, point.attainment, point.by_tier) for point in self.points]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "utilisation": self.best.utilisation}


def plan(setup: FleetSetup, demand: PlannedLoad, tried: Tried = lambda _: None) -> CapacityPlan:
    """Find the fewest replicas of a fleet for a load.

    Without a setting, the best of the arm's is taken for each number of prefill replicas.
    """
    arrivals = demand.stream()
    work_s = sum(setup.hardware.cost.prefill_s(arrival.tokens) for arrival in arrivals)
    load = work_s / len(arrivals) * demand.rate_rps
    simulated: dict[int, tuple[PlanPoint, FleetRun]] = {}

    def min_prefill_replicas(decode_replicas: int) -> int | None:
        simulated.clear()

        def reaches(replicas: int) -> bool:
            fleet = replace(setup, prefill_replicas=replicas, decode_replicas=decode_replicas)
            simulated[replicas] = _best_run(fleet, arrivals, demand)
            tried(replicas)
            return simulated[replicas][0].reaches(demand.target)

        return min_replicas(reaches, load)

    enough = min_decode_replicas(setup, arrivals, demand.rate_rps, demand.target)
    limit = max_replicas(decode_load(setup, arrivals, demand.rate_rps))
    decode = enough or limit
    found = min_prefill_replicas(decode)

    def lacks_decode() -> bool:
        point, run = simulated[found or max(simulated)]
        if found is None:  # no prefill replica mends what decode refuses
            return min(run.taken_by_decode.values(), default=1.0) < demand.target
        if demand.outage is not None:  # what comes at once when it is over may wait for decode
            fleet = replace(setup, prefill_replicas=found, decode_replicas=decode, setting=point.setting)
            run = simulate(fleet, arrivals)
        return not decodes(run, setup, demand.target)

    while enough and decode < limit and lacks_decode():
        decode += 1  # prefill lets more through at once than was reckoned with
        found = min_prefill_replicas(decode)
    run = simulated[found or max(simulated)][1]
    return CapacityPlan(
        setup.arm.name,
        demand.rate_rps,
        demand.requests,
        demand.seed,
        demand.target,
        [simulated[replicas][0] for replicas in sorted(simulated)],
        found,
        decode if enough else None,
        load,
        run.tpot_by_tier(setup.tiers),
        run.decode_kv_usage,
        demand.outage,
    )


def _best_run(
    setup: FleetSetup, arrivals: Sequence[Arrival], demand: PlannedLoad
) -> tuple[PlanPoint, FleetRun]:
    found = []
    failures = [] if demand.outage is None else demand.outage.failures(setup.prefill_replicas)
    for setting in setup.arm.settings if setup.setting is None else [setup.setting]:
        run = simulate(replace(setup, setting=setting), arrivals, failures)
        busy_s = sum(replica.busy_s for replica in run.prefill)
        point = PlanPoint(
            setup.prefill_replicas,
            run.attainment,
            run.by_tier,
            run.refused,
            run.prefill_utilisation,
            busy_s / len(arrivals) * demand.rate_rps / setup.prefill_replicas,
            dict(setting),
        )
        found.append((point, run))
    return max(found, key=lambda pair: (pair[0].keeps_up, min(pair[0].by_tier.values()), pair[0].attainment))
