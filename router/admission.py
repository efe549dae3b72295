"""Admission at the router.

Owns what the router knows that `slo.admission.controller` needs: how much the fleet can do, and how long a
request would take. Pure, like `router.core`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from slo.admission.controller import AdmissionRequest
from slo.errors import Rejected

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from router.fleet.prefill_replica import PrefillView
    from router.messages import PlacementRequested
    from slo.admission.controller import AdmissionController
    from slo.request import JobId

_LOOK_S: Final = 1.0
"""Capacity is worked out anew after so long, and when the number of replicas changes."""


class Gate:
    """Admits or rejects requests.

    Args:
        admission: Decides; None admits all.
    """

    def __init__(self, admission: AdmissionController | None = None) -> None:
        self.admission = admission
        self._replicas = 0
        self._looked_at_s = -math.inf

    def refusal(
        self,
        request: PlacementRequested,
        tokens: int,
        replicas: Sequence[PrefillView],
        now_s: float,
        cached_tokens: int = 0,
    ) -> Rejected | None:
        """Why a request is not admitted; None when it is.

        Args:
            request: The request.
            tokens: Its length.
            replicas: Usable prefill replicas, at least one.
            now_s: The time.
            cached_tokens: Of its tokens, those that some replica need not compute.
        """
        if self.admission is None:
            return None
        new = tokens - cached_tokens
        work_s = min(replica.predictor.prefill_s(new, cached_tokens) for replica in replicas)
        if len(replicas) != self._replicas or now_s - self._looked_at_s >= _LOOK_S:
            self._replicas, self._looked_at_s = len(replicas), now_s
            self.admission.has_capacity(_capacity(replicas, new, cached_tokens, work_s))
        tier, tenant = request.objective.tier, request.tenant
        decision = self.admission.decide(
            AdmissionRequest(request.job_id, tier, tenant, tokens, work_s), now_s
        )
        if isinstance(decision, Rejected):
            return replace(decision, ttft_budget_s=request.objective.ttft_s)
        return None

    def served(self, jobs: Iterable[JobId]) -> None:
        """Prefills have ended."""
        if self.admission is not None:
            for job_id in jobs:
                self.admission.served(job_id)

    def ended(self, job_id: JobId, now_s: float) -> None:
        """A request has ended, was rejected for another reason, or was cancelled."""
        if self.admission is not None:
            self.admission.ended(job_id, now_s)


def _capacity(replicas: Sequence[PrefillView], new: int, cached: int, work_s: float) -> float:
    """What the fleet can do in a second, in seconds of the fastest replica."""
    if work_s <= 0:
        return float(len(replicas))
    return math.fsum(work_s / replica.predictor.prefill_s(new, cached) for replica in replicas)
