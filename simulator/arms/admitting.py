"""A replica behind the fleet's admission: what is refused never reaches it.

Stands in for the router where an arm is a single replica. Who is admitted is decided by
`slo.admission.controller`; whom the router would refuse beyond that, as predicted to be late, is let in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Final

from simulator.arms.arm import Arm
from simulator.replica.hardware import Hardware, ReplicaModel
from simulator.replica.job import Job
from simulator.replica.loop import EventLoop
from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRequest, AdmissionRules
from slo.admission.tenant_limits import TenantGates, Usage
from slo.admission.tenants import ANONYMOUS

_SEED: Final = 20260216


class AdmittingReplica:
    """One replica that is the whole fleet; a refused request ends without a first token.

    The other parameters are those of an arm's `build`.

    Args:
        arm: How the replica is run.
    """

    def __init__(
        self,
        loop: EventLoop,
        hardware: Hardware,
        setting: Mapping[str, float],
        prefilled: Callable[[Job], None],
        *,
        arm: Arm,
    ) -> None:
        self._loop = loop
        self._prefilled = prefilled
        self._predictor = hardware.predictor()
        self._admission = AdmissionController(
            hardware.tiers,
            AdmissionRules(),
            TenantGates(),
            random.Random(_SEED).random,  # noqa: S311 - reproducible, not secret
        )
        self._admission.capacity_changed(1.0, loop.now_s)
        self._replica: ReplicaModel = arm.build(loop, hardware, setting, self._done)
        self.blocking_s = self._replica.blocking_s

    @property
    def busy_s(self) -> float:
        """Device time spent so far."""
        return self._replica.busy_s

    def arrive(self, job: Job) -> None:
        """Take a request, or refuse it."""
        work_s = self._predictor.prefill_s(job.num_tokens)
        asked = AdmissionRequest(job.job_id, job.arrival.tier, ANONYMOUS.name, Usage(job.num_tokens), work_s)
        if (refused := self._admission.decide(asked, self._loop.now_s)) is not None:
            job.refused = refused.reason.value
        else:
            self._replica.arrive(job)

    def release(self, job: Job) -> None:
        """The KV of a prefilled request has left."""
        self._replica.release(job)

    def _done(self, job: Job) -> None:
        self._admission.ended(job.job_id, self._loop.now_s)
        self._prefilled(job)
