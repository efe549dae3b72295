"""What a client can get wrong or be refused for: errors with their details, and reasons that label metrics.

Does not know HTTP; how an error becomes an answer is `deployments.http.errors`'.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from slo.protocol import Message
from slo.tiers import ObjectiveName

TOO_MANY_GRAMMARS: Final = "grammars"
"""Type of the error for a request whose tenant has too many grammars that wait to be checked."""
NO_REPLICA_RETRY_S: Final = 10
"""When to come again where no replica is running, if nobody knows better."""
_LONGEST_NAME: Final = 200


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


class FieldError(Exception):
    """A request field has a value that cannot be served.

    Attributes:
        field: The header or body field, spelt as the client spelt it; cut where it is long, and escaped where
            it could not be shown on one line.
        problem: What is wrong with it, without the field's name.
        valid: What would be accepted.
    """

    def __init__(self, field: str, problem: str, valid: str) -> None:
        if len(field) > _LONGEST_NAME:
            field = f"{field[:_LONGEST_NAME]}…"
        field = "".join(map(_shown, field))
        super().__init__(f"{field}: {problem}; {valid}")
        self.field = field
        self.problem = problem
        self.valid = valid


class RejectionReason(enum.StrEnum):
    """Why a request was refused before it was queued; the values label metrics."""

    DEADLINE_INFEASIBLE = "deadline_infeasible"
    OVER_SHARE = "over_share"
    """The fleet is under pressure, and the class asks for more than its share."""
    RESERVED = "reserved"
    """Likewise, and the class would not be over it without what is kept for the top tier."""
    TENANT_SHARE = "tenant_share"
    """Likewise, and the tenant asks for more than its part of the class's share."""
    BACKLOG = "backlog"
    """The class's own queue would take too long already."""
    DECODE_FULL = "decode_full"
    """No decode replica is predicted to have memory for it in time."""
    SHED_BY_POLICY = "shed_by_policy"
    """The SLO monitor has the class shed, and it asks for more than its share."""
    REQUEST_RATE = "request_rate"
    TOKEN_RATE = "token_rate"  # noqa: S105 - tokens of text
    OUTPUT_TOKEN_RATE = "output_token_rate"  # noqa: S105 - likewise
    CONCURRENCY = "concurrency"
    NO_REPLICA = "no_replica"
    NOT_SETTLED = "not_settled"
    """The router has just started and has not heard of the replicas; nobody is refused for this."""


@dataclass(frozen=True, slots=True)
class Rejected(Message):
    """A request is refused before it is queued.

    Attributes:
        retry_after_s: When trying again has a chance; None for never, as not even an idle fleet could keep
            the deadline.
        predicted_ttft_s: The best that any replica could do; None when there is no replica, and when the
            request is refused whatever they could do.
        ttft_budget_s: The budget that could not be met.
        key_name: Of the key whose own limit it is; None when it is its tenant's, or the fleet's.
        unattainable: As of `router.messages.Placed`; all, where an idle fleet would refuse it, too.
        lacked_decode: Whether prefill could have served it in time, and decode could not, or not within its
            tier's share.
    """

    reason: RejectionReason
    retry_after_s: float | None
    predicted_ttft_s: float | None = None
    ttft_budget_s: float | None = None
    key_name: str | None = None
    unattainable: tuple[ObjectiveName, ...] = ()
    lacked_decode: bool = False


class EvictionReason(enum.StrEnum):
    """Why the server has ended a request that it had accepted; clients see the value as the error's code."""

    DEADLINE_PASSED = "deadline_passed"
    """It cannot be in time any more."""
    DROPPED = "dropped"
    """It was promised nothing, and decode had too little memory for all."""


class AuthenticationError(Exception):
    """The request carries no API key, or none that is known."""
