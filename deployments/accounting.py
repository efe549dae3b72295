"""The account of each request at the ingress: first token, pace, and the one way in which it ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from slo.outcomes import Outcome
from telemetry import logs
from telemetry.catalogue import (
    ATTAINED,
    REQUESTS,
    ROUTER_FALLBACKS,
    SLACK_AT_FIRST_TOKEN,
    TPOT,
    TTFT,
    TTFT_PREDICTION_ERROR,
)
from telemetry.instruments import Instruments

if TYPE_CHECKING:
    from collections.abc import Callable

    from slo.request import JobId, RequestContext


def ingress_instruments() -> Instruments:
    """All metrics that an ingress replica records."""
    return Instruments(
        REQUESTS, TTFT, TPOT, ATTAINED, SLACK_AT_FIRST_TOKEN, TTFT_PREDICTION_ERROR, ROUTER_FALLBACKS
    )


class RequestRecord:
    """One request from its admission on; ends exactly once, later calls of `end` do nothing.

    Args:
        instruments: Where it is recorded.
        context: Who it is.
        ttft_budget_s: Its budget for the first token, None for none.
        predicted_ttft_s: What the router predicted, None without it.
        arrived_s: When it arrived, on this process's monotonic clock.
        abandoned: Called with the job's id when it ends in any way but finished.
    """

    def __init__(
        self,
        instruments: Instruments,
        context: RequestContext,
        ttft_budget_s: float | None,
        predicted_ttft_s: float | None,
        arrived_s: float,
        abandoned: Callable[[JobId], None],
    ) -> None:
        self.ttft_budget_s = ttft_budget_s
        self._instruments = instruments
        self._context = context
        self._predicted_ttft_s = predicted_ttft_s
        self._arrived_s = arrived_s
        self._abandoned = abandoned
        self._first_s: float | None = None
        self._last_s = arrived_s
        self._chunks = 0
        self._outcome: Outcome | None = None

    def chunk(self) -> None:
        """A piece of the stream is on its way to the client."""
        self._last_s = time.monotonic()
        self._chunks += 1
        if self._first_s is None:
            self._first_s = self._last_s
            self._record_first_token(self._last_s - self._arrived_s)

    def end(self, outcome: Outcome) -> None:
        """The request ended."""
        if self._outcome is not None:
            return
        self._outcome = outcome
        tier = self._context.tier.value
        self._instruments.count(REQUESTS, tier=tier, outcome=outcome.value)
        if self._first_s is not None and self._chunks > 1:
            tpot_s = (self._last_s - self._first_s) / (self._chunks - 1)
            self._instruments.observe(TPOT, tpot_s, tier=tier)
        if outcome is not Outcome.FINISHED:
            self._abandoned(self._context.job_id)
        logs.event(
            "request_ended",
            request_id=self._context.request_id,
            job_id=self._context.job_id,
            tier=tier,
            outcome=outcome.value,
            ttft_s=None if self._first_s is None else self._first_s - self._arrived_s,
            predicted_ttft_s=self._predicted_ttft_s,
            budget_s=self.ttft_budget_s,
            chunks=self._chunks,
            seconds=time.monotonic() - self._arrived_s,
        )

    def _record_first_token(self, ttft_s: float) -> None:
        tier = self._context.tier.value
        self._instruments.observe(TTFT, ttft_s, tier=tier)
        if self.ttft_budget_s is not None:
            slack_s = self.ttft_budget_s - ttft_s
            self._instruments.observe(SLACK_AT_FIRST_TOKEN, slack_s, tier=tier)
            self._instruments.count(ATTAINED, tier=tier, attained="yes" if slack_s >= 0 else "no")
        if self._predicted_ttft_s is not None:
            self._instruments.observe(TTFT_PREDICTION_ERROR, self._predicted_ttft_s - ttft_s, tier=tier)
