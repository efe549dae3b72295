"""The router's decisions, pure: reports and requests in, placements, refusals and evictions out.

Owns admission and the moment of binding. The view of the fleet is `router.fleet.view`, the choice of the
replica `router.placement.policies` and its peers, the order of those held `router.placement.holding`. Reads
no clock (`now_s` is passed in) and sends nothing; the Serve deployment around it is
`router.serve.deployment`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.admission import Gate
from router.fleet.decode_replica import DecodeReplica, KvLink, choose_decode, link_to
from router.fleet.prefill_replica import PlacedJob
from router.fleet.view import FleetView
from router.messages import Evicted, Held, Placed, PlacementReason, Rejected
from router.placement.holding import HeldQueue, Terms
from router.placement.policies import Prefill
from slo.errors import EvictionReason, RejectionReason
from slo.queue.slack import NO_DEADLINE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.fleet.prefill_replica import PrefillReplica
    from router.fleet.prefix_index import PrefixIndex
    from router.messages import Decision, Outcome, PlacementRequested
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
        silent_after_s: One that has not for this long is used only if the others have not, either.
        stretch: A budget that the client did not ask for itself is not held against it below this
            multiple of what the request takes on an idle replica.
        late_binding: Hold a request back until a replica can start it soon.
        bind_ahead_s: How soon that is: work that a replica has ahead of it, so that it never idles for want
            of work. A request is also placed when it has less than this to spare.
    """

    stale_after_s: float = 10.0
    settle_s: float = 3.0
    in_transit_s: float = 5.0
    silent_after_s: float = math.inf
    stretch: float = 2.0
    late_binding: bool = False
    bind_ahead_s: float = 0.08


