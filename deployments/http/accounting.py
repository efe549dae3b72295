"""The account of each request at the ingress: first token, pace, and the one way in which it ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slo.outcomes import RequestEnded
from telemetry import logs
from telemetry.catalogue import (
    ATTAINED,
    REQUESTS,
    ROUTER_FALLBACKS,
    SLACK_AT_FIRST_TOKEN,
    TPOT,
    TTFT,
    TTFT_PREDICTION_ERROR,
    TTFT_PREDICTION_RATIO,
)
from telemetry.instruments import Instruments
from telemetry.reporting import monitor_client

if TYPE_CHECKING:
    from collections.abc import Callable

    from slo.objectives import Objective
    from slo.outcomes import Outcome
    from slo.request import JobId


def ingress_instruments() -> Instruments:
    """All metrics that an ingress replica records."""
    return Instruments(
        REQUESTS,
        TTFT,
        TPOT,
        ATTAINED,
        SLACK_AT_FIRST_TOKEN,
        TTFT_PREDICTION_ERROR,
        TTFT_PREDICTION_RATIO,
        ROUTER_FALLBACKS,
        *monitor_client.METRICS,
    )


@dataclass(frozen=True, slots=True)
class Identity:
    """Which request it is: our id and the client's, whose, for which model, and whether its tokens stream."""

    job_id: JobId
    request_id: str
    tenant: str
    model: str
    streams: bool


class RequestRecord:
    """One request from the moment its objective is known; ends exactly once, later calls of `end` do nothing.

    Args:
        instruments: Where it is recorded.
        identity: Which request it is.
        objective: What it asked for.
        arrived_s: When it arrived, on this process's monotonic clock.
        ended: Called with the job's id when it has ended.
        tell: Called with what the cluster's monitor shall know of it.
    """

    def __init__(
        self,
        instruments: Instruments,
        identity: Identity,
        objective: Objective,
        arrived_s: float,
        ended: Callable[[JobId], None],
        tell: Callable[[RequestEnded], None],
    ) -> None:
        self.job_id = identity.job_id
        self.request_id = identity.request_id
        self.ttft_budget_s: float | None = None
        self.predicted_ttft_s: float | None = None
        self._instruments = instruments
        self._objective = objective
        self._arrived_s = arrived_s
        self._ended = ended
        self._identity = identity
        self._tell = tell
        self._first_s: float | None = None
        self._last_token_s = arrived_s
        self._tokens = 0
        self._outcome: Outcome | None = None

    def placed(self, ttft_budget_s: float | None, predicted_ttft_s: float | None) -> None:
        """Take the budget that holds for the request, and what the router predicts, if it was asked."""
        self.ttft_budget_s = ttft_budget_s
        self.predicted_ttft_s = predicted_ttft_s

    def event(self, text: str) -> None:
        """Note an event of the stream that goes to the client."""
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
            self._record_first_token(now_s - self._arrived_s)
        if _carries_token(text):
            self._tokens += 1
            self._last_token_s = now_s

    def refused(self, outcome: Outcome) -> None:
        """Note a refusal before the request was queued; the gatekeeper counts it."""
        if self._outcome is None:
            self._outcome = outcome
            self._tell(self._account(outcome, None))

    def end(self, outcome: Outcome) -> None:
        """Note the end of the request."""
        if self._outcome is not None:
            return
        self._outcome = outcome
        tier = self._objective.tier
        self._instruments.count(REQUESTS, tier=tier, outcome=outcome.value)
        tpot_s = self._tpot_s()
        if tpot_s is not None:
            self._instruments.observe(TPOT, tpot_s, tier=tier)
            self._count_attained("tpot", tpot_s, self._objective.tpot_s)
        self._ended(self.job_id)
        self._tell(self._account(outcome, tpot_s))
        logs.event(
            "request_ended",
            request_id=self.request_id,
            job_id=self.job_id,
            tier=tier,
            outcome=outcome.value,
            ttft_s=None if self._first_s is None else self._first_s - self._arrived_s,
            predicted_ttft_s=self.predicted_ttft_s,
            budget_s=self.ttft_budget_s,
            tpot_s=tpot_s,
            tokens=self._tokens,
            seconds=time.monotonic() - self._arrived_s,
        )

    def _account(self, outcome: Outcome, tpot_s: float | None) -> RequestEnded:
        return RequestEnded(
            model=self._identity.model,
            tier=self._objective.tier,
            tenant=self._identity.tenant,
            outcome=outcome,
            e2e_s=time.monotonic() - self._arrived_s,
            streamed=self._identity.streams,
            ttft_s=None if self._first_s is None else self._first_s - self._arrived_s,
            ttft_budget_s=self.ttft_budget_s,
            predicted_ttft_s=self.predicted_ttft_s,
            tpot_s=tpot_s,
            tpot_budget_s=self._objective.tpot_s,
        )

    def _tpot_s(self) -> float | None:
        if self._first_s is None or self._tokens < 2:  # noqa: PLR2004 - the first token has no interval
            return None
        return (self._last_token_s - self._first_s) / (self._tokens - 1)

    def _record_first_token(self, ttft_s: float) -> None:
        tier = self._objective.tier
        self._instruments.observe(TTFT, ttft_s, tier=tier)
        if self.ttft_budget_s is not None:
            self._instruments.observe(SLACK_AT_FIRST_TOKEN, self.ttft_budget_s - ttft_s, tier=tier)
            self._count_attained("ttft", ttft_s, self.ttft_budget_s)
        if self.predicted_ttft_s is not None:
            error_s = self.predicted_ttft_s - ttft_s
            self._instruments.observe(TTFT_PREDICTION_ERROR, error_s, tier=tier)
            self._instruments.observe(TTFT_PREDICTION_RATIO, error_s / ttft_s, tier=tier)

    def _count_attained(self, objective: str, measured_s: float, budget_s: float | None) -> None:
        if budget_s is not None:
            attained = "yes" if measured_s <= budget_s else "no"
            tier = self._objective.tier
            self._instruments.count(ATTAINED, tier=tier, objective=objective, attained=attained)


def _carries_token(text: str) -> bool:
    """Whether a server-sent event brings a token: not the role, the usage or the end of the stream."""
    return '"choices":[{' in text and '"delta":{"role"' not in text
