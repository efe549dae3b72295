"""How a request ends, and whether it met what it was promised.

Every request ends exactly once, with exactly one `Outcome`; the values label metrics. A request that is
itself at fault is `REJECTED`, whether it is refused (malformed, unauthorised, or beyond its tenant's limits)
or ended later (as by its own grammar); one that the fleet cannot serve is `SHED` before anything of it is
computed, and `EVICTED`, as too late or for others, from then on. A `RejectionReason` is always of a request
that was never queued. `RequestEnded.judged` is the one rule by which objectives count as met, missed or not
judged, wherever attainment is counted; `attained` sums it up for the request.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, assert_never

from slo.errors import RejectionReason
from slo.tiers import ObjectiveName, Tier


class Outcome(enum.StrEnum):
    """The one way in which a request ended."""

    FINISHED = "finished"
    REJECTED = "rejected"
    SHED = "shed"
    EVICTED = "evicted"
    CANCELLED = "cancelled"
    FAILED = "failed"


_LOST: Final = frozenset({Outcome.SHED, Outcome.FAILED, Outcome.EVICTED})
"""What was promised to such a request was not kept."""


def outcome_of(reason: RejectionReason) -> Outcome:
    """How a refused request ends: the tenant's own limits reject it, the state of the fleet sheds it."""
    match reason:
        case (
            RejectionReason.REQUEST_RATE
            | RejectionReason.TOKEN_RATE
            | RejectionReason.OUTPUT_TOKEN_RATE
            | RejectionReason.CONCURRENCY
        ):
            return Outcome.REJECTED
        case (
            RejectionReason.DEADLINE_INFEASIBLE
            | RejectionReason.OVER_SHARE
            | RejectionReason.RESERVED
            | RejectionReason.TENANT_SHARE
            | RejectionReason.BACKLOG
            | RejectionReason.DECODE_FULL
            | RejectionReason.SHED_BY_POLICY
            | RejectionReason.NO_REPLICA
            | RejectionReason.NOT_SETTLED
        ):
            return Outcome.SHED
        case _:
            assert_never(reason)


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request as its ingress saw it end.

    Attributes:
        e2e_s: From arrival to end, without `unread_s`.
        streamed: Whether its tokens could be timed.
        ttft_s: Time to its first token; None when there was none to time.
        ttft_budget_s: The TTFT that it was promised; None for none, infinite for one that nobody has worked
            out.
        predicted_ttft_s: The router's prediction when it placed it; None when it was not asked.
        tpot_s: Its mean time per output token after the first, without `tpot_unread_s`; None when there were
            too few to time.
        tpot_budget_s: The TPOT that it was promised; None for none.
        e2e_budget_s: The time from arrival to its end that it was promised; None for none.
        up_to_decode: Whether prefill had no say in when its first token came, or that none did: only decode
            can compute its prompt, or decode alone was not ready for it in time.
        unattainable: What it was promised that not even an idle fleet would have kept, by the router's
            predictions.
        unread_s: For how long its client had not taken what was there for it. How far the server came
            meanwhile nobody sees.
        tpot_unread_s: The part of that in its mean time per output token.
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
    e2e_budget_s: float | None = None
    up_to_decode: bool = False
    unattainable: tuple[ObjectiveName, ...] = ()
    unread_s: float = 0.0
    tpot_unread_s: float = 0.0

    @property
    def judged(self) -> dict[ObjectiveName, bool]:
        """Whether each objective was met, of those that are judged.

        Not judged are objectives that were not promised or could not be timed, all those of a request that
        was rejected, and, when the client left, those that had not been missed by then. A request that was
        shed, evicted, or failed has missed all that it was promised and that could have been timed.

        While its client does not read, the server may have been waiting for it or been late by itself. So
        what is in time with all of that is met, what is late without any of it is missed, and what lies
        between is not judged: no client makes the server late, and none that pauses a little excuses it.
        """
        promised = self._promised
        if self.outcome is Outcome.REJECTED:
            return {}
        if self.outcome in _LOST:
            timed = promised if self.streamed else promised.keys() & {ObjectiveName.E2E}
            return dict.fromkeys(timed, False)
        met = {
            name: took_s <= budget_s
            for name, (took_s, unread_s, budget_s) in promised.items()
            if took_s is not None and math.isfinite(budget_s) and not took_s <= budget_s < took_s + unread_s
        }
        if self.outcome is not Outcome.CANCELLED:
            return met
        missed = {name: False for name, is_met in met.items() if not is_met}
        if self.streamed and self.ttft_s is None and self.e2e_s > (self.ttft_budget_s or math.inf):
            missed[ObjectiveName.TTFT] = False
        return missed

    @property
    def attained(self) -> bool | None:
        """Whether it met what it was promised; None when it is not judged.

        One that finished has met it if nothing that could be timed was missed, even if nothing could; one
        that was shed, evicted, or failed has not, whatever could be timed. Otherwise those that stream no
        tokens would count only when they fail.
        """
        return self._attained(self._promised.keys())

    @property
    def attained_in_reach(self) -> bool | None:
        """Whether it met what an idle fleet would have kept of what it was promised.

        By this the fleet is steered: nothing that is done for a request makes it meet the rest. None as of
        `attained`, and when it failed, as by an engine that fails: it would have done so on an idle fleet.
        """
        if self.outcome is Outcome.FAILED:
            return None
        return self._attained(self._promised.keys() - set(self.unattainable))

    def _attained(self, promised: AbstractSet[ObjectiveName]) -> bool | None:
        if not promised:
            return None
        if self.outcome in _LOST:
            return False
        judged = [is_met for name, is_met in self.judged.items() if name in promised]
        return all(judged) if judged or self.outcome is Outcome.FINISHED else None

    @property
    def prefilled_in_time(self) -> bool | None:
        """Whether its first token was in time as far as prefill can help it; None where it is not judged.

        What a request failed of after its first token, what was up to decode, and what an idle fleet would
        not have kept, more prefill replicas would not have changed.
        """
        if self.up_to_decode or ObjectiveName.TTFT in self.unattainable:
            return None
        if self.outcome not in _LOST or not self.streamed or self.ttft_s is None:
            return self.judged.get(ObjectiveName.TTFT)
        if self.ttft_budget_s is None or not math.isfinite(self.ttft_budget_s):
            return None
        return self.ttft_s <= self.ttft_budget_s

    @property
    def budget_used(self) -> float | None:
        """Time taken over time promised, the largest of all objectives; None when none was timed."""
        pairs = (
            (self.ttft_s, self.ttft_budget_s),
            (self.tpot_s, self.tpot_budget_s),
            (self.e2e_s if self.outcome is Outcome.FINISHED else None, self.e2e_budget_s),
        )
        return max(
            (
                took_s / budget_s
                for took_s, budget_s in pairs
                if took_s is not None and budget_s and math.isfinite(budget_s)
            ),
            default=None,
        )

    @property
    def _promised(self) -> dict[ObjectiveName, tuple[float | None, float, float]]:
        """What each objective that it was promised took, how long it was unread beside that, and may take."""
        return {
            name: (took_s, unread_s, budget_s)
            for name, took_s, unread_s, budget_s in (
                (ObjectiveName.TTFT, self.ttft_s, 0.0, self.ttft_budget_s),
                (ObjectiveName.TPOT, self.tpot_s, self.tpot_unread_s, self.tpot_budget_s),
                (ObjectiveName.E2E, self.e2e_s, self.unread_s, self.e2e_budget_s),
            )
            if budget_s is not None
        }