class RouterCore:
    """Places requests on replicas.

    Args:
        policies: Objectives and worth of each tier.
        placement: Chooses among usable prefill replicas.
        limits: See `RouterLimits`.
        started_s: When the router starts.
        link: What KV moves over, which makes the handoff a matter of the prompt's length; None for one
            number.
        gate: Lets requests in or refuses them before they are placed; by default it lets in everybody.
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
        self._held = HeldQueue(limits.bind_ahead_s)
        self._policies = policies
        self._placement = placement
        self._started_s = started_s
        self._link = link
        self._gate = gate or Gate()

    # What it knows.

    @property
    def prefill(self) -> Mapping[ReplicaId, PrefillReplica]:
        """Prefill replicas by name."""
        return self._view.prefill

    @property
    def decode(self) -> Mapping[ReplicaId, DecodeReplica]:
        """Decode replicas by name."""
        return self._view.decode

    @property
    def prompt_length(self) -> PromptLengthEstimator:
        """How prompts are sized that came as text."""
        return self._view.prompt_length

    @property
    def prefixes(self) -> PrefixIndex:
        """Which prefixes each prefill replica is expected to have cached."""
        return self._view.prefixes

    @property
    def held(self) -> int:
        """How many requests are held back."""
        return len(self._held)

    def is_ready(self, now_s: float) -> bool:
        """Whether both tiers have a replica that reports."""
        return bool(self._view.usable_prefill(now_s)) and bool(self._view.usable_decode(now_s))

    # What it is told; `due` is to be asked after each of these.

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
        if self._held.remove(job_id) is None:
            self._view.job_ended(job_id, now_s)

    # What it decides.

    def place(self, request: PlacementRequested, now_s: float) -> Decision:
        """Find a place for a request, and count it there; or hold it back, or say why there is none.

        A request that has been let in and has lost its place is not held, nor asked about shares again.
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
            if (refused := self._gate.refusal(request, tokens, replicas, now_s, max_cached)) is not None:
                return refused
        terms = self._terms(request, tokens, replicas, decode, now_s)
        choice = self._choose(terms, cached, replicas, now_s)
        if (late_s := self._late_s(terms, choice, replicas, now_s)) > 0:
            self._gate.ended(request.job_id, now_s)
            best_s = terms.latest_s - terms.deadline_s + (terms.budget_s or 0.0) + late_s
            return Rejected(RejectionReason.DEADLINE_INFEASIBLE, late_s, best_s, terms.budget_s)
        may_wait = self._limits.late_binding and not request.is_admitted
        if may_wait and self._can_wait(terms, choice, now_s):
            self._held.hold(terms, choice.end_s - choice.start_s)
            return Held(request.job_id)
        return self._bind(terms, cached, choice, decode, now_s)

    def due(self, now_s: float) -> list[tuple[JobId, Outcome]]:
        """What has become of held requests since the last call: placed, or given up."""
        if not self._held:
            return []
        decided: list[tuple[JobId, Outcome]] = []
        for terms in self._held.impossible(now_s):
            self._held.remove(terms.request.job_id)
            self._gate.ended(terms.request.job_id, now_s)
            waited_s = now_s - terms.arrived_s
            evicted = Evicted(EvictionReason.DEADLINE_PASSED, terms.budget_s, waited_s)
            decided.append((terms.request.job_id, evicted))
        replicas = self._view.usable_prefill(now_s)
        if not replicas:
            return decided
        for terms in self._held.next(now_s, self._free_at_s(replicas, now_s), len(replicas)):
            decode = self._choose_decode(terms.request, terms.tokens, now_s)
            cached = self._view.cached_tokens(terms.request, terms.tokens)
            choice = self._choose(terms, cached, replicas, now_s)
            if decode is not None and not self._can_wait(terms, choice, now_s):
                self._held.remove(terms.request.job_id)
                decided.append((terms.request.job_id, self._bind(terms, cached, choice, decode, now_s)))
        return decided

    def next_look_s(self, now_s: float) -> float:
        """When to ask `due` again if nothing is heard before; infinite for never."""
        if not self._held:
            return math.inf
        ahead_s = self._limits.bind_ahead_s
        frees = [
            replica.backlog_s(now_s) - ahead_s
            for replica in self._view.usable_prefill(now_s)
            if replica.backlog_s(now_s) > ahead_s
        ]
        return min(self._held.next_look_s(now_s), now_s + max(0.001, min(frees, default=ahead_s)))

    def _choose_decode(self, request: PlacementRequested, tokens: int, now_s: float) -> DecodeReplica | None:
        if (decode_replica := request.decode_replica) is not None:
            return self._view.decode.get(decode_replica) or DecodeReplica(decode_replica)
        usable = self._view.usable_decode(now_s)
        return choose_decode(usable, tokens, request.objective.tpot_s, self._link)

    def _terms(
        self,
        request: PlacementRequested,
        tokens: int,
        replicas: Sequence[PrefillReplica],
        decode: DecodeReplica,
        now_s: float,
    ) -> Terms:
        policy = self._policies[request.objective.tier]
        idle = min(replicas, key=lambda replica: replica.predictor.prefill_s(tokens)).predictor
        alone_s = idle.prefill_s(tokens)
        handoff_s = idle.handoff_s + self._way_s(decode, tokens)
        budget_s = request.objective.ttft_budget_s(alone_s)
        arrived_s = now_s - request.elapsed_s
        deadline_s = latest_s = NO_DEADLINE
        if budget_s is not None:
            deadline_s = latest_s = arrived_s + budget_s - handoff_s
            if not policy.sheddable:
                latest_s = NO_DEADLINE
            elif not request.explicit_deadline:
                allowed_s = self._limits.stretch * (alone_s + handoff_s)
                latest_s = arrived_s + max(budget_s, allowed_s) - handoff_s
        return Terms(request, tokens, arrived_s, budget_s, deadline_s, latest_s, policy.weight)

    def _choose(
        self,
        terms: Terms,
        cached: Mapping[ReplicaId, int],
        replicas: Sequence[PrefillReplica],
        now_s: float,
    ) -> Choice:
        prefill = Prefill(terms.tokens, terms.deadline_s, terms.weight, cached)
        return self._placement.choose(prefill, replicas, now_s)

    def _late_s(
        self, terms: Terms, choice: Choice, replicas: Sequence[PrefillReplica], now_s: float
    ) -> float:
        """By how much a request would be later than it may be; 0 when it is accepted."""
        late_s = max(0.0, choice.end_s - terms.latest_s)
        if late_s == 0 and self._held and terms.latest_s < NO_DEADLINE:
            own_s = choice.end_s - choice.start_s
            if self._can_wait(terms, choice, now_s) and not self._held.has_room(
                terms, own_s, now_s, len(replicas)
            ):
                return max(own_s, self._limits.bind_ahead_s)
        return late_s

    def _can_wait(self, terms: Terms, choice: Choice, now_s: float) -> bool:
        """Whether nothing is lost by holding a request back.

        A replica is to know of it when it could start it soon, when it would stop its pass or give somebody
        up for it, and when there is little time to spare.
        """
        ahead_s = self._limits.bind_ahead_s
        if choice.start_s <= now_s + ahead_s:
            return False
        if not choice.is_on_time or terms.deadline_s == NO_DEADLINE:
            return True
        if choice.reason is PlacementReason.LEAST_HARM or terms.deadline_s - choice.end_s < ahead_s:
            return False
        return choice.start_s >= choice.replica.free_at_s(now_s)

    def _bind(
        self,
        terms: Terms,
        cached: Mapping[ReplicaId, int],
        choice: Choice,
        decode: DecodeReplica,
        now_s: float,
    ) -> Placed:
        request, replica, tokens = terms.request, choice.replica, terms.tokens
        cached_tokens = cached.get(replica.replica_id, 0)
        tier = request.objective.tier
        replica.add(PlacedJob(request.job_id, tier, tokens, terms.deadline_s, now_s, cached_tokens), now_s)
        if request.prefix_hashes:
            block_tokens = self._view.block_tokens(request)
            self._view.prefixes.placed(replica.replica_id, request.prefix_hashes, block_tokens)
        decode.placed(tokens)
        handoff_s = replica.predictor.handoff_s + self._way_s(decode, tokens)
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

    def _way_s(self, decode: DecodeReplica, tokens: int) -> float:
        return 0.0 if self._link is None else link_to(decode, self._link).transfer_s(tokens)

    @staticmethod
    def _free_at_s(replicas: Sequence[PrefillReplica], now_s: float) -> float:
        """When the replicas will have done what they have, on average."""
        return now_s + sum(replica.backlog_s(now_s) for replica in replicas) / len(replicas)
