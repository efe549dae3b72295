"""Going on after a replica has failed: how it failed, and what became of the request.

Of a prefill also the messages, and how often and for whom it is placed again.

The router chooses the new place; the decode replica asks for it and sends the prefill there.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, TypeAlias

from slo.errors import Rejected
from slo.protocol import Message
from slo.request import JobId, ReplicaId, RequestContext
from slo.tiers import Tier


class FailureCause(enum.StrEnum):
    """How a call to a prefill or decode replica failed; the values label metrics."""

    REPLICA_DIED = "replica_died"
    """The call to the replica ended with the replica."""
    ENGINE_DIED = "engine_died"
    """The replica says that its engine is dead."""
    SILENT = "silent"
    """The replica answers nobody any more."""
    PULL_FAILED = "pull_failed"
    """The prefill was done, and its KV cache could not be pulled, or not in time."""
    NO_REPLICA = "no_replica"
    """Serve knows of no replica of that tier that runs."""
    REQUEST_FAILED = "request_failed"
    """The replica answered with an error of its own, and goes on serving."""
    OTHER_MODEL = "other_model"
    """The replica serves another model of the same name, or by another configuration, and goes on."""
    LEFT = "left"
    """Nothing has failed: decode had no memory for what it had pulled."""

    @property
    def is_replicas(self) -> bool:
        """Whether it says something of a replica that does not say that it serves, not of one job alone."""
        return self not in {
            FailureCause.SILENT,
            FailureCause.REQUEST_FAILED,
            FailureCause.OTHER_MODEL,
            FailureCause.LEFT,
        }


class ReplacementOutcome(enum.StrEnum):
    """How the server went on after a prefill had failed; the values label metrics."""

    ROUTER = "router"
    """Placed again by the router."""
    SERVE = "serve"
    """Sent to a replica of Serve's choice, as no router answered."""
    LIMIT = "limit"
    """Not placed again: it has been, as often as is allowed."""
    DEADLINE = "deadline"
    """Not placed again: it may be shed, and its deadline is infeasible."""
    LOCAL = "local"
    """There is no other prefill replica: decode computes the prompt itself."""
    NO_REPLICA = "no_replica"
    """Not placed again: there is no other prefill replica."""


class ContinuationOutcome(enum.StrEnum):
    """How an answer went on after its decode replica had failed.

    The values label metrics, and so does what binds an answer to its replica, where it does not go on.
    """

    CONTINUED = "continued"
    """Elsewhere, after what its client has."""
    RESTARTED = "restarted"
    """Elsewhere, as its client had nothing of it."""
    LIMIT = "limit"
    """Not: it has been, as often as is allowed."""
    NO_REPLICA = "no_replica"
    """Not: there is no other decode replica."""


@dataclass(frozen=True, slots=True)
class ReplacementRequested(Message):
    """A prefill has failed and needs another place.

    Attributes:
        ttft_budget_s: What is left until its first token is due; None for no deadline.
        explicit_deadline: Whether the client itself named the budget.
        tokens: Length of its prompt.
        decode_replica: Where it decodes, and who asks.
        failed_replicas: Replicas on which it failed; it is not placed there again.
        cause: How the last of them failed.
        lost_replica: The one of them that nobody can use until it reports again; None for none.
        avoided_replicas: It is placed there only if there is no other.
        explicit_e2e_s: What is left of the client's own budget for the whole answer; None for none.
    """

    job_id: JobId
    tier: Tier
    ttft_budget_s: float | None
    explicit_deadline: bool
    tokens: int
    decode_replica: ReplicaId
    failed_replicas: tuple[ReplicaId, ...]
    cause: FailureCause
    lost_replica: ReplicaId | None = None
    avoided_replicas: tuple[ReplicaId, ...] = ()
    explicit_e2e_s: float | None = None


@dataclass(frozen=True, slots=True)
class Replaced(Message):
    """The new place, None for the decode replica itself.

    Attributes:
        handoff_s: Predicted from the end of prefill to the first token.
    """

    prefill_replica: ReplicaId | None
    handoff_s: float


ReplacementDecision: TypeAlias = Replaced | Rejected


@dataclass(frozen=True, slots=True)
class ReplacementRules:
    """When a failed prefill is not placed again.

    Attributes:
        max_replacements: How often one request is placed again.
        sheddable: Tiers whose requests are not placed again when their deadlines are infeasible.
    """

    max_replacements: int
    sheddable: frozenset[Tier]

    def refusal(self, context: RequestContext, replacements: int) -> ReplacementOutcome | None:
        """Why a request is not placed again; None when it may be.

        A deadline counts here only if the client named it; for the others the router decides. `context` has
        what is left of its budgets.
        """
        if replacements >= self.max_replacements:
            return ReplacementOutcome.LIMIT
        named_s = context.explicit_e2e_s, context.ttft_budget_s if context.explicit_deadline else None
        is_late = any(left_s is not None and left_s <= 0 for left_s in named_s)
        if is_late and context.tier in self.sheddable:
            return ReplacementOutcome.DEADLINE
        return None


NO_REPLACEMENTS: Final = ReplacementRules(0, frozenset())
