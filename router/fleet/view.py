"""What the router knows of the fleet, from reports and from what it has placed itself.

Owns the views of both tiers and of the prefix caches, and which replicas can be given work. A replica that
was killed says no goodbye: it is noticed by its silence, and earlier by whoever calls it. When all were
silent and one of them reports again, it was rather the router that did not hear. Several routers may work on
one fleet: each counts its own placements at once, and learns of the others' from the replicas' reports, which
name all jobs whoever placed them. A router that starts anew knows the fleet after one report of each replica.
All times are seconds on the router's monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from router.fleet.decode_replica import IN_TRANSIT_S, DecodeView, Newcomer
from router.fleet.held_prefixes import HeldPrefixes
from router.fleet.one_model import with_partner
from router.fleet.prefill_replica import PlacedJob, PrefillView
from router.fleet.prefix_index import PrefixIndex
from router.messages import PlacementRequested
from slo.model_digest import UNTOLD, ModelDigest
from slo.predict.prompt_length import PromptLengthEstimator, PromptLengths
from slo.queue.slack import NO_DEADLINE
from slo.reports import DecodeReported, OutstandingJob, PrefillReported, ReplicaGone
from slo.request import JobId, ReplicaId
from slo.tiers import SYSTEM, Tier

_FORGET_AFTER: Final = 3
"""A replica that has been silent for this many times the limit of staleness is forgotten."""
SILENT_AFTER_S: Final = 1.5
"""`RouterLimits.silent_after_s` of a server by default; replicas report every 0.5 s."""

_UNLEARNED: Final = PromptLengthEstimator()
"""Of a tenant of whom nothing is known yet; never learns."""
_Replica = TypeVar("_Replica", PrefillView, DecodeView)


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """How the router treats what it is told.

    Attributes:
        stale_after_s: A replica that has not reported for this long is not used.
        settle_s: For so long after its start, or after it heard nobody, the router may not have heard of
            every replica.
        in_transit_s: How long a placement may be missing from its replica's reports before it is dropped.
        silent_after_s: One that has not reported for this long is used only if all others have not, either.
        stretch: A budget that the client did not ask for itself is not held against it below this
            multiple of what the request takes on an idle replica.
        local_prefill: Whether decode computes prompts itself when there is no prefill replica.
        max_local_prefills: How many prompts one decode replica may have to compute itself; then only those of
            whom has less than their part of them, up to twice as many.
        local_below_tokens: Longest prompt that decode computes itself where that is cheaper; 0 for none.
        longest: What the model takes, tokens. A prompt that seems to be longer counts as that, several as so
            many times that: it will be refused once its tokens are known, and is no work for anybody. None
            where it is not known.
    """

    stale_after_s: float = 10.0
    settle_s: float = 3.0
    in_transit_s: float = IN_TRANSIT_S
    silent_after_s: float = math.inf
    stretch: float = 2.0
    local_prefill: bool = False
    max_local_prefills: int = 64
    local_below_tokens: int = 0
    longest: int | None = None


def usable(
    replicas: Iterable[_Replica], now_s: float, limits: RouterLimits, failed: Collection[ReplicaId] = ()
) -> list[_Replica]:
    """The replicas that work can be given to, without those that have failed.

    Those that reported lately; if there are none, those that reported at all within the longer limit: when
    everybody seems silent, it is rather the listener that was delayed.
    """
    stale_after_s, silent_after_s = limits.stale_after_s, limits.silent_after_s
    known = [
        one
        for one in replicas
        if not one.draining and now_s - one.reported_at_s < stale_after_s and one.replica_id not in failed
    ]
    return [one for one in known if now_s - one.reported_at_s < silent_after_s] or known


class FleetView:
    """The replicas as they last reported.

    Args:
        weights: Weight of a request on time, by tier.
        limits: How it treats what it is told.
        started_s: When the router was started.

    Attributes:
        listens_since_s: When it was started, or first heard a replica again after it had heard nobody.
        has_had_prefill: Whether there has been a prefill replica, by its own word or by decode's, which alone
            tells of those that were lost before the router was started.
    """

    def __init__(self, weights: dict[Tier, float], limits: RouterLimits, started_s: float) -> None:
        self.prefill: dict[ReplicaId, PrefillView] = {}
        self.decode: dict[ReplicaId, DecodeView] = {}
        self.prefixes = PrefixIndex()
        self.held = HeldPrefixes()
        """Of the prompts of requests on decode."""
        # The most valuable tier stands first; `SYSTEM` is on the level of the lowest.
        clients = [tier for tier in weights if tier != SYSTEM]
        self.ranks = {tier: rank for rank, tier in enumerate(reversed(clients))}
        self.prompt_length = PromptLengthEstimator()
        self._prompt_lengths: dict[str, PromptLengths] = {}
        self._weights = weights
        self._limits = limits
        self.listens_since_s = self._swept_at_s = started_s
        self._heard_s = math.inf
        """When it last heard a replica, infinite before the first."""
        self.has_had_prefill = False

    def prefill_reported(self, event: PrefillReported, now_s: float) -> tuple[float, ...]:
        """Take a replica's word for its work, keeping placements that it cannot have seen yet.

        Returns:
            The relative errors of the prompt lengths that became known, (estimate - actual) / actual.
        """
        replica = self.prefill.get(event.replica_id)
        self._hear(now_s, is_known=replica is not None)
        self.has_had_prefill = True
        if replica is None:
            replica = PrefillView(event.replica_id, event.predictor, now_s, self._weights)
            self.prefill[event.replica_id] = replica
        replica.predictor, replica.unlearned = event.predictor, event.unlearned
        replica.reported_at_s = now_s
        replica.kv_usage = event.kv_usage
        replica.draining = event.draining
        replica.digest = event.digest
        named = {job.job_id for job in event.jobs}
        gone = set(event.ended) - replica.earlier_ended(event.ended) - named
        self._hear_of_prefixes(event, gone)
        jobs = [_reported_job(job, replica.jobs.get(job.job_id), event, now_s) for job in event.jobs]
        in_transit = [
            job
            for job in replica.jobs.values()
            if job.job_id not in named
            and job.job_id not in gone
            and now_s - job.placed_at_s < self._limits.in_transit_s
            and job.job_id not in replica.confirmed
        ]
        for job_id in named - replica.jobs.keys():
            self._turned_up(job_id, replica)
        replica.confirmed = named - replica.placed_again
        replica.preemptible_in_s = event.preemptible_in_s
        replica.replace([*jobs, *in_transit], event.running, now_s - event.running_for_s)
        lengths = [learned for learned in event.learned if learned[1] > 0 and learned[2] > 0]
        return tuple(self._learn(*learned) for learned in lengths)

    def decode_reported(self, event: DecodeReported, now_s: float) -> None:
        """Remember how full and how fast a decode replica is."""
        is_known = event.replica_id in self.decode
        self._hear(now_s, is_known=is_known)
        self.has_had_prefill |= event.has_pulled
        if not is_known:
            self.decode[event.replica_id] = DecodeView(event.replica_id)
        self.decode[event.replica_id].reported(event, now_s, self.ranks)
        if event.kv_tokens:
            self.held.resize(event.replica_id, event.kv_tokens)

    def replica_gone(self, event: ReplicaGone) -> list[JobId]:
        """A replica is gone, and all that it had with it; returns its prefills, those on their way too."""
        prefill = self.prefill.pop(event.replica_id, None)
        self.decode.pop(event.replica_id, None)
        self.prefixes.forget(event.replica_id)
        self.held.forget(event.replica_id)
        return [] if prefill is None else list(prefill.jobs)

    def forget_silent(self, now_s: float) -> list[JobId]:
        """Forget replicas that were killed, as nobody says goodbye for them; returns as `replica_gone`."""
        if now_s - self._swept_at_s < self._limits.stale_after_s:
            return []
        self._swept_at_s = now_s
        limit_s = _FORGET_AFTER * self._limits.stale_after_s
        reported_at_s = [(one.replica_id, one.reported_at_s) for one in self.prefill.values()]
        reported_at_s += [(one.replica_id, one.reported_at_s) for one in self.decode.values()]
        gone = [replica_id for replica_id, at_s in reported_at_s if now_s - at_s > limit_s]
        return [job_id for replica_id in gone for job_id in self.replica_gone(ReplicaGone(replica_id))]

    def named_by(self, replica_id: ReplicaId) -> set[JobId]:
        """The prefills that the last report of a replica named, see `PrefillView.confirmed`."""
        replica = self.prefill.get(replica_id)
        return set() if replica is None else replica.confirmed

    def prefilled_at(self, job_id: JobId) -> list[ReplicaId]:
        """The replicas that have the prefill of a request, or to which it is on its way."""
        return [name for name, replica in self.prefill.items() if job_id in replica.jobs]

    def placed_on_prefill(self, replica: PrefillView, job: PlacedJob, request: PlacementRequested) -> None:
        """A request was sent to a prefill replica, on which it will be computed."""
        replica.add(job)
        hashes, block_tokens = request.prefix_hashes, self.block_tokens(request)
        is_text = request.prompt_tokens is None
        self.prefixes.placed(replica.replica_id, job.job_id, hashes, block_tokens, is_text=is_text)

    def placed_on_decode(
        self, decode: DecodeView, newcomer: Newcomer, request: PlacementRequested, now_s: float
    ) -> None:
        """A request was sent to a decode replica; one that is prefilled once more brings no hashes along."""
        decode.placed(newcomer, now_s)
        self.held.placed(decode.replica_id, request.job_id, request.prefix_hashes, self.block_tokens(request))

    def job_ended(self, job_id: JobId, *, is_answered: bool) -> None:
        """Forget a request that ended before or after its replica knew of it.

        If it `is_answered`, at least in part, its prompt has been computed.
        """
        if is_answered:
            self.prefixes.computed(job_id)
        for decode in self.decode.values():
            decode.job_ended(job_id)
        self.held.ended(job_id)
        self.not_for_prefill(job_id)

    def not_for_prefill(self, job_id: JobId) -> None:
        """Forget the prefill of a request that goes on without it."""
        self.prefixes.withdrawn(job_id)
        for replica in self.prefill.values():
            if replica.remove(job_id) is not None:
                return

    def usable_prefill(self, now_s: float, failed: Collection[ReplicaId] = ()) -> list[PrefillView]:
        """Prefill replicas that work can be given to, without those that failed it before."""
        return usable(self.prefill.values(), now_s, self._limits, failed)

    def usable_decode(self, now_s: float, failed: Collection[ReplicaId] = ()) -> list[DecodeView]:
        """Decode replicas that work can be given to, without those that failed it before."""
        return usable(self.decode.values(), now_s, self._limits, failed)

    def decode_memory(self, replicas: Iterable[DecodeView]) -> float:
        """KV memory that is asked for of decode replicas, what waits for it included, in that of one."""
        asked, to_prefill = [*replicas], set[JobId]()
        if any(replica.waiting for replica in asked):  # there may be tens of thousands
            to_prefill.update(*[replica.jobs for replica in self.prefill.values()])
        return math.fsum(replica.usage_asked(to_prefill) for replica in asked)

    def prefill_with_decode(self, now_s: float) -> list[PrefillView]:
        """Of the usable prefill replicas, those of models that usable decode replicas serve."""
        return with_partner(self.usable_prefill(now_s), self.usable_decode(now_s))

    def digest_of(self, decode_replica: ReplicaId | None) -> ModelDigest:
        """Of the model that a decode replica serves."""
        decode = None if decode_replica is None else self.decode.get(decode_replica)
        return UNTOLD if decode is None else decode.digest

    def tokens(self, request: PlacementRequested) -> int:
        """Length of a request's prompts together, and of what is prefilled of its answer with them.

        It is estimated when they came as text.

        None of them counts for more than the model takes.
        """
        return self._tokens(request, self._prompt_length_of(request))

    def unlearned_tokens(self, request: PlacementRequested) -> int:
        """The same, if its tenant's texts had no more tokens than others' have; no more than by them."""
        return min(self.tokens(request), self._tokens(request, _UNLEARNED))

    def block_tokens(self, request: PlacementRequested) -> float:
        """Tokens that one of a request's prefix hashes stands for, estimated when it came as text."""
        if request.prompt_tokens is not None:
            return request.hash_block
        return request.hash_block / self._prompt_length_of(request).bytes_per_token

    def cached_tokens(self, request: PlacementRequested, tokens: int) -> Mapping[ReplicaId, int]:
        """Of a prompt's tokens, those that each replica is expected to have; one is always computed."""
        return self._leading_tokens(request, tokens, self.prefixes.cached_blocks)

    def held_tokens(self, request: PlacementRequested, tokens: int) -> Mapping[ReplicaId, int]:
        """Of a prompt's tokens, those whose KV requests of each decode replica hold, or will by then."""
        return self._leading_tokens(request, tokens, self.held.held_blocks)

    def _leading_tokens(
        self,
        request: PlacementRequested,
        tokens: int,
        leading_blocks: Callable[[Sequence[int]], Mapping[ReplicaId, int]],
    ) -> Mapping[ReplicaId, int]:
        if not request.prefix_hashes:
            return {}
        block_tokens = self.block_tokens(request)
        found = leading_blocks(request.prefix_hashes)
        return {name: min(tokens - 1, int(count * block_tokens)) for name, count in found.items()}

    def _tokens(self, request: PlacementRequested, estimator: PromptLengthEstimator) -> int:
        tokens = request.prompt_tokens
        if tokens is None:
            tokens = estimator.tokens(request.prompt_bytes)
        tokens += request.answered_tokens
        longest = self._limits.longest
        return tokens if longest is None else min(tokens, longest * request.prompts)

    def _prompt_length_of(self, request: PlacementRequested) -> PromptLengthEstimator:
        """By its tenant's prompts alone: what one sends does not change what another is refused."""
        known = self._prompt_lengths.get(request.tenant)
        return _UNLEARNED if known is None else known.of(request.prompt_bytes)

    def _learn(self, tenant: str, size_bytes: int, tokens: int) -> float:
        """The relative error of the estimate; all tenants' together are what is shown."""
        self.prompt_length.observe(size_bytes, tokens)
        lengths = self._prompt_lengths.setdefault(tenant, PromptLengths())
        return lengths.observe(size_bytes, tokens)

    def _hear(self, now_s: float, *, is_known: bool) -> None:
        """A replica reports; one that is known, after all have been silent, shows that they live."""
        if is_known and now_s - self._heard_s >= self._limits.stale_after_s:
            self.listens_since_s = self._swept_at_s = now_s
        self._heard_s = now_s

    def _turned_up(self, job_id: JobId, where: PrefillView) -> None:
        """A job that was not placed where it is, is not on its way to any other replica."""
        for other in self.prefill.values():
            if other is not where and job_id not in other.confirmed:
                other.remove(job_id)

    def _hear_of_prefixes(self, event: PrefillReported, gone: Collection[JobId]) -> None:
        if not event.caches_prefixes:
            self.prefixes.resize(event.replica_id, 0)
        elif event.kv_tokens:
            self.prefixes.resize(event.replica_id, event.kv_tokens)
        for job_id, cached_tokens in event.hits:
            self.prefixes.started(event.replica_id, job_id, cached_tokens)
        for job_id in event.ended:
            if job_id in gone:
                self.prefixes.ended(event.replica_id, job_id)


def _reported_job(
    job: OutstandingJob, known: PlacedJob | None, event: PrefillReported, now_s: float
) -> PlacedJob:
    """A job as its replica sees it; of the one that runs, all of its pass, what is done included."""
    deadline_s = NO_DEADLINE if job.budget_s is None else now_s + job.budget_s
    placed_at_s = now_s if known is None else known.placed_at_s
    cached_tokens = 0 if known is None else known.cached_tokens
    work_s = job.work_s
    if work_s is not None and job.job_id == event.running:
        work_s += event.running_for_s
    return PlacedJob(job.job_id, job.tier, job.tokens, deadline_s, placed_at_s, cached_tokens, work_s)
