"""What the router is asked and what it answers.

Values alone; `router.core` decides.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from slo.admission.tenants import ANONYMOUS
from slo.errors import Rejected
from slo.objectives import Objective

if TYPE_CHECKING:
    from slo.replacement import ReplacementRequested
    from slo.request import JobId, ReplicaId


@dataclass(frozen=True, slots=True)
class PlacementRequested:
    """A request asks for a place.

    Attributes:
        objective: Its tier and budgets.
        explicit_deadline: Whether the client itself named the budget for the first token.
        prompt_tokens: Exact length when the prompt came as tokens, else None.
        prompt_bytes: Size of the text otherwise.
        elapsed_s: What it has already spent of its budget.
        prefix_hashes: Of the prompt's leading blocks, each standing for all of the prompt up to its end.
        hash_block: Size of a block: tokens when `prompt_tokens` is known, else bytes; 0 without hashes.
        tenant: Who sends it.
        failed_replicas: Prefill replicas that failed the request; it is not placed there again.
        decode_replica: Where it decodes already; None leaves that open.
        is_admitted: Whether it was admitted before.
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

    @classmethod
    def again(cls, request: ReplacementRequested) -> PlacementRequested:
        """A failed prefill with what is left of its budget, bound to its decode replica."""
        return cls(
            job_id=request.job_id,
            objective=Objective(request.tier, request.ttft_budget_s, None),
            explicit_deadline=request.explicit_deadline,
            prompt_tokens=request.tokens,
            prompt_bytes=0,
            failed_replicas=request.failed_replicas,
            decode_replica=request.decode_replica,
            is_admitted=True,
        )


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a request goes and what to expect.

    Attributes:
        ttft_budget_s: The budget that holds for it, seconds from arrival; None for no deadline.
        predicted_ttft_s: Seconds from arrival to the first token.
        slack_s: Budget minus prediction; infinite without a deadline.
        handoff_s: Part of the prediction that follows the end of prefill.
        cached_tokens: Of its tokens, those that the prefill replica's prefix cache is expected to hold.
    """

    prefill_replica: ReplicaId
    decode_replica: ReplicaId
    tokens: int
    ttft_budget_s: float | None
    predicted_ttft_s: float
    slack_s: float
    handoff_s: float
    reason: PlacementReason
    cached_tokens: int = 0


PlacementDecision: TypeAlias = Placed | Rejected


class PlacementReason(enum.StrEnum):
    """Why a replica was chosen; the values label metrics."""

    ONLY_REPLICA = "only_replica"
    NOBODY_LATE = "nobody_late"
    LEAST_HARM = "least_harm"
    ROUND_ROBIN = "round_robin"
    LEAST_TOKENS = "least_tokens"
    TWO_CHOICES = "two_choices"
    LONGEST_PREFIX = "longest_prefix"
