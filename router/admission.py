"""Admission at the router.

Owns what the router knows that `slo.admission.controller` needs: how much the fleet can do, and how long a
request would take. Pure, like `router.core`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

from router.fleet.prefill_replica import PrefillView
from router.messages import LiveJobs, PlacementRequested
from slo.admission.controller import AdmissionController
from slo.admission.decode_account import DecodeTake
from slo.admission.rules import AdmissionRequest
from slo.admission.tenant_limits import Usage
from slo.errors import Rejected
from slo.predict.prefill_time import PrefillPredictor
from slo.reports import OutstandingJob
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
        answer_tokens: int = 0,
    ) -> Rejected | None:
        """Why a request is not admitted; None when it is.

        `replicas` are the usable ones; without any, nobody is refused for a share or a backlog of theirs.
        `cached_tokens` are those of the `tokens` that some replica need not compute, `answer_tokens` those
        that each answer is expected to have.
        """
        if self.admission is None:
            return None
        work_s = self._work_s(tokens, replicas, now_s, cached_tokens)
        if request.only_decode:
            work_s = 0.0  # not prefill's
        elif not replicas:
            self.admission.came_in_vain(now_s)
        asked = AdmissionRequest(
            request.job_id,
            request.objective.tier,
            request.tenant,
            Usage(tokens * request.answers_per_prompt, request.output_tokens),
            work_s,
            request.asker,
            request.number,
            request.limit,
            request.key_limit,
            only_decode=request.only_decode,
            decode=DecodeTake(request.answers, tokens + request.answers * answer_tokens / 2),
            likeness=request.likeness,
        )
        refused = self.admission.decide(asked, now_s)
        return refused and replace(refused, ttft_budget_s=request.objective.ttft_s)

    def _work_s(
        self, tokens: int, replicas: Sequence[PrefillView], now_s: float, cached_tokens: int
    ) -> float:
        """Seconds of a prompt on the fastest replica; what the fleet can do may be looked at anew."""
        assert self.admission is not None
        new = tokens - cached_tokens
        work_s = min((one.predictor.work_s(new, cached_tokens) for one in replicas), default=0.0)
        if len(replicas) != self._replicas or now_s - self._looked_at_s >= _LOOK_S:
            self._replicas, self._looked_at_s = len(replicas), now_s
            self.admission.capacity_changed(_capacity(replicas, new, cached_tokens, work_s), now_s)
        return work_s

    def no_replica(self, now_s: float) -> None:
        """A request has come, and no prefill replica is there for it."""
        if self.admission is not None:
            self._replicas = 0
            self.admission.capacity_changed(0.0, now_s)
            self.admission.came_in_vain(now_s)

    def weight(self, tenant: str) -> float:
        """See `AdmissionController.weight`."""
        return 1.0 if self.admission is None else self.admission.weight(tenant)

    def served(self, jobs: Iterable[JobId]) -> None:
        """Prefills have ended."""
        if self.admission is not None:
            for job_id in jobs:
                self.admission.served(job_id)

    def waits(
        self,
        jobs: Iterable[OutstandingJob],
        own: PrefillPredictor,
        fleet: Collection[PrefillView],
        now_s: float,
    ) -> None:
        """A replica, whose predictor is its own, names these prefills for the first time.

        They count in seconds of the fastest of the fleet, as all work does.
        """
        if self.admission is None:
            return
        for job in jobs:
            if self.admission.is_waiting(job.job_id):
                continue  # as nearly all: they were admitted here
            whole_s = own.work_s(job.tokens)
            least_s = min(one.predictor.work_s(job.tokens) for one in fleet)
            left = 1.0 if job.work_s is None or whole_s <= 0 else job.work_s / whole_s
            self.admission.waits(job.job_id, job.tier, left * least_s, now_s)

    def not_for_prefill(self, job_id: JobId) -> None:
        """Decode computes the prompt of a request."""
        if self.admission is not None:
            self.admission.not_for_prefill(job_id)

    def ended(self, job_id: JobId, now_s: float, used: Usage | None = None) -> None:
        """A request has ended or was cancelled, with so many tokens; None when nobody knows."""
        if self.admission is not None:
            self.admission.ended(job_id, now_s, used)

    def generated(self, job_id: JobId, tokens: int, now_s: float) -> None:
        """See `AdmissionController.generated`."""
        if self.admission is not None:
            self.admission.generated(job_id, tokens, now_s)

    def withdrawn(
        self, job_id: JobId, now_s: float, *, lacked_decode: bool = False, in_reach: bool = True
    ) -> None:
        """A request is rejected for another reason.

        For decode's memory alone, or a deadline that is not even in an idle fleet's reach, it has asked
        nothing of prefill.
        """
        if self.admission is not None:
            if lacked_decode:
                self.admission.decode.lacked(job_id, now_s)
            if lacked_decode or not in_reach:
                self.admission.not_for_prefill(job_id)
            self.admission.withdrawn(job_id, now_s)

    def reconcile(self, live: LiveJobs, now_s: float) -> list[JobId]:
        """See `AdmissionController.reconcile`."""
        if self.admission is None:
            return []
        return self.admission.reconcile(live.asker, live.asked, live.jobs, now_s)


def _capacity(replicas: Sequence[PrefillView], new: int, cached: int, work_s: float) -> float:
    """What the fleet can do in a second, in seconds of the fastest replica."""
    if work_s <= 0:
        return float(len(replicas))
    return math.fsum(work_s / replica.predictor.work_s(new, cached) for replica in replicas)
