"""The result of a simulated fleet: how each request ended, and what the replicas did."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from simulator.fleet.decode import SimulatedDecode
from simulator.replica.hardware import ReplicaModel
from simulator.replica.job import Job
from simulator.workload.arrivals import Arrival
from slo.errors import RejectionReason
from slo.outcomes import Outcome
from slo.request import ReplicaId
from slo.tiers import ObjectiveName, Tier, TierPolicy


@dataclass(slots=True, eq=False)
class Passage:
    """One request's way through the fleet.

    Attributes:
        job: As its last prefill replica had it; set once it has ended.
        outcome: The one way in which it ended; None before that.
        placements: How often it was placed: more than once if replicas died under it.
        prefill_replica: Where it was prefilled last.
        predicted_ttft_s: What the router last predicted.
        tpot_s: Seconds per token after the first; None without.
        unattainable: As the router last said.
    """

    arrival: Arrival
    job: Job | None = None
    outcome: Outcome | None = None
    placements: int = 0
    prefill_replica: ReplicaId | None = None
    decode_replica: ReplicaId | None = None
    predicted_ttft_s: float = math.nan
    tpot_s: float | None = None
    unattainable: tuple[ObjectiveName, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetRun:
    """Every request with its end, and the replicas.

    Attributes:
        passages: In the order of arrival.
        prefill: Every prefill replica that lived, in the order of their starts.
        prefill_places: How many of them live at a time.
        sizes: If the tier is scaled, (time, prefill replicas ordered) whenever that changed.
        replica_s: Seconds of prefill replicas that were paid for, starting and draining ones included.
        decode_sizes: As `sizes`, of the decode tier.
        decode_replica_s: As `replica_s`, of the decode tier.
    """

    passages: Sequence[Passage]
    prefill: Sequence[ReplicaModel]
    decode: Sequence[SimulatedDecode]
    prefill_places: int
    sizes: Sequence[tuple[float, int]] = ()
    replica_s: float = math.nan
    decode_sizes: Sequence[tuple[float, int]] = ()
    decode_replica_s: float = math.nan

    @property
    def jobs(self) -> list[Job]:
        """Every request, in the order of arrival."""
        return [passage.job for passage in self.passages if passage.job is not None]

    @property
    def attainment(self) -> float:
        """Fraction of all requests whose first token was in time; those refused were not."""
        return share(job.is_on_time for job in self.jobs)

    @property
    def by_tier(self) -> dict[str, float]:
        """The same by tier."""
        return attainment_by(self.jobs, "tier")

    @property
    def outcomes(self) -> dict[Outcome, int]:
        """How many requests ended how."""
        return dict(Counter(passage.outcome for passage in self.passages if passage.outcome is not None))

    @property
    def refused(self) -> float:
        """Fraction of all requests that were refused."""
        return share(passage.outcome is not Outcome.FINISHED for passage in self.passages)

    @property
    def taken_by_decode(self) -> dict[str, float]:
        """Fraction of each tier's requests that were not refused for want of decode's memory."""
        taken: dict[str, list[bool]] = defaultdict(list)
        for passage in self.passages:
            is_full = passage.job is not None and passage.job.refused == RejectionReason.DECODE_FULL
            taken[passage.arrival.tier].append(not is_full)
        return {name: share(flags) for name, flags in sorted(taken.items())}

    @property
    def _ended_s(self) -> float:
        return max((job.prefilled_s for job in self.jobs if job.is_finished()), default=0.0)

    @property
    def prefill_utilisation(self) -> float:
        """Device time of prefill steps, work done again included, per replica and second of its use."""
        busy_s = sum(replica.busy_s for replica in self.prefill)
        return busy_s / (self.prefill_places * self._ended_s) if self._ended_s else 0.0

    @property
    def decode_kv_usage(self) -> float:
        """Fraction of the decode replicas' KV memory in use, on average until the last prefill ended."""
        held = sum(replica.reserved_token_s for replica in self.decode)
        room = sum(replica.kv_tokens for replica in self.decode) * self._ended_s
        return min(1.0, held / room) if room else 0.0

    @property
    def waited_for_memory(self) -> float:
        """Fraction of the requests that came to decode and found no room in its memory at once."""
        came = self.outcomes.get(Outcome.FINISHED, 0)
        return min(1.0, sum(replica.waited for replica in self.decode) / came) if came else 0.0

    def tpot_by_tier(self, policies: Mapping[Tier, TierPolicy]) -> dict[str, float]:
        """By tier with a TPOT objective, the fraction of its finished requests that met it."""
        met: dict[str, list[bool]] = defaultdict(list)
        for passage in self.passages:
            objective_s = policies[passage.arrival.tier].tpot_s
            if objective_s is not None and passage.tpot_s is not None:
                met[passage.arrival.tier].append(passage.tpot_s <= objective_s)
        return {name: share(flags) for name, flags in sorted(met.items())}


def attainment_by(jobs: Iterable[Job], attribute: str) -> dict[str, float]:
    """Fraction of requests whose first token was in time, by an attribute of their arrival."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for job in jobs:
        groups[str(getattr(job.arrival, attribute))].append(job.is_on_time)
    return {name: share(flags) for name, flags in sorted(groups.items())}


def share(flags: Iterable[bool]) -> float:
    """Fraction that is true; 1 of nothing."""
    known = [*flags]
    return sum(known) / len(known) if known else 1.0
