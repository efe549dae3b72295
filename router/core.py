"""The router's decisions, pure: reports and requests in, placements and refusals out.

Owns admission and what a request is promised. The view of the fleet is `router.fleet.view`, the choice of the
replica `router.placement.policies` and its peers. Reads no clock (`now_s` is passed in) and sends nothing;
the Serve deployment around it is `router.serve.deployment`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.admission import Gate
from router.fleet.decode_replica import DecodeView, KvLink, choose_decode, link_to
from router.fleet.prefill_replica import PlacedJob
from router.fleet.view import FleetView
from router.messages import Placed
from router.placement.policies import NewPrefill
from slo.errors import Rejected, RejectionReason
from slo.queue.slack import NO_DEADLINE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.fleet.prefill_replica import PrefillView
    from router.fleet.prefix_index import PrefixIndex
    from router.messages import PlacementDecision, PlacementRequested
    from router.placement.policies import Choice, PlacementPolicy
    from slo.predict.prompt_length import PromptLengthEstimator
    from slo.reports import DecodeReported, PrefillReported, ReplicaGone
    from slo.request import JobId, ReplicaId
    from slo.tiers import Tier, TierPolicy


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """How the router treats what it is told.

    Attributes:
        stale_after_s: A replica that has not reported for this long is not used.
        settle_s: For so long after its start the router may not have heard of every replica.
        in_transit_s: How long a placement may be missing from its replica's reports before it is dropped.
        silent_after_s: One that has not reported for this long is used only if all others have not, either.
        stretch: A budget that the client did not ask for itself is not held against it below this
            multiple of what the request takes on an idle replica.
    """

    stale_after_s: float = 10.0
    settle_s: float = 3.0
    in_transit_s: float = 5.0
    silent_after_s: float = math.inf
    stretch: float = 2.0


@dataclass(frozen=True, slots=True)
class _Terms:
    """What a request is promised.

    Attributes:
        arrived_s: When it arrived.
        budget_s: For its first token, from arrival; None for no deadline.
        deadline_s: When its prefill must end, infinite for never.
        latest_s: When its prefill must end lest it be rejected; infinite when it never is.
    """

    arrived_s: float
    budget_s: float | None
    deadline_s: float
    latest_s: float


class RouterCore:
    """Places requests on replicas.

    Args:
        policies: Objectives and weight of each tier.
        placement: Chooses among usable prefill replicas.
        limits: See `RouterLimits`.
        started_s: When the router starts.
        link: What KV moves over, which makes the handoff a matter of the prompt's length; None for one
            number.
        gate: Admits or rejects requests before they are placed; by default it admits all.
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
        self._limits = limits = limits or RouterLimits()
        weights = {tier: policy.weight for tier, policy in policies.items()}
        self._view = FleetView(
            weights, limits.stale_after_s, limits.in_transit_s, started_s, limits.silent_after_s
        )
        self._policies = policies
        self._placement = placement
        self._started_s = started_s
        self._link = link
        self._gate = gate or Gate()

    # What it knows.

    @property
    def prefill(self) -> Mapping[ReplicaId, PrefillView]:
        """Prefill replicas by name."""
        return self._view.prefill

    @property
    def decode(self) -> Mapping[ReplicaId, DecodeView]:
        """Decode replicas by name."""
        return self._view.decode

    @property
    def prompt_length(self) -> PromptLengthEstimator:
        """Estimates the length of prompts that came as text."""
        return self._view.prompt_length

    @property
    def prefixes(self) -> PrefixIndex:
        """Which prefixes each prefill replica is expected to have cached."""
        return self._view.prefixes

    def is_ready(self, now_s: float) -> bool:
        """Whether both tiers have a replica that reports."""
        return bool(self._view.usable_prefill(now_s)) and bool(self._view.usable_decode(now_s))

    # What it is told.

    def prefill_reported(self, event: PrefillReported, now_s: float) -> tuple[float, ...]:
        """See `FleetView.prefill_reported`."""
        self._gate.served(event.ended)
        return self._view.prefill_reported(event, now_s)

    def decode_reported(self, event: DecodeReported, now_s: float) -> None:
        """Remember how full a decode replica is."""
        self._view.decode_reported(event, now_s)

    def replica_gone(self, event: ReplicaGone) -> None:
        """Place nothing there any more."""
        self._view.replica_gone(event)

    def job_ended(self, job_id: JobId, now_s: float) -> None:
        """Forget a request that ended, or whose client is gone, wherever it is."""
        self._gate.ended(job_id, now_s)
        self._view.job_ended(job_id)

    # What it decides.

    def place(self, request: PlacementRequested, now_s: float) -> PlacementDecision:
        """Find a place for a request and count it there, or say why there is none.

        A request that was admitted before and whose replica failed is not asked about shares again.
        """
        replicas = self._view.usable_prefill(now_s, request.failed_replicas)
        tokens = self._view.tokens(request)
        decode = self._choose_decode(request, tokens, now_s)
        if not replicas or decode is None:
            settled = now_s - self._started_s >= self._limits.settle_s
            reason = RejectionReason.NO_REPLICA if settled else RejectionReason.NOT_SETTLED
            return Rejected(reason, self._limits.stale_after_s, None, None)
        cached = self._view.cached_tokens(request, tokens)
        if not request.is_admitted:
            max_cached = max(cached.values(), default=0)
            if (rejected := self._gate.refusal(request, tokens, replicas, now_s, max_cached)) is not None:
                return rejected
        terms = self._terms(request, tokens, replicas, decode, now_s)
        weight = self._policies[request.objective.tier].weight
        prefill = NewPrefill(tokens, terms.deadline_s, weight, cached)
        choice = self._placement.choose(prefill, replicas, now_s)
        if (late_s := max(0.0, choice.end_s - terms.latest_s)) > 0:
            self._gate.ended(request.job_id, now_s)
            best_s = terms.latest_s - terms.deadline_s + (terms.budget_s or 0.0) + late_s
            return Rejected(RejectionReason.DEADLINE_INFEASIBLE, late_s, best_s, terms.budget_s)
        return self._bind(request, prefill, terms, choice, decode, now_s)

    def _choose_decode(self, request: PlacementRequested, tokens: int, now_s: float) -> DecodeView | None:
        if (decode_replica := request.decode_replica) is not None:
            return self._view.decode.get(decode_replica) or DecodeView(decode_replica)
        usable = self._view.usable_decode(now_s)
        return choose_decode(usable, tokens, request.objective.tpot_s, self._link)

    def _terms(
        self,
        request: PlacementRequested,
        tokens: int,
        replicas: Sequence[PrefillView],
        decode: DecodeView,
        now_s: float,
    ) -> _Terms:
        idle = min(replicas, key=lambda replica: replica.predictor.prefill_s(tokens)).predictor
        alone_s = idle.prefill_s(tokens)
        handoff_s = idle.handoff_s + self._transfer_s(decode, tokens)
        budget_s = request.objective.ttft_budget_s(alone_s)
        arrived_s = now_s - request.elapsed_s
        if budget_s is None:
            return _Terms(arrived_s, None, NO_DEADLINE, NO_DEADLINE)
        deadline_s = latest_s = arrived_s + budget_s - handoff_s
        if not self._policies[request.objective.tier].sheddable:
            latest_s = NO_DEADLINE
        elif not request.explicit_deadline:
            allowed_s = self._limits.stretch * (alone_s + handoff_s)
            latest_s = arrived_s + max(budget_s, allowed_s) - handoff_s
        return _Terms(arrived_s, budget_s, deadline_s, latest_s)

    def _bind(
        self,
        request: PlacementRequested,
        prefill: NewPrefill,
        terms: _Terms,
        choice: Choice,
        decode: DecodeView,
        now_s: float,
    ) -> Placed:
        """Count a request on the replicas chosen."""
        replica, tokens = choice.replica, prefill.tokens
        cached_tokens = prefill.cached_tokens.get(replica.replica_id, 0)
        tier = request.objective.tier
        replica.add(PlacedJob(request.job_id, tier, tokens, terms.deadline_s, now_s, cached_tokens))
        if request.prefix_hashes:
            block_tokens = self._view.block_tokens(request)
            self._view.prefixes.placed(replica.replica_id, request.prefix_hashes, block_tokens)
        decode.placed(tokens)
        handoff_s = replica.predictor.handoff_s + self._transfer_s(decode, tokens)
        predicted_s = choice.end_s + handoff_s - terms.arrived_s
        return Placed(
            prefill_replica=replica.replica_id,
            decode_replica=decode.replica_id,
            tokens=tokens,
            ttft_budget_s=terms.budget_s,
            predicted_ttft_s=predicted_s,
            slack_s=math.inf if terms.budget_s is None else terms.budget_s - predicted_s,
            handoff_s=handoff_s,
            reason=choice.reason,
            cached_tokens=cached_tokens,
        )

    def _transfer_s(self, decode: DecodeView, tokens: int) -> float:
        return 0.0 if self._link is None else link_to(decode, self._link).transfer_s(tokens)
