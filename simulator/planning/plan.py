"""Capacity planning: the fewest replicas that keep the objectives of a load, found by simulating it.

Owns the search. Attainment is taken to rise with the number of replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from simulator.fleet.fleet import simulate
from simulator.planning.decode_plan import decode_load, decodes, min_decode_replicas
from simulator.planning.replica_search import max_replicas, min_replicas

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from simulator.fleet.outcome import FleetRun
    from simulator.fleet.setup import FleetSetup
    from simulator.workload.arrivals import Arrival, Workload

Tried: TypeAlias = Callable[[int], None]
"""Called with every number of replicas that has been simulated."""


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """What a fleet is planned for.

    Attributes:
        requests: Of the stream that is simulated; a minute or more shows what a queue does.
        target: Fraction of each tier's requests whose objective is to be met.
    """

    workload: Workload
    rate_rps: float
    requests: int
    seed: int = 1
    target: float = 0.95

    def stream(self) -> list[Arrival]:
        """The requests."""
        return self.workload.stream(self.rate_rps, self.requests, self.seed)


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """A fleet with so many prefill replicas under the load.

    Attributes:
        attainment: Fraction of all requests whose first token was in time.
        refused: Fraction of all requests that were refused; they are not in time.
        utilisation: Of the prefill replicas' device time.
        setting: What was tuned.
    """

    replicas: int
    attainment: float
    by_tier: Mapping[str, float]
    refused: float
    utilisation: float
    setting: Mapping[str, float]

    def reaches(self, target: float) -> bool:
        """Whether every tier does."""
        return min(self.by_tier.values(), default=1.0) >= target


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What was found.

    Attributes:
        points: Everything that was simulated, by number of prefill replicas.
        chosen: The fewest prefill replicas that reach the target for every tier; None when no number does.
        decode_replicas: The fewest that keep TPOT for every tier and have memory at once for the target's
            part of all requests; None when no number does.
        load: Prefill work that is offered, seconds per second on one replica, one prompt after the other.
        tpot_by_tier: With the chosen numbers, the fraction of requests that keep their TPOT objective.
        decode_kv_usage: With them, the part of the decode replicas' KV memory in use on average.
        handoff_s: From the end of a prefill to the first token, as the router is told.
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
    handoff_s: float

    @property
    def best(self) -> PlanPoint:
        """The point that was chosen; if none was, that with the most replicas."""
        return next((point for point in self.points if point.replicas == self.chosen), self.points[-1])

    @property
    def capacity_points(self) -> list[tuple[int, float, Mapping[str, float]]]:
        """As `simulator.report.capacity_plot` takes them."""
        return [(point.replicas, point.attainment, point.by_tier) for point in self.points]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "utilisation": self.best.utilisation}


def plan(setup: FleetSetup, demand: PlannedLoad, tried: Tried = lambda _: None) -> CapacityPlan:
    """Find the fewest replicas for a load.

    Args:
        setup: The fleet; its numbers of replicas are not used. Without a setting, the best of the arm's is
            taken for each number.
        demand: The load.
        tried: Called with every number of prefill replicas that has been simulated.
    """
    arrivals = demand.stream()
    enough = min_decode_replicas(setup, arrivals, demand.rate_rps, demand.target)
    limit = max_replicas(decode_load(setup, arrivals, demand.rate_rps))
    decode = enough or limit
    search = _PrefillSearch(setup, demand, arrivals, tried)
    found = search.min_replicas(decode)
    while enough and found and not decodes(search.run_of(found), setup, demand.target) and decode < limit:
        decode += 1  # prefill lets more through at once than was reckoned with
        found = search.min_replicas(decode)
    run = search.run_of(search.points[-1].replicas if found is None else found)
    return CapacityPlan(
        setup.arm.name,
        demand.rate_rps,
        demand.requests,
        demand.seed,
        demand.target,
        search.points,
        found,
        decode if enough else None,
        search.load,
        run.tpot_by_tier(setup.tiers),
        run.decode_kv_usage,
        run.handoff_s,
    )


class _PrefillSearch:
    """Simulates each number of prefill replicas at most once for a number of decode replicas."""

    def __init__(
        self, setup: FleetSetup, demand: PlannedLoad, arrivals: Sequence[Arrival], tried: Tried
    ) -> None:
        self._setup = setup
        self._demand = demand
        self._arrivals = arrivals
        self._tried = tried
        self._decode_replicas = 0
        self._known: dict[int, tuple[PlanPoint, FleetRun]] = {}
        work_s = sum(setup.hardware.cost.prefill_s(arrival.tokens) for arrival in arrivals)
        self.load = work_s / len(arrivals) * demand.rate_rps

    @property
    def points(self) -> list[PlanPoint]:
        """What has been simulated, by number of replicas."""
        return [self._known[replicas][0] for replicas in sorted(self._known)]

    def run_of(self, replicas: int) -> FleetRun:
        """The simulation of so many."""
        return self._known[replicas][1]

    def min_replicas(self, decode_replicas: int) -> int | None:
        """The fewest prefill replicas that reach the target with so many decode replicas."""
        if decode_replicas != self._decode_replicas:
            self._decode_replicas = decode_replicas
            self._known.clear()
        return min_replicas(self._reaches, self.load)

    def _reaches(self, replicas: int) -> bool:
        if replicas not in self._known:
            setup = replace(self._setup, prefill_replicas=replicas, decode_replicas=self._decode_replicas)
            settings = setup.arm.settings if setup.setting is None else [setup.setting]
            found = [self._simulated(replace(setup, setting=setting)) for setting in settings]
            self._known[replicas] = max(
                found, key=lambda pair: (min(pair[0].by_tier.values()), pair[0].attainment)
            )
            self._tried(replicas)
        return self._known[replicas][0].reaches(self._demand.target)

    def _simulated(self, setup: FleetSetup) -> tuple[PlanPoint, FleetRun]:
        run = simulate(setup, self._arrivals)
        point = PlanPoint(
            setup.prefill_replicas,
            run.attainment,
            run.by_tier,
            run.refused,
            run.prefill_utilisation,
            dict(setup.setting or {}),
        )
        return point, run
