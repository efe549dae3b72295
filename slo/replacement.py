"""Another place for a prefill whose replica was lost: what is asked and answered, and who may ask.

Owns the rule of how often and for whom. Where the prefill goes is the router's business; carrying it out is
the decode replica's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from slo.errors import Rejected

if TYPE_CHECKING:
    from slo.request import JobId, ReplicaId, RequestContext
    from slo.tiers import Tier


class FailureCause(enum.StrEnum):
    """How a prefill was lost; the values label metrics."""

    REPLICA_DIED = "replica_died"
    """The call to the replica ended with the replica."""
    ENGINE_DIED = "engine_died"
    """The replica says that its engine is dead."""
    SILENT = "silent"
    """The replica answers nobody any more."""
    PULL_FAILED = "pull_failed"
    """The prefill was done, and its KV cache could not be pulled."""
    NO_REPLICA = "no_replica"
    """Serve knows of no prefill replica that runs."""


class ReplacementOutcome(enum.StrEnum):
    """What becomes of a request whose prefill was lost; the values label metrics."""

    ROUTER = "router"
    """Placed again by the router."""
    SERVE = "serve"
    """Sent to a replica of Serve's choice, as no router answered."""
    LIMIT = "limit"
    """Given up: placed again often enough."""
    DEADLINE = "deadline"
    """Given up: it may be shed, and cannot be in time any more."""
    NO_REPLICA = "no_replica"
    """Given up: there is no other prefill replica."""


@dataclass(frozen=True, slots=True)
class ReplacementRequested:
    """A prefill was lost and wants another place.

    Attributes:
        ttft_budget_s: What is left until its first token is due; None for no deadline.
        explicit_deadline: Whether the client itself named the budget.
        tokens: Length of its prompt.
        decode_replica: Where it decodes, and who asks.
        lost: Replicas that do not come into question.
        cause: How the last of them lost it.
    """

    job_id: JobId
    tier: Tier
    ttft_budget_s: float | None
    explicit_deadline: bool
    tokens: int
    decode_replica: ReplicaId
    lost: tuple[ReplicaId, ...]
    cause: FailureCause


@dataclass(frozen=True, slots=True)
class Replaced:
    """The new place; `handoff_s` is predicted from the end of prefill to the first token."""

    prefill_replica: ReplicaId
    handoff_s: float


ReplacementDecision: TypeAlias = Replaced | Rejected


@dataclass(frozen=True, slots=True)
class ReplacementRules:
    """When a lost prefill is not placed again.

    Attributes:
        max_replacements: How often one request is placed again.
        sheddable: Tiers whose requests may be given up when they cannot be in time.
    """

    max_replacements: int
    sheddable: frozenset[Tier]

    def refusal(self, context: RequestContext, replacements: int) -> ReplacementOutcome | None:
        """Why a request is not placed again; None when it may be.

        A deadline counts here only if the client named it: the router knows what the others allow for.

        Args:
            context: With what is left of its budget.
            replacements: How often it has been placed again already.
        """
        if replacements >= self.max_replacements:
            return ReplacementOutcome.LIMIT
        budget_s = context.ttft_budget_s
        is_late = budget_s is not None and budget_s <= 0
        if is_late and context.explicit_deadline and context.tier in self.sheddable:
            return ReplacementOutcome.DEADLINE
        return None


NO_REPLACEMENTS: Final = ReplacementRules(0, frozenset())
