"""The router's decisions, pure: reports and requests in, placements and refusals out.

Owns the order of these decisions and what is counted for each. The view of the fleet is `router.fleet.view`,
the choice of the replica `router.placement.policies` and its peers, what a request is promised
`router.promises`, who is let in although it will be late `router.probes`, which end of a prefill counts
`router.attempts`. Reads no clock (`now_s` is passed in) and sends nothing; the Serve deployment around it is
`router.serve.deployment`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from router.admission import Gate
from router.attempts import Attempts
from router.fleet.decode_replica import DecodeView, Newcomer, choose_decode
from router.fleet.one_model import of_model, with_partner
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
from router.probes import Probes
from router.promises import Inquiry, Promises, Terms
from slo.admission.parts import prompts_excess
from slo.autoscaling.need import DecodeDemand
from slo.decode.headroom import HOLD_S
from slo.errors import Rejected, RejectionReason
from slo.predict.handoff import TransferFit
from slo.reports import PrefillReported, ReplicaGone
from slo.request import JobId
from slo.tiers import Tier, TierPolicy

_MIN_RETRY_S: Final = 1.0
_MAX_RETRY_S: Final = 60.0
"""Who is not taken as decode has too many prompts to compute is told to come back between these."""


class RouterCore:
    """Places requests on replicas.

    Args:
        policies: Objectives and weight of each tier.
        placement: Chooses the prefill replica.
        limits: How it treats what it is told.
        started_s: When it was started, seconds on the clock of all that it is told and asked.
        link: What KV moves over; None where that is part of the handoff.
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
        link: TransferFit | None = None,
        gate: Gate | None = None,
    ) -> None:
        self._limits = limits = limits or RouterLimits()
        weights = {tier: policy.weight for tier, policy in policies.items()}
        self.view = FleetView(weights, limits, started_s)
        self._policies = policies
        self._placement = placement
        self._link = link
        self._gate = gate or Gate()
        self._promises = Promises(policies, limits.stretch)
        self._probes = Probes(self.view, self._promises)
        self._attempts = Attempts(self.view.prefilled_at, limits.in_transit_s)

    def is_ready(self, now_s: float) -> bool:
        """Whether both tiers have a replica that reports."""
        return bool(self.view.usable_prefill(now_s)) and bool(self.view.usable_decode(now_s))

    def serves(self, now_s: float) -> bool:
        """Whether requests are answered: by both tiers or, once prefill is lost, by decode alone."""
        has_prefill = bool(self.view.usable_prefill(now_s))
        may_do_without = self.view.has_had_prefill and self._may_do_without(now_s)
        return bool(self.view.usable_decode(now_s)) and (has_prefill or may_do_without)

    def is_settled(self, now_s: float) -> bool:
        """Whether it has listened for long enough to have heard of all replicas."""
        return now_s - self.view.listens_since_s >= self._limits.settle_s

    # What it is told.

    def prefill_reported(self, event: PrefillReported, now_s: float) -> tuple[float, ...]:
        """See `FleetView.prefill_reported`."""
        self._promises.prefill_reported(event, now_s)
        named = {job.job_id for job in event.jobs}
        known = self.view.named_by(event.replica_id)
        errors = self.view.prefill_reported(event, now_s)
        over = (known | set(event.ended)) - named
        self._gate.served(self._attempts.ended(over, event.replica_id, now_s))
        new = [job for job in event.jobs if job.job_id not in known]
        self._gate.waits(new, event.predictor, self.view.prefill.values(), now_s)
        self._attempts.lost(self.view.forget_silent(now_s), now_s)
        self._gate.served(self._attempts.given_up(now_s))
        return errors

    def replica_gone(self, event: ReplicaGone, now_s: float) -> None:
        """See `FleetView.replica_gone`."""
        self._attempts.lost(self.view.replica_gone(event), now_s)

    def job_ended(self, ended: JobEnded, now_s: float) -> None:
        """Forget a request wherever it is, and learn from it."""
        self._attempts.forget(ended.job_id)
        self._promises.ended(ended)
        self._gate.ended(ended.job_id, now_s, ended.used)
        self.view.job_ended(ended.job_id, is_answered=ended.is_answered)

    def generated(self, job_id: JobId, tokens: int, now_s: float) -> None:
        """See `AdmissionController.generated`."""
        self._gate.generated(job_id, tokens, now_s)

    def not_for_prefill(self, job_id: JobId) -> None:
        """A request goes on without the prefill that was placed: decode computes its prompt."""
        self._attempts.forget(job_id)
        self._promises.forget(job_id)
        self._gate.not_for_prefill(job_id)
        self.view.not_for_prefill(job_id)

    def held_up(self, job_id: JobId) -> None:
        """Something that no other request has to wait for holds a request up before its prefill."""
        self._promises.forget(job_id)

    def reconcile(self, live: LiveJobs, now_s: float) -> None:
        """Forget the requests whose end was not heard of."""
        for job_id in self._gate.reconcile(live, now_s):
            self._attempts.forget(job_id)
            self._promises.forget(job_id)
            self.view.job_ended(job_id, is_answered=False)

    def decode_demand(self, now_s: float) -> DecodeDemand:
        """What there is to decode on the replicas that are used, what is on its way to them included."""
        replicas = self.view.usable_decode(now_s)
        objectives = [policy.tpot_s for policy in self._policies.values() if policy.tpot_s is not None]
        requests = sum(replica.streams_soon for replica in replicas)
        pace = PaceModel.of_all(replica.pace for replica in replicas if replica.has_pace(now_s))
        most = pace.most(min(objectives, default=math.inf))
        return DecodeDemand(
            self.view.decode_memory(replicas),
            requests,
            # Where even one request alone is too slow, more replicas would mend nothing.
            requests / most if most >= 1 else 0.0,
            len(replicas),
        )

    # What it decides.

    def place(self, request: PlacementRequested, now_s: float) -> PlacementDecision:
        """Find a place for a request and count it there, or say why there is none.

        A request that was admitted before and whose replica failed is not asked about shares again; it
        teaches nothing of the way.
        """
        if request.is_admitted:
            self._promises.forget(request.job_id)
        prefill = self._prefill_for(request, now_s)
        newcomer = self._newcomer(request)
        decode = self._choose_decode(request, newcomer, now_s, prefill)
        replicas = prefill if decode is None else of_model(prefill, decode.digest)
        is_local = request.only_decode or not replicas
        if decode is None or not (replicas or request.only_decode or self._may_do_without(now_s)):
            return self._nowhere(request, now_s, lacks_prefill=not replicas)
        cached = self.view.cached_tokens(request, newcomer.tokens)
        inquiry = Inquiry(request, newcomer, cached, replicas, decode, now_s)
        rejected, memory_s = self._gate_refusal(inquiry, prefill), 0.0
        if rejected is None:
            memory_s = self._memory_s(inquiry)
            rejected = self._decode_full(inquiry, memory_s)
        if rejected is not None:  # neither knows what of the request's objectives could be kept
            terms = self._promises.terms(inquiry, memory_s)
            return replace(rejected, unattainable=terms.unattainable_if_refused)
        return self._leave_to_decode(inquiry) if is_local else self._place_on_prefill(inquiry, memory_s)

    def _place_on_prefill(self, inquiry: Inquiry, memory_s: float) -> PlacementDecision:
        """Place a request where it is prefilled in time, or computed by decode where that is cheaper.

        `memory_s` are the seconds until decode has memory for it.
        """
        request, now_s = inquiry.request, inquiry.now_s
        terms = self._promises.terms(inquiry, memory_s)
        weight = self._policies[request.objective.tier].weight
        prefill = NewPrefill(inquiry.tokens, terms.deadline_s, weight, inquiry.cached)
        choice = self._placement.choose(prefill, inquiry.prefill, now_s)
        local_end_s = self._local_end_s(inquiry, choice)
        if local_end_s < math.inf and local_end_s <= terms.latest_s:
            return self._compute_on_decode(inquiry, terms, choice)
        # A first token that prefill samples does not wait for decode's memory.
        wait_s = max(0.0, now_s + memory_s - choice.end_s) if request.decode_samples_first else 0.0
        late_s = max(0.0, min(choice.end_s + wait_s, local_end_s) - terms.latest_s)
        if late_s > 0:
            lacked_decode = choice.end_s <= terms.latest_s
            let_in = self._probes.lets_in(inquiry, choice, memory_s, wait_s)
            if let_in is None:
                return self._too_late(inquiry, terms, late_s, lacked_decode=lacked_decode)
            choice = let_in
        return self._bind(inquiry, terms, choice, wait_s)

    def _too_late(self, inquiry: Inquiry, terms: Terms, late_s: float, *, lacked_decode: bool) -> Rejected:
        """The refusal of a request that would be late by so much, `lacked_decode` if not by its prefill."""
        job_id, now_s = inquiry.request.job_id, inquiry.now_s
        if not inquiry.request.is_admitted:  # otherwise it has been counted, and ends when its end is told
            self._gate.withdrawn(job_id, now_s, lacked_decode=lacked_decode, in_reach=terms.is_in_reach)
        best_s = terms.latest_s - terms.deadline_s + (terms.budget_s or 0.0) + late_s
        reason, retry_s = RejectionReason.DEADLINE_INFEASIBLE, late_s if terms.is_in_reach else None
        unattainable = terms.unattainable_if_refused
        return Rejected(reason, retry_s, best_s, terms.held_to_s, None, unattainable, lacked_decode)

    def _prefill_for(self, request: PlacementRequested, now_s: float) -> list[PrefillView]:
        """The replicas that may prefill a request: those that it avoids only where there are no others."""
        failed, avoided = request.failed_replicas, request.avoided_replicas
        digest = self.view.digest_of(request.decode_replica)
        replicas = of_model(self.view.usable_prefill(now_s, (*failed, *avoided)), digest)
        return replicas or (of_model(self.view.usable_prefill(now_s, failed), digest) if avoided else [])

    def _newcomer(self, request: PlacementRequested) -> Newcomer:
        tier, tokens = request.objective.tier, self.view.tokens(request)
        rank = self.view.ranks.get(tier, 0)
        return Newcomer(
            request.job_id,
            tier,
            tokens,
            request.answers,
            self._promises.most_output(request),
            is_top=rank == len(self.view.ranks) - 1,
            rank=rank,
            held_tokens=self.view.held_tokens(request, tokens),
        )

    def _choose_decode(
        self, request: PlacementRequested, newcomer: Newcomer, now_s: float, prefill: list[PrefillView]
    ) -> DecodeView | None:
        """Where a request decodes; None when there is no replica.

        One whose prompts a `prefill` replica can compute, if there is one; else decode computes them, too.
        """
        if (name := request.decode_replica) is not None:
            return self.view.decode.get(name) or DecodeView(name)
        usable = of_model(self.view.usable_decode(now_s, request.failed_replicas), request.digest)
        served = [] if request.only_decode else with_partner(usable, prefill)
        takes = served or [one for one in usable if self._prompts_excess(request, one) <= 0]
        return choose_decode(takes or usable, newcomer, self._promises.pace_s(request), now_s)

    def _nowhere(self, request: PlacementRequested, now_s: float, *, lacks_prefill: bool) -> Rejected:
        """The refusal of a request for which there is no replica, or none was heard of yet."""
        settled = self.is_settled(now_s)
        if settled and lacks_prefill and not request.is_admitted:
            self._gate.no_replica(now_s)
        reason = RejectionReason.NO_REPLICA if settled else RejectionReason.NOT_SETTLED
        return Rejected(reason, self._limits.stale_after_s, lacked_decode=not lacks_prefill)

    def _may_do_without(self, now_s: float) -> bool:
        """Whether decode may compute prompts for want of a prefill replica."""
        return self._limits.local_prefill and self.is_settled(now_s)

    def _gate_refusal(self, inquiry: Inquiry, prefill: list[PrefillView]) -> Rejected | None:
        """Why a request is not admitted; None when it is, or was before.

        Where it can have only some of the `prefill` replicas, or needs none, others are admitted for them.
        """
        request, replicas, now_s = inquiry.request, inquiry.prefill, inquiry.now_s
        if request.is_admitted:
            return None
        if request.only_decode or 0 < len(replicas) < len(prefill):
            replicas = self.view.prefill_with_decode(now_s)
        tokens, answer_tokens = inquiry.tokens, self._promises.answer_tokens(request)
        return self._gate.refusal(request, tokens, replicas, now_s, inquiry.max_cached, answer_tokens)

    def _memory_s(self, inquiry: Inquiry) -> float:
        """Seconds until decode has memory for a request; 0 where nothing of it depends on that.

        They are asked for last: to find them takes longer than all else where many wait for memory.
        """
        request, newcomer, decode = inquiry.request, inquiry.newcomer, inquiry.decode
        matters = request.decode_samples_first or request.objective.e2e_s is not None
        if not (matters or self._needs_memory(request)) or decode.has_room(newcomer):
            return 0.0
        return decode.wait_s(newcomer, inquiry.now_s)

    def _needs_memory(self, request: PlacementRequested) -> bool:
        """Whether a request is refused for want of decode's memory."""
        return not request.is_admitted and self._policies[request.objective.tier].sheddable

    def _decode_full(self, inquiry: Inquiry, memory_s: float) -> Rejected | None:
        """The refusal of a request for which the best decode replica has no memory in time."""
        request, reason = inquiry.request, RejectionReason.DECODE_FULL
        if not self._needs_memory(request) or memory_s <= HOLD_S:
            return None
        self._gate.withdrawn(request.job_id, inquiry.now_s, lacked_decode=True)
        return Rejected(reason, memory_s, None, request.objective.ttft_s, lacked_decode=True)

    def _prompts_excess(self, request: PlacementRequested, decode: DecodeView) -> float:
        """How many prompts decode has to compute until it takes one of a request; 0 or less for now."""
        most = self._limits.max_local_prefills
        return prompts_excess(decode.local_prefills, request.party, most, self._gate.weight)

    def _leave_to_decode(self, inquiry: Inquiry) -> PlacementDecision:
        """Have decode compute the prompts, unless it has too many to compute.

        What prefill might have computed is not taken either where decode has no memory for it.
        """
        request, decode = inquiry.request, inquiry.decode
        terms = self._promises.terms(replace(inquiry, cached={}), 0.0)
        excess = max(self._prompts_excess(request, decode), 0.0)
        is_full = not request.only_decode and not decode.has_room(inquiry.newcomer)
        if not request.is_admitted and (is_full or excess > 0):
            self._gate.withdrawn(request.job_id, inquiry.now_s)
            retry_s = min(max(_MIN_RETRY_S, max(1.0, excess) * decode.local_prompt_s), _MAX_RETRY_S)
            ttft_s, missed = request.objective.ttft_s, terms.unattainable_if_refused
            return Rejected(RejectionReason.BACKLOG, retry_s, ttft_budget_s=ttft_s, unattainable=missed)
        reason = PlacementReason.ONLY_DECODE if request.only_decode else PlacementReason.NO_PREFILL_REPLICA
        return self._bind_to_decode(inquiry, terms, reason, None)

    def _local_end_s(self, inquiry: Inquiry, choice: Choice) -> float:
        """When decode would have computed a prompt that the prefill tier could: a short one that is new.

        Infinite where it may not, or where the prefill tier delays it less.
        """
        request, tokens, decode = inquiry.request, inquiry.tokens, inquiry.decode
        may = tokens <= self._limits.local_below_tokens and not request.is_admitted
        may = may and decode.has_room(inquiry.newcomer) and self._prompts_excess(request, decode) <= 0
        if may and is_cheaper_on_decode(tokens, choice, decode, inquiry.now_s, self._link):
            return inquiry.now_s + choice.replica.predictor.prefill_s(tokens)
        return math.inf

    def _compute_on_decode(self, inquiry: Inquiry, terms: Terms, choice: Choice) -> Placed:
        """Have decode compute a prompt that the prefill tier would delay more, as fast as a replica there."""
        predictor = choice.replica.predictor
        way_s = self._promises.path_s(inquiry.request, predictor.handoff_s)
        predicted_s = inquiry.now_s - terms.arrived_s + predictor.prefill_s(inquiry.tokens) + way_s
        return self._bind_to_decode(inquiry, terms, PlacementReason.CHEAPER_ON_DECODE, predicted_s)

    def _bind_to_decode(
        self, inquiry: Inquiry, terms: Terms, reason: PlacementReason, predicted_s: float | None
    ) -> Placed:
        """Count a request on decode alone; the prefill tier, for which it was admitted, has no part in it.

        `predicted_s` is its time to first token; None when nobody knows.
        """
        request, decode = inquiry.request, inquiry.decode
        self._gate.not_for_prefill(request.job_id)
        self.view.placed_on_decode(decode, inquiry.newcomer, request, inquiry.now_s)
        decode.local_prefills[request.party] += request.answers
        return Placed(
            prefill_replica=None,
            decode_replica=decode.replica_id,
            tokens=inquiry.tokens,
            ttft_budget_s=terms.budget_s,
            predicted_ttft_s=predicted_s,
            slack_s=terms.slack_s(predicted_s or 0.0),
            handoff_s=0.0,
            reason=reason,
            promised_ttft_s=terms.promised_s,
            unattainable=terms.unattainable,
        )

    def _bind(self, inquiry: Inquiry, terms: Terms, choice: Choice, wait_s: float) -> Placed:
        """Count a request on the replicas chosen; its first token waits for memory there for `wait_s`."""
        request, replica, tokens, now_s = inquiry.request, choice.replica, inquiry.tokens, inquiry.now_s
        cached_tokens = inquiry.cached.get(replica.replica_id, 0)
        without_s = choice.end_s + wait_s - terms.arrived_s
        self._promises.placed(inquiry, choice, wait_s)
        if request.is_admitted:
            self._attempts.placed_again(request.job_id, replica.replica_id)
        tier = request.objective.tier
        placed = PlacedJob(request.job_id, tier, tokens, terms.deadline_s, now_s, cached_tokens)
        self.view.placed_on_prefill(replica, placed, request)
        self.view.placed_on_decode(inquiry.decode, inquiry.newcomer, request, now_s)
        handoff_s = replica.predictor.handoff_s
        predicted_s = without_s + self._promises.path_s(request, handoff_s)
        return Placed(
            prefill_replica=replica.replica_id,
            decode_replica=inquiry.decode.replica_id,
            tokens=tokens,
            ttft_budget_s=terms.budget_s,
            predicted_ttft_s=predicted_s,
            slack_s=terms.slack_s(predicted_s),
            handoff_s=handoff_s,
            reason=choice.reason,
            cached_tokens=cached_tokens,
            promised_ttft_s=terms.promised_s,
            decode_wait_s=wait_s,
            unattainable=terms.unattainable,
        )
