"""The router's decisions, pure: reports and requests in, placements and rejections out.

Owns the view of the fleet and admission. Reads no clock (`now_s` is passed in) and sends nothing; the
Serve deployment around it is `router.deployment`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.decisions import Placed, PlacementRequested, Rejected
from router.decode import DecodeReplica, KvLink, choose_decode, link_to
from router.fleet import PlacedJob, PrefillReplica
from router.gate import Gate
from router.placement import PlacementPolicy, Prefill
from slo.errors import RejectionReason
from slo.prompt_length import PromptLengthEstimator
from slo.slack import NO_DEADLINE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slo.reports import DecodeReported, OutstandingJob, PrefillReported, ReplicaGone
    from slo.request import JobId, ReplicaId
    from slo.tiers import Tier, TierPolicy


_FORGET_AFTER = 3
"""A replica that has been silent for this many times the limit of staleness is forgotten."""


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """How the router treats what it is told.

    Attributes:
        stale_after_s: A replica that has not reported for this long is not used.
        settle_s: For so long after its start the router may not have heard of every replica.
        in_transit_s: How long a placement may be missing from its replica's reports before it is dropped.
        stretch: A budget that the client did not ask for itself is not held against it below this
            multiple of what the request takes on an idle replica.
    """

    stale_after_s: float = 10.0
    settle_s: float = 3.0
    in_transit_s: float = 5.0
    stretch: float = 2.0


class RouterCore:
    """Places requests on replicas.

    Args:
        policies: Objectives and worth of each tier.
        placement: Chooses among usable prefill replicas.
        limits: See `RouterLimits`.
        started_s: When the router starts.
        link: What KV moves over, which makes the handoff a matter of the prompt's length; None for one
            number.
        gate: Lets requests in or refuses them; None lets everybody in.
    """

    def __init__(
        self,
        policies: Mapping[Tier, TierPolicy],
        placement: PlacementPolicy,
        limits: RouterLimits | None = None,
        started_s: float = -math.inf,
        link: KvLink | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.prefill: dict[ReplicaId, PrefillReplica] = {}
        self.decode: dict[ReplicaId, DecodeReplica] = {}
        self.prompt_length = PromptLengthEstimator()
        self._policies = policies
        self._weights = {tier: policy.weight for tier, policy in policies.items()}
        self._placement = placement
        self._limits = limits or RouterLimits()
        self._started_s = started_s
        self._link = link
        self._gate = gate or Gate()
        self._swept_at_s = started_s

    def prefill_reported(self, event: PrefillReported, now_s: float) -> tuple[float, ...]:
        """Take a replica's word for its work, keeping placements that it cannot have seen yet.

        Returns:
            The relative errors of the prompt lengths that became known, (estimate - actual) / actual.
        """
        if now_s - self._swept_at_s >= self._limits.stale_after_s:
            self._forget_silent(now_s)
        replica = self.prefill.get(event.replica_id)
        if replica is None:
            replica = PrefillReplica(event.replica_id, event.predictor, now_s, self._weights)
            self.prefill[event.replica_id] = replica
        replica.predictor = event.predictor
        replica.reported_at_s = now_s
        replica.kv_usage = event.kv_usage
        self._gate.served(event.ended)
        gone = set(event.ended)
        jobs = [self._reported_job(job, replica.jobs.get(job.job_id), now_s) for job in event.jobs]
        known = {job.job_id for job in jobs}
        in_transit = [
            job
            for job in replica.jobs.values()
            if job.job_id not in known
            and job.job_id not in gone
            and now_s - job.placed_at_s < self._limits.in_transit_s
            and job.job_id not in replica.confirmed
        ]
        replica.confirmed = known
        replica.yields_in_s = event.yields_in_s
        replica.replace([*jobs, *in_transit], event.running, now_s - event.running_for_s, now_s)
        return tuple(self.prompt_length.observe(size, tokens) for size, tokens in event.learned)

    def decode_reported(self, event: DecodeReported, now_s: float) -> None:
        """Remember how full a decode replica is."""
        if event.replica_id not in self.decode:
            self.decode[event.replica_id] = DecodeReplica(event.replica_id)
        self.decode[event.replica_id].reported(event, now_s)

    def replica_gone(self, event: ReplicaGone) -> None:
        """Place nothing there any more."""
        self.prefill.pop(event.replica_id, None)
        self.decode.pop(event.replica_id, None)

    def _forget_silent(self, now_s: float) -> None:
        """Forget replicas that were killed: nobody says goodbye for them."""
        self._swept_at_s = now_s
        limit_s = _FORGET_AFTER * self._limits.stale_after_s
        for fleet in (self.prefill, self.decode):
            for replica_id in [key for key, it in fleet.items() if now_s - it.reported_at_s > limit_s]:
                del fleet[replica_id]

    def job_ended(self, job_id: JobId, now_s: float) -> None:
        """Forget a request that ended before or after its replica knew of it."""
        self._gate.ended(job_id, now_s)
        for replica in self.prefill.values():
            if replica.remove(job_id, now_s) is not None:
                return

    def is_ready(self, now_s: float) -> bool:
        """Whether both tiers have a replica that reports."""
        return bool(self._usable_prefill(now_s)) and bool(self._usable_decode(now_s))

    def place(self, request: PlacementRequested, now_s: float) -> Placed | Rejected:
        """Find a place for a request, and count it there; or say why there is none."""
        replicas = self._usable_prefill(now_s)
        tokens = self._tokens(request)
        decode = choose_decode(self._usable_decode(now_s), tokens, request.objective.tpot_s, self._link)
        if not replicas or decode is None:
            settled = now_s - self._started_s >= self._limits.settle_s
            reason = RejectionReason.NO_REPLICA if settled else RejectionReason.NOT_SETTLED
            return Rejected(reason, self._limits.stale_after_s, None, None)
        if (refused := self._gate.refusal(request, tokens, replicas, now_s)) is not None:
            return refused
        idle = min(replicas, key=lambda replica: replica.predictor.prefill_s(tokens)).predictor
        budget_s = request.objective.ttft_budget_s(idle.prefill_s(tokens))
        arrived_s = now_s - request.elapsed_s
        due_s = NO_DEADLINE if budget_s is None else arrived_s + budget_s
        policy = self._policies[request.objective.tier]
        way_s = 0.0 if self._link is None else link_to(decode, self._link).transfer_s(tokens)
        prefill = Prefill(tokens, due_s - idle.handoff_s - way_s, policy.weight)
        choice = self._placement.choose(prefill, replicas, now_s)
        handoff_s = choice.replica.predictor.handoff_s + way_s
        predicted_s = choice.end_s + handoff_s - arrived_s
        if budget_s is not None and policy.sheddable:
            allowed_s = budget_s
            if not request.explicit_deadline:
                alone_s = idle.prefill_s(tokens) + idle.handoff_s + way_s
                allowed_s = max(budget_s, self._limits.stretch * alone_s)
            late_s = predicted_s - allowed_s
            if late_s > 0:
                self._gate.ended(request.job_id, now_s)
                return Rejected(RejectionReason.DEADLINE_INFEASIBLE, late_s, allowed_s + late_s, budget_s)
        choice.replica.add(
            PlacedJob(request.job_id, request.objective.tier, tokens, prefill.deadline_s, now_s), now_s
        )
        decode.placed(tokens)
        return Placed(
            prefill_replica=choice.replica.replica_id,
            decode_replica=decode.replica_id,
            tokens=tokens,
            ttft_budget_s=budget_s,
            predicted_ttft_s=predicted_s,
            slack_s=math.inf if budget_s is None else budget_s - predicted_s,
            handoff_s=handoff_s,
            reason=choice.reason,
        )

    def _tokens(self, request: PlacementRequested) -> int:
        if request.prompt_tokens is not None:
            return request.prompt_tokens
        return self.prompt_length.tokens(request.prompt_bytes)

    def _usable_prefill(self, now_s: float) -> list[PrefillReplica]:
        return [r for r in self.prefill.values() if now_s - r.reported_at_s < self._limits.stale_after_s]

    def _usable_decode(self, now_s: float) -> list[DecodeReplica]:
        return [r for r in self.decode.values() if now_s - r.reported_at_s < self._limits.stale_after_s]

    @staticmethod
    def _reported_job(job: OutstandingJob, known: PlacedJob | None, now_s: float) -> PlacedJob:
        deadline_s = NO_DEADLINE if job.budget_s is None else now_s + job.budget_s
        placed_at_s = now_s if known is None else known.placed_at_s
        return PlacedJob(job.job_id, job.tier, job.tokens, deadline_s, placed_at_s, 0, job.work_s)
