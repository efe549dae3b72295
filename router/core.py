"""The router's decisions, pure: reports and requests in, placements and refusals out.

Owns admission and what a request is promised. The view of the fleet is `router.fleet.view`, the choice of the
replica `router.placement.policies` and its peers, which end of a prefill counts `router.attempts`. Reads no
clock (`now_s` is passed in) and sends nothing; the Serve deployment around it is `router.serve.deployment`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from router.admission import Gate
from router.attempts import Attempts
from router.fleet.decode_replica import DecodeView, KvLink, Newcomer, choose_decode
from router.fleet.pace_model import PaceModel
from router.fleet.prefill_replica import PlacedJob, PrefillView
from router.fleet.view import FleetView, RouterLimits
from router.messages import (
    JobEnded,
    LiveJobs,
    Placed,
    PlacementDecision,
    PlacementReason,
    PlacementRequested,
)
from router.placement.local_prefill import is_cheaper_on_decode
from router.placement.policies import Choice, NewPrefill, PlacementPolicy
from slo.admission.parts import prompts_excess
from slo.autoscaling.need import DecodeDemand
from slo.decode.headroom import HOLD_S
from slo.decode.output_length import FIRST_GUESS, OutputLengths
from slo.errors import Rejected, RejectionReason
from slo.objectives import Alone
from slo.predict.path_time import PathTime
from slo.predict.prefill_time import PrefillPredictor
from slo.queue.slack import NO_DEADLINE
from slo.reports import PrefillReported, ReplicaGone
from slo.request import JobId, ReplicaId
from slo.tiers import ObjectiveName, Tier, TierPolicy

_MIN_RETRY_S: Final = 1.0
_MAX_RETRY_S: Final = 60.0
"""Who is not taken as decode has too many prompts to compute is told to come back between these."""
_PROBE_EVERY_S: Final = 5.0
"""So often a request of a tenant is let in that only what has been learned says will be late."""


@dataclass(frozen=True, slots=True)
class _Terms:
    """What a request is promised.

    Attributes:
        budget_s: For its first token, from arrival; None for no deadline.
        promised_s: What it was promised for that; None for nothing.
        deadline_s: When its prefill must end, infinite for never.
        latest_s: When its prefill must end lest it be rejected; infinite when it never is.
        unattainable: See `Placed`.
    """

    arrived_s: float
    budget_s: float | None
    promised_s: float | None
    deadline_s: float
    latest_s: float
    unattainable: tuple[ObjectiveName, ...]


class RouterCore:
    """Places requests on replicas.

    Args:
        policies: Objectives and weight of each tier.
        link: What KV moves over; None leaves transfers out of the choice of the decode replica.
        gate: Admits or rejects requests before they are placed; by default it admits all.

    Attributes:
        view: What it knows of the fleet.
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
        self.view = FleetView(weights, limits, started_s)
        self._policies = policies
        self._placement = placement
        self._started_s = started_s
        self._has_had_prefill = False
        self._link = link
        self._gate = gate or Gate()
        self._path = PathTime()
        self._path_by_decode = PathTime()
        """Of requests whose first token decode samples."""
        self._answers = OutputLengths()
        self._probed_s: dict[str, float] = {}
        """When a request of a tenant was last let in to learn from."""
        self._attempts = Attempts(self.view.is_to_prefill, limits.in_transit_s)

    def is_ready(self, now_s: float) -> bool:
        """Whether both tiers have a replica that reports."""
        return bool(self.view.usable_prefill(now_s)) and bool(self.view.usable_decode(now_s))

    def serves(self, now_s: float) -> bool:
        """Whether requests are answered: by both tiers or, once prefill is lost, by decode alone."""
        has_prefill = bool(self.view.usable_prefill(now_s))
        may_do_without = self._has_had_prefill and self._may_do_without(now_s)
        return bool(self.view.usable_decode(now_s)) and (has_prefill or may_do_without)

    # What it is told.

    def prefill_reported(self, event: PrefillReported, now_s: float) -> tuple[float, ...]:
        """See `FleetView.prefill_reported`."""
        self._attempts.lost(self.view.forget_silent(now_s), now_s)
        self._gate.served(self._attempts.given_up(now_s))
        self._has_had_prefill = True
        named = {job.job_id for job in event.jobs}
        known = self.view.named_by(event.replica_id)
        errors = self.view.prefill_reported(event, now_s)
        over = (known | set(event.ended)) - named
        self._gate.served(self._attempts.ended(over, event.replica_id, now_s))
        new = [job for job in event.jobs if job.job_id not in known]
        self._gate.waits(new, event.predictor, self.view.prefill.values(), now_s)
        return errors

    def replica_gone(self, event: ReplicaGone, now_s: float) -> None:
        """See `FleetView.replica_gone`."""
        self._attempts.lost(self.view.replica_gone(event), now_s)

    def job_ended(self, ended: JobEnded, now_s: float) -> None:
        """Forget a request wherever it is, and learn from it."""
        self._forget_attempts(ended.job_id, ended.ttft_s)
        self._gate.ended(ended.job_id, now_s, ended.used)
        self.view.job_ended(ended.job_id)
        if (answered := ended.answered) is not None:
            self._answers.ended(answered.tier, answered.tenant, answered.tokens)

    def generated(self, job_id: JobId, tokens: int, now_s: float) -> None:
        """See `AdmissionController.generated`."""
        self._gate.generated(job_id, tokens, now_s)

    def not_for_prefill(self, job_id: JobId) -> None:
        """A request goes on without the prefill that was placed: decode computes its prompt."""
        self._forget_attempts(job_id, None)
        self._gate.not_for_prefill(job_id)
        self.view.not_for_prefill(job_id)

    def reconcile(self, live: LiveJobs, now_s: float) -> None:
        """Forget the requests whose end was not heard of."""
        for job_id in self._gate.reconcile(live, now_s):
            self._forget_attempts(job_id, None)
            self.view.job_ended(job_id)

    def decode_demand(self, now_s: float) -> DecodeDemand:
        """What there is to decode on the replicas that are used, what is on its way to them included."""
        replicas = self.view.usable_decode(now_s)
        objectives = [policy.tpot_s for policy in self._policies.values() if policy.tpot_s is not None]
        requests = sum(replica.streams_soon for replica in replicas)
        pace = PaceModel.of_all(replica.pace for replica in replicas)
        most = pace.most(min(objectives, default=math.inf))
        return DecodeDemand(
            math.fsum(replica.usage_soon for replica in replicas),
            requests,
            # Where even one request alone is too slow, more replicas would mend nothing.
            requests / most if most >= 1 else 0.0,
            len(replicas),
        )

    # What it decides.

    def place(self, request: PlacementRequested, now_s: float) -> PlacementDecision:
        """Find a place for a request and count it there, or say why there is none.

        A request that was admitted before and whose replica failed is not asked about shares again.
        """
        replicas = self._prefill_for(request, now_s)
        tokens = self.view.tokens(request)
        newcomer = self._newcomer(request, tokens)
        is_local = request.only_decode or not replicas
        decode = self._choose_decode(request, newcomer, now_s, is_local=is_local)
        if decode is None or not (replicas or request.only_decode or self._may_do_without(now_s)):
            settled = self._is_settled(now_s)
            if settled and not replicas and not request.is_admitted:
                self._gate.no_replica(now_s)
            reason = RejectionReason.NO_REPLICA if settled else RejectionReason.NOT_SETTLED
            return Rejected(reason, self._limits.stale_after_s, None, None)
        cached = self.view.cached_tokens(request, tokens)
        rejected, memory_s = self._gate_refusal(request, tokens, cached, replicas, now_s), 0.0
        if rejected is None:
            memory_s = self._memory_s(request, newcomer, decode, now_s)
            rejected = self._decode_full(request, memory_s, now_s)
        if rejected is not None:
            return self._refused(rejected, request, tokens, cached, replicas, decode)
        if is_local:
            return self._leave_to_decode(request, newcomer, replicas, decode, now_s)
        terms = self._terms(request, tokens, cached, replicas, decode, memory_s, now_s)
        weight = self._policies[request.objective.tier].weight
        prefill = NewPrefill(tokens, terms.deadline_s, weight, cached)
        choice = self._placement.choose(prefill, replicas, now_s)
        local_end_s = self._local_end_s(request, newcomer, choice, decode, now_s)
        if local_end_s < math.inf and local_end_s <= terms.latest_s:
            return self._compute_on_decode(request, prefill, newcomer, terms, choice, decode, now_s)
        # A first token that prefill samples does not wait for decode's memory.
        wait_s = max(0.0, now_s + memory_s - choice.end_s) if request.decode_samples_first else 0.0
        late_s = max(0.0, min(choice.end_s + wait_s, local_end_s) - terms.latest_s)
        if late_s > 0 and not self._is_probe(request, choice, decode, memory_s, wait_s, now_s):
            if not request.is_admitted:  # otherwise it has been counted, and ends when its end is told
                self._gate.withdrawn(request.job_id, now_s, lacked_decode=choice.end_s <= terms.latest_s)
            best_s = terms.latest_s - terms.deadline_s + (terms.budget_s or 0.0) + late_s
            reason, unattainable = RejectionReason.DEADLINE_INFEASIBLE, terms.unattainable
            return Rejected(reason, late_s, best_s, terms.budget_s, unattainable=unattainable)
        placed = self._bind(request, prefill, terms, choice, decode, wait_s, now_s)
        self.view.placed_on_decode(decode, newcomer, request, now_s)
        return placed

    def _prefill_for(self, request: PlacementRequested, now_s: float) -> list[PrefillView]:
        """The replicas that may prefill a request: those that it avoids only where there are no others."""
        failed, avoided = request.failed_replicas, request.avoided_replicas
        replicas = self.view.usable_prefill(now_s, (*failed, *avoided))
        return replicas or (self.view.usable_prefill(now_s, failed) if avoided else [])

    def _newcomer(self, request: PlacementRequested, tokens: int) -> Newcomer:
        tier = request.objective.tier
        rank = self.view.ranks.get(tier, 0)
        return Newcomer(
            request.job_id,
            tier,
            tokens,
            request.answers,
            request.output_tokens,
            is_top=rank == len(self.view.ranks) - 1,
            rank=rank,
            held_tokens=self.view.held_tokens(request, tokens),
        )

    def _gate_refusal(
        self,
        request: PlacementRequested,
        tokens: int,
        cached: Mapping[ReplicaId, int],
        replicas: Sequence[PrefillView],
        now_s: float,
    ) -> Rejected | None:
        """Why a request is not admitted; None when it is, or was before."""
        if request.is_admitted:
            return None
        return self._gate.refusal(request, tokens, replicas, now_s, _max_cached(cached, replicas))

    def _memory_s(
        self, request: PlacementRequested, newcomer: Newcomer, decode: DecodeView, now_s: float
    ) -> float:
        """Seconds until decode has memory for a request; 0 where nothing of it depends on that.

        They are asked for last: to find them takes longer than all else where many wait for memory.
        """
        matters = request.decode_samples_first or request.objective.e2e_s is not None
        if not (matters or self._needs_memory(request)) or decode.has_room(newcomer):
            return 0.0
        return decode.wait_s(newcomer, now_s)

    def _needs_memory(self, request: PlacementRequested) -> bool:
        """Whether a request is refused for want of decode's memory."""
        return not request.is_admitted and self._policies[request.objective.tier].sheddable

    def _decode_full(self, request: PlacementRequested, memory_s: float, now_s: float) -> Rejected | None:
        """The refusal of a request for which the best decode replica has no memory in time."""
        if not self._needs_memory(request) or memory_s <= HOLD_S:
            return None
        self._gate.withdrawn(request.job_id, now_s, lacked_decode=True)
        return Rejected(RejectionReason.DECODE_FULL, memory_s, None, request.objective.ttft_s)

    def _refused(
        self,
        rejected: Rejected,
        request: PlacementRequested,
        tokens: int,
        cached: Mapping[ReplicaId, int],
        replicas: Sequence[PrefillView],
        decode: DecodeView,
    ) -> Rejected:
        """A refusal by the gate, which does not know what of the request's objectives could be kept."""
        if not replicas:
            return rejected
        *_, unattainable = self._idle(request, tokens, cached, replicas, decode)
        return replace(rejected, unattainable=unattainable)

    def _may_do_without(self, now_s: float) -> bool:
        """Whether decode may compute prompts for want of a prefill replica."""
        return self._limits.local_prefill and self._is_settled(now_s)

    def _is_settled(self, now_s: float) -> bool:
        return now_s - self._started_s >= self._limits.settle_s

    def _leave_to_decode(
        self,
        request: PlacementRequested,
        newcomer: Newcomer,
        replicas: Sequence[PrefillView],
        decode: DecodeView,
        now_s: float,
    ) -> PlacementDecision:
        """Have decode compute the prompts, unless it has too many to compute.

        What prefill might have computed is not taken either where decode has no memory for it.
        """
        excess = max(self._prompts_excess(request, decode), 0.0)
        is_full = not request.only_decode and not decode.has_room(newcomer)
        if not request.is_admitted and (is_full or excess > 0):
            self._gate.withdrawn(request.job_id, now_s)
            retry_s = max(1.0, excess) * decode.local_prompt_s
            retry_s = min(max(_MIN_RETRY_S, retry_s), _MAX_RETRY_S)
            return Rejected(RejectionReason.BACKLOG, retry_s, None, request.objective.ttft_s)
        self._gate.not_for_prefill(request.job_id)
        tokens, reason = newcomer.tokens, PlacementReason.NO_PREFILL_REPLICA
        budget_s, promised_s = request.objective.known_ttft_budget_s, request.objective.ttft_s
        unattainable: tuple[ObjectiveName, ...] = ()
        if request.only_decode:
            reason = PlacementReason.ONLY_DECODE
            if replicas:
                terms = self._terms(request, tokens, {}, replicas, decode, 0.0, now_s)
                budget_s, promised_s, unattainable = terms.budget_s, terms.promised_s, terms.unattainable
        self.view.placed_on_decode(decode, newcomer, request, now_s)
        decode.local_prefills[request.party] += request.answers
        return Placed(
            prefill_replica=None,
            decode_replica=decode.replica_id,
            tokens=newcomer.tokens,
            ttft_budget_s=budget_s,
            predicted_ttft_s=None,
            slack_s=math.inf if budget_s is None else budget_s,
            handoff_s=0.0,
            reason=reason,
            promised_ttft_s=promised_s,
            unattainable=unattainable,
        )

    def _prompts_excess(self, request: PlacementRequested, decode: DecodeView) -> float:
        """How many prompts decode has to compute until it takes one of a request; 0 or less for now."""
        most = self._limits.max_local_prefills
        return prompts_excess(decode.local_prefills, request.party, most, self._gate.weight)

    def _local_end_s(
        self,
        request: PlacementRequested,
        newcomer: Newcomer,
        choice: Choice,
        decode: DecodeView,
        now_s: float,
    ) -> float:
        """When decode would have computed a prompt that the prefill tier could: a short one that is new.

        Infinite where it may not, or where the prefill tier delays it less.
        """
        tokens = newcomer.tokens
        may = tokens <= self._limits.local_below_tokens and not request.is_admitted
        may = may and decode.has_room(newcomer) and self._prompts_excess(request, decode) <= 0
        if may and is_cheaper_on_decode(tokens, choice, decode, now_s, self._link):
            return now_s + choice.replica.predictor.prefill_s(tokens)
        return math.inf

    def _compute_on_decode(
        self,
        request: PlacementRequested,
        prefill: NewPrefill,
        newcomer: Newcomer,
        terms: _Terms,
        choice: Choice,
        decode: DecodeView,
        now_s: float,
    ) -> Placed:
        """Have decode compute a prompt; the prefill tier, for which the request was admitted, has no part."""
        self._gate.not_for_prefill(request.job_id)
        self.view.placed_on_decode(decode, newcomer, request, now_s)
        decode.local_prefills[request.party] += 1
        predictor = choice.replica.predictor
        way_s = self._path_of(request).seconds(predictor.handoff_s)
        predicted_s = now_s - terms.arrived_s + predictor.prefill_s(prefill.tokens) + way_s
        return Placed(
            prefill_replica=None,
            decode_replica=decode.replica_id,
            tokens=prefill.tokens,
            ttft_budget_s=terms.budget_s,
            predicted_ttft_s=predicted_s,
            slack_s=math.inf if terms.budget_s is None else terms.budget_s - predicted_s,
            handoff_s=0.0,
            reason=PlacementReason.CHEAPER_ON_DECODE,
            promised_ttft_s=terms.promised_s,
            unattainable=terms.unattainable,
        )

    def _choose_decode(
        self, request: PlacementRequested, newcomer: Newcomer, now_s: float, *, is_local: bool
    ) -> DecodeView | None:
        """Where a request decodes; None when there is no replica.

        `is_local` says that decode computes its prompts, too.
        """
        if (decode_replica := request.decode_replica) is not None:
            return self.view.decode.get(decode_replica) or DecodeView(decode_replica)
        usable = self.view.usable_decode(now_s, request.failed_replicas)
        if is_local:  # one that takes it, if there is one
            usable = [one for one in usable if self._prompts_excess(request, one) <= 0] or usable
        return choose_decode(usable, newcomer, self._pace_s(request), self._link)

    def _pace_s(self, request: PlacementRequested) -> float | None:
        """The time per output token that a request's objectives leave; None for any."""
        objective = request.objective
        if objective.e2e_s is None:
            return objective.tpot_s
        left_s = objective.e2e_s / max(1, self._answer_tokens(request))
        return left_s if objective.tpot_s is None else min(objective.tpot_s, left_s)

    def _terms(
        self,
        request: PlacementRequested,
        tokens: int,
        cached: Mapping[ReplicaId, int],
        replicas: Sequence[PrefillView],
        decode: DecodeView,
        memory_s: float,
        now_s: float,
    ) -> _Terms:
        idle, alone_s, unattainable = self._idle(request, tokens, cached, replicas, decode)
        path_s = self._path_of(request).seconds(idle.handoff_s)
        promised_s = request.objective.promised_ttft_s(alone_s)
        # What is left of the wait for decode's memory comes after a first token that prefill samples.
        wait_s = 0.0 if request.decode_samples_first else max(0.0, memory_s - alone_s)
        budget_s = request.objective.ttft_budget_s(alone_s, self._rest_s(request, decode, wait_s))
        arrived_s = now_s - request.elapsed_s
        if budget_s is None:
            return _Terms(arrived_s, None, None, NO_DEADLINE, NO_DEADLINE, unattainable)
        deadline_s = latest_s = arrived_s + budget_s - path_s
        if request.however_late or not self._policies[request.objective.tier].sheddable:
            latest_s = NO_DEADLINE
        elif not request.explicit_deadline:
            allowed_s = self._limits.stretch * (alone_s + path_s)
            latest_s = arrived_s + max(budget_s, allowed_s) - path_s
        return _Terms(arrived_s, budget_s, promised_s, deadline_s, latest_s, unattainable)

    def _idle(
        self,
        request: PlacementRequested,
        tokens: int,
        cached: Mapping[ReplicaId, int],
        replicas: Sequence[PrefillView],
        decode: DecodeView,
    ) -> tuple[PrefillPredictor, float, tuple[ObjectiveName, ...]]:
        """The fastest predictor, the seconds of prefill by it, and what a request misses on an idle fleet."""
        idle = min(replicas, key=lambda replica: replica.predictor.prefill_s(tokens)).predictor
        first_s = prefill_s = request.prompts * idle.prefill_s(tokens // request.prompts)
        for one in replicas if cached else ():
            if (there := cached.get(one.replica_id, 0)) > 0:
                first_s = min(first_s, one.predictor.prefill_s(tokens - there, there))
        ttft_s = first_s + self._path_of(request).least_s(idle.handoff_s)
        tpot_s = decode.pace.alone_s
        e2e_s = ttft_s + tpot_s * max(0, self._answer_tokens(request) - 1)
        return idle, prefill_s, request.objective.out_of_reach(Alone(prefill_s, ttft_s, tpot_s, e2e_s))

    def _is_probe(
        self,
        request: PlacementRequested,
        choice: Choice,
        decode: DecodeView,
        memory_s: float,
        wait_s: float,
        now_s: float,
    ) -> bool:
        """Whether a request is let in that is late by nothing but what has been learned; then it counts.

        What is refused teaches nothing: one slow first token, or a few texts of unusually many tokens, would
        have all others refused for good.
        """
        probed_s = self._probed_s.get(request.tenant, -math.inf)
        if now_s - probed_s < _PROBE_EVERY_S or not _tells_the_way(request, choice, wait_s):
            return False
        predictor = choice.replica.predictor
        handoff_s = predictor.handoff_s
        tokens = self.view.unlearned_tokens(request)
        terms = self._terms(request, tokens, {}, (choice.replica,), decode, memory_s, now_s)
        latest_s = terms.latest_s + max(0.0, self._path_of(request).seconds(handoff_s) - handoff_s)
        if min(choice.end_s, now_s + predictor.prefill_s(tokens)) > latest_s:
            return False
        self._probed_s[request.tenant] = now_s
        return True

    def _path_of(self, request: PlacementRequested) -> PathTime:
        return self._path_by_decode if request.decode_samples_first else self._path

    def _forget_attempts(self, job_id: JobId, ttft_s: float | None) -> None:
        self._attempts.forget(job_id)
        for path in (self._path, self._path_by_decode):
            path.ended(job_id, ttft_s)

    def _rest_s(self, request: PlacementRequested, decode: DecodeView, wait_s: float) -> float:
        """Predicted seconds from the first token of an answer to its last; 0 when nobody asks.

        `wait_s` of them pass before the second token.
        """
        objective = request.objective
        if objective.e2e_s is None:
            return 0.0
        rank = self.view.ranks.get(objective.tier, 0)
        pace_s = decode.pace.tpot_s(decode.streams_with(rank) + 1)
        if pace_s is None:
            pace_s = objective.tpot_s or 0.0
        return wait_s + pace_s * max(0, self._answer_tokens(request) - 1)

    def _answer_tokens(self, request: PlacementRequested) -> int:
        """How many tokens one of its answers is expected to have."""
        most = request.output_tokens // request.answers or FIRST_GUESS
        return self._answers.whole(request.objective.tier, request.tenant, most)

    def _bind(
        self,
        request: PlacementRequested,
        prefill: NewPrefill,
        terms: _Terms,
        choice: Choice,
        decode: DecodeView,
        wait_s: float,
        now_s: float,
    ) -> Placed:
        """Count a request on the replicas chosen."""
        replica, tokens = choice.replica, prefill.tokens
        cached_tokens = prefill.cached_tokens.get(replica.replica_id, 0)
        tier = request.objective.tier
        without_s = choice.end_s + wait_s - terms.arrived_s
        path = self._path_of(request)
        if _tells_the_way(request, choice, wait_s):
            path.placed(request.job_id, without_s)
        if request.is_admitted:
            self._attempts.placed_again(request.job_id, replica.replica_id)
        replica.add(PlacedJob(request.job_id, tier, tokens, terms.deadline_s, now_s, cached_tokens))
        if request.prefix_hashes:
            block_tokens = self.view.block_tokens(request)
            self.view.prefixes.placed(replica.replica_id, request.prefix_hashes, block_tokens)
        handoff_s = replica.predictor.handoff_s
        predicted_s = without_s + path.seconds(handoff_s)
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
            promised_ttft_s=terms.promised_s,
            decode_wait_s=wait_s,
            unattainable=terms.unattainable,
        )


def _tells_the_way(request: PlacementRequested, choice: Choice, wait_s: float) -> bool:
    """Whether nothing holds a request up, so that its first token will say how long the way takes."""
    return not choice.replica.jobs and wait_s == 0 and not request.is_admitted


def _max_cached(cached: Mapping[ReplicaId, int], replicas: Sequence[PrefillView]) -> int:
    """The most that one of the replicas has cached; of others that are known nothing counts."""
    return max((cached.get(one.replica_id, 0) for one in replicas), default=0) if cached else 0
