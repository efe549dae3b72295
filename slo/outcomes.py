"""How a request ends.

Every request ends exactly once, in exactly one of these; the values label metrics. A request that was
refused before it was queued is `REJECTED` (malformed, unauthorised, or beyond its tenant's limits) or `SHED`
(overload); one that was queued and then given up by the server is `EVICTED`. A `RejectionReason` is always of
a request that was never queued.
"""

from __future__ import annotations

import enum
from typing import Final

from slo.errors import RejectionReason


class Outcome(enum.StrEnum):
    """The one way in which a request ended."""

    FINISHED = "finished"
    REJECTED = "rejected"
    SHED = "shed"
    EVICTED = "evicted"
    CANCELLED = "cancelled"
    FAILED = "failed"


_LIMITS: Final = frozenset(
    {RejectionReason.REQUEST_RATE, RejectionReason.TOKEN_RATE, RejectionReason.CONCURRENCY}
)


def outcome_of(reason: RejectionReason) -> Outcome:
    """How a refused request ends: the tenant's own limits reject it, the state of the fleet sheds it."""
    return Outcome.REJECTED if reason in _LIMITS else Outcome.SHED
