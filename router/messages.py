"""What the router is asked and what it answers.

Values alone; `router.core` decides.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

from slo.admission.tenant_limits import KeyLimit, TenantLimit, Usage
from slo.admission.tenants import ANONYMOUS
from slo.errors import Rejected
from slo.model_digest import UNTOLD, ModelDigest
from slo.objectives import Objective
from slo.protocol import Message
from slo.replacement import FailureCause, ReplacementRequested
from slo.request import JobId, Party, ReplicaId
from slo.tiers import ObjectiveName, Tier


@dataclass(frozen=True, slots=True)
class PlacementRequested(Message):
    """A request asks for a place.

    Attributes:
        explicit_deadline: Whether the client itself named the budget for the first token.
        prompt_tokens: Exact length when the prompt came as tokens, else None.
        prompt_bytes: Size of the text otherwise.
        elapsed_s: What it has already spent of its budget.
        prefix_hashes: Of the prompt's leading blocks, each standing for all of the prompt up to its end.
        hash_block: Size of a block: tokens when `prompt_tokens` is known, else bytes; 0 without hashes.
        failed_replicas: Replicas that failed the request; it is not placed there again.
        lost_replica: The one of them that nobody can use until it reports again; None for none.
        decode_replica: Where it decodes already; None leaves that open.
        is_admitted: Whether it was admitted before; it is not asked about shares again.
        however_late: Whether it is placed even if it will be late.
        asker: Who asks, and tells with `LiveJobs` which of its requests live; empty for one who does not.
        number: Its place among the requests of that asker.
        limit: Of its tenant; None for none or one that is known.
        answers_per_prompt: Its `n`.
        output_tokens: The most that all its answers may have together.
        key_limit: Of the key that it came with; None for none.
        decode_samples_first: Whether decode samples its first token, and not prefill.
        prompts: How many it has.
        only_decode: Whether only decode can compute them, so that they are no work of the prefill tier.
        avoided_replicas: Prefill replicas that it is placed on only if there is no other.
        answered_tokens: Tokens of its answer that are prefilled with its prompt, as it goes on after a loss.
        explicit_e2e_s: The client's own budget for the whole answer, seconds from arrival; None for none.
        digest: Of the model that has generated what is delivered of its answer; only that goes on with it.
        prompt_hash: Of the whole prompt, as far as one is hashed; 0 where none is.
    """

    job_id: JobId
    objective: Objective
    explicit_deadline: bool
    prompt_tokens: int | None
    prompt_bytes: int
    elapsed_s: float = 0.0
    prefix_hashes: tuple[int, ...] = ()
    hash_block: int = 0
    tenant: str = ANONYMOUS.name
    failed_replicas: tuple[ReplicaId, ...] = ()
    decode_replica: ReplicaId | None = None
    is_admitted: bool = False
    however_late: bool = False
    lost_replica: ReplicaId | None = None
    asker: str = ""
    number: int = 0
    limit: TenantLimit | None = None
    answers_per_prompt: int = 1
    output_tokens: int = 0
    key_limit: KeyLimit | None = None
    decode_samples_first: bool = False
    prompts: int = 1
    only_decode: bool = False
    avoided_replicas: tuple[ReplicaId, ...] = ()
    answered_tokens: int = 0
    explicit_e2e_s: float | None = None
    digest: ModelDigest = UNTOLD
    prompt_hash: int = 0

    @property
    def party(self) -> Party:
        """Whose it is."""
        return Party(self.tenant, self.objective.tier)

    @property
    def likeness(self) -> Hashable:
        """See `AdmissionRequest.likeness`."""
        sizes = self.prompt_tokens, self.prompt_bytes, self.output_tokens
        return self.party, sizes, self.prompt_hash

    @property
    def answers(self) -> int:
        """How many answers it has in all."""
        return self.prompts * self.answers_per_prompt

    @property
    def counts_tokens(self) -> bool:
        """Whether somebody wants to know what it takes in the end."""
        limits = (self.limit, None if self.key_limit is None else self.key_limit.limit)
        return any(limit is not None and limit.counts_tokens for limit in limits)

    @classmethod
    def again(cls, request: ReplacementRequested) -> PlacementRequested:
        """A failed prefill with what is left of its budget, bound to its decode replica.

        One that decode has lost the KV of has begun to answer: it is not refused for being late.
        """
        return cls(
            job_id=request.job_id,
            objective=Objective(request.tier, request.ttft_budget_s, None),
            explicit_deadline=request.explicit_deadline,
            prompt_tokens=request.tokens,
            prompt_bytes=0,
            failed_replicas=request.failed_replicas,
            decode_replica=request.decode_replica,
            is_admitted=True,
            however_late=request.cause is FailureCause.LEFT,
            lost_replica=request.lost_replica,
            avoided_replicas=request.avoided_replicas,
            explicit_e2e_s=request.explicit_e2e_s,
        )


@dataclass(frozen=True, slots=True)
class JobEnded(Message):
    """A request is over, or its client is gone.

    Attributes:
        ttft_s: Its measured time to first token; None when there was none.
        used: What it took of its tenant's tokens; None when its ingress does not know.
        answered: How long its answer became; None when it did not end by itself.
    """

    job_id: JobId
    ttft_s: float | None = None
    used: Usage | None = None
    answered: Answered | None = None

    @property
    def is_answered(self) -> bool:
        """Whether anything of an answer came."""
        return self.ttft_s is not None or self.answered is not None


@dataclass(frozen=True, slots=True)
class Answered:
    """How long an answer became.

    Attributes:
        tokens: Of one answer, where there are several their mean.
    """

    tier: Tier
    tenant: str
    tokens: int


@dataclass(frozen=True, slots=True)
class LiveJobs(Message):
    """Which requests of an asker have not ended; of all others the router has missed the end.

    Attributes:
        asked: How many requests it had asked for when it said so.
        ended: Ends that the router may have missed, as they were told to it in vain.
    """

    asker: str
    asked: int
    jobs: tuple[JobId, ...]
    ended: tuple[JobEnded, ...] = ()


@dataclass(frozen=True, slots=True)
class Placed(Message):
    """Where a request goes and what to expect.

    Attributes:
        prefill_replica: None for the decode replica, which computes the prompt itself.
        ttft_budget_s: The budget that holds for it, seconds from arrival; None for no deadline.
        promised_ttft_s: What it was promised: more, where the end of its answer is due; None for nothing.
        predicted_ttft_s: Seconds from arrival to the first token; None when nobody knows.
        slack_s: Budget minus prediction, if there is one; infinite without a deadline.
        handoff_s: Part of the prediction that follows the end of prefill.
        cached_tokens: Of its tokens, those that the prefill replica's prefix cache is expected to hold.
        decode_wait_s: Part of the prediction in which the KV cache is there and decode has no memory for it.
        unattainable: Its objectives that not even an idle fleet would keep, as predicted.
    """

    prefill_replica: ReplicaId | None
    decode_replica: ReplicaId
    tokens: int
    ttft_budget_s: float | None
    predicted_ttft_s: float | None
    slack_s: float
    handoff_s: float
    reason: PlacementReason
    cached_tokens: int = 0
    promised_ttft_s: float | None = None
    decode_wait_s: float = 0.0
    unattainable: tuple[ObjectiveName, ...] = ()


PlacementDecision: TypeAlias = Placed | Rejected


class PlacementReason(enum.StrEnum):
    """Why a replica was chosen; the values label metrics."""

    ONLY_REPLICA = "only_replica"
    NOBODY_LATE = "nobody_late"
    LEAST_HARM = "least_harm"
    NO_PREFILL_REPLICA = "no_prefill_replica"
    CHEAPER_ON_DECODE = "cheaper_on_decode"
    ONLY_DECODE = "only_decode"
    ROUND_ROBIN = "round_robin"
    LEAST_TOKENS = "least_tokens"
    TWO_CHOICES = "two_choices"
    LONGEST_PREFIX = "longest_prefix"
