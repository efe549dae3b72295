"""Who gets a request: the router's core, informed by reports, or without them for replicas that make none.

Owns what the core is told in virtual time. Placement, admission and the choice of the decode replica are
`router.core`'s.
"""

from __future__ import annotations

import math
import random
from typing import Final

from router.admission import Gate
from router.core import RouterCore
from router.fleet.view import RouterLimits
from router.messages import JobEnded, PlacementDecision, PlacementRequested
from router.placement.registry import POLICIES
from simulator.fleet.setup import FleetSetup
from simulator.replica.loop import EventLoop
from simulator.workload.arrivals import Arrival
from slo.autoscaling.need import DecodeDemand
from slo.objectives import Objective
from slo.reports import DecodeReported, PrefillReported, ReplicaGone
from slo.request import JobId, ReplicaId

INFORMED: Final = "least_harm"
"""How our replicas' requests are placed unless said otherwise."""
BLIND: Final = "least_outstanding_tokens"
"""How requests are placed on replicas that report nothing."""
_WITHOUT_REPORTS: Final = RouterLimits(stale_after_s=math.inf, in_transit_s=math.inf)


class Dispatch:
    """Asks the router's core.

    Args:
        informs: Whether the replicas report. Otherwise the core knows what it has placed and what has ended,
            and rejects nothing for being late, as it cannot know what could be in time.
    """

    def __init__(self, loop: EventLoop, setup: FleetSetup, *, informs: bool) -> None:
        tiers = setup.weighted_tiers()
        chosen = setup.placement or (INFORMED if informs else BLIND)
        limits = setup.limits if informs else _WITHOUT_REPORTS
        self._core = RouterCore(
            tiers,
            POLICIES[chosen](random.Random(setup.seed).randrange),  # noqa: S311 - reproducible
            limits,
            link=setup.kv_link(),
            gate=Gate(admission := setup.controller()),
        )
        self._admission = admission
        self._loop = loop
        self._tiers = tiers
        self._informs = informs
        self._report_s = setup.delays.report_s

    def place(self, job_id: JobId, arrival: Arrival) -> PlacementDecision:
        """Where a request goes."""
        now_s = self._loop.now_s
        return self._core.place(
            PlacementRequested(
                job_id=job_id,
                objective=Objective(arrival.tier, arrival.ttft_s, self._tiers[arrival.tier].tpot_s),
                explicit_deadline=True,
                however_late=not self._informs,
                prompt_tokens=arrival.tokens,
                prompt_bytes=0,
                elapsed_s=now_s - arrival.at_s,
                prefix_hashes=arrival.blocks,
                hash_block=arrival.block_tokens,
                prompt_hash=arrival.number,
            ),
            now_s,
        )

    def report(self, report: PrefillReported | DecodeReported) -> None:
        """Hear of a replica after a report's way."""
        self._loop.call_at(self._loop.now_s + self._report_s, self.hear, report)

    def hear(self, report: PrefillReported | DecodeReported) -> None:
        """Hear of a replica now."""
        if isinstance(report, PrefillReported):
            self._core.prefill_reported(report, self._loop.now_s)
        else:
            self._core.view.decode_reported(report, self._loop.now_s)

    def prefilled(self, job_id: JobId) -> None:
        """A prefill has ended; replicas that report say so themselves."""
        if not self._informs:
            self._core.view.prefixes.computed(job_id)
            self._core.job_ended(JobEnded(job_id), self._loop.now_s)

    def ended(self, job_id: JobId) -> None:
        """A request has ended, and is on its way to nobody any more."""
        self._core.job_ended(JobEnded(job_id), self._loop.now_s)

    def gone(self, replica_id: ReplicaId) -> None:
        """A replica's death has been noticed."""
        self._core.replica_gone(ReplicaGone(replica_id), self._loop.now_s)

    def demand(self) -> tuple[float, float]:
        """As `AdmissionController.demand`; not a number without admission, which keeps the account of it."""
        if self._admission is None:
            return math.nan, math.nan
        return self._admission.demand(self._loop.now_s)

    def decode_demand(self) -> DecodeDemand:
        """As `RouterCore.decode_demand`."""
        return self._core.decode_demand(self._loop.now_s)
