"""How a request ends, and whether it met what it was promised.

Every request ends exactly once, with exactly one `Outcome`; the values label metrics. A request that was
refused before it was queued is `REJECTED` (malformed, unauthorised, or beyond its tenant's limits) or `SHED`
(overload); one that the server removed from the queue is `EVICTED`. A `RejectionReason` is always of a
request that was never queued. `RequestEnded.attained` is the one rule by which a request counts as met,
missed or not judged, wherever attainment is counted.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from slo.errors import RejectionReason

if TYPE_CHECKING:
    from slo.tiers import Tier


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


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request as its ingress saw it end.

    Attributes:
        e2e_s: From arrival to end.
        streamed: Whether its tokens could be timed.
        ttft_s: Time to its first token; None when there was none to time.
        ttft_budget_s: The TTFT that it was promised; None for none.
        predicted_ttft_s: The router's prediction when it placed it; None when it was not asked.
        tpot_s: Its mean time per output token after the first; None when there were too few to time.
        tpot_budget_s: The TPOT that it was promised; None for none.
    """

    model: str
    tier: Tier
    tenant: str
    outcome: Outcome
    e2e_s: float
    streamed: bool = True
    ttft_s: float | None = None
    ttft_budget_s: float | None = None
    predicted_ttft_s: float | None = None
    tpot_s: float | None = None
    tpot_budget_s: float | None = None

    @property
    def attained(self) -> bool | None:
        """Whether it met what it was promised; None when it is not judged.

        Not judged are requests that were promised nothing, that could not be timed, that were rejected, and
        those whose client left before anything was due. One that was shed, evicted, or failed has missed.
        """
        if self.outcome is Outcome.REJECTED or (self.ttft_budget_s is None and self.tpot_budget_s is None):
            return None
        if self.outcome in {Outcome.SHED, Outcome.FAILED, Outcome.EVICTED}:
            return False
        used = self.budget_used
        if used is not None and used > 1.0:
            return False
        if self.outcome is Outcome.CANCELLED:
            overdue = self.ttft_budget_s is not None and self.e2e_s > self.ttft_budget_s
            return False if overdue and self.streamed and self.ttft_s is None else None
        return None if used is None else True

    @property
    def budget_used(self) -> float | None:
        """Time taken over time promised, of TTFT or TPOT the larger; None when neither was timed."""
        pairs = ((self.ttft_s, self.ttft_budget_s), (self.tpot_s, self.tpot_budget_s))
        return max(
            (took_s / budget_s for took_s, budget_s in pairs if took_s is not None and budget_s), default=None
        )
