"""The account of each request at the ingress: first token, pace, and the one way in which it ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from opentelemetry import trace

from decode_node.answers import choice_of, has_choice, is_role
from deployments.http.errors import HTTPError
from deployments.http.token_meter import TokenMeter
from router.messages import Answered, JobEnded
from slo.objectives import Objective
from slo.outcomes import Outcome, RequestEnded
from slo.request import JobId
from slo.tiers import ObjectiveName
from telemetry import logs
from telemetry.catalogue import (
    CONTINUATIONS,
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
from telemetry.tracing import trace_id_of

METRICS: Final = (
    REQUESTS,
    TTFT,
    TPOT,
    SLACK_AT_FIRST_TOKEN,
    TTFT_PREDICTION_ERROR,
    TTFT_PREDICTION_RATIO,
    ROUTER_FALLBACKS,
    CONTINUATIONS,
    *monitor_client.METRICS,
)
"""All that an ingress replica records."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which request it is: its ids, whose, of which model, whether it streams, how many answers it has.

    `only_decode` is whether the prefill tier has no part in it.
    """

    job_id: JobId
    request_id: str
    tenant: str
    model: str
    streams: bool
    answers: int = 1
    only_decode: bool = False


class _Moment(NamedTuple):
    """When an event of the stream was there, and for how long until then its client had not read."""

    at_s: float
    unread_s: float


class RequestRecord:
    """One request from the moment its objective is known; ends exactly once, later calls of `end` do nothing.

    Args:
        instruments: Where it is recorded.
        identity: Which request it is.
        objective: What it asked for.
        arrived_s: When it arrived, on this process's monotonic clock.
        ended: Called when it has ended, with what the router shall know of it.
        tell: Called with what the cluster's monitor shall know of it.
        span: The request's own; ends with it.

    Attributes:
        delivered_tokens: Says how many tokens the events of its stream have brought; 0 where none says it.
    """

    def __init__(
        self,
        instruments: Instruments,
        identity: Identity,
        objective: Objective,
        arrived_s: float,
        ended: Callable[[JobEnded], None],
        tell: Callable[[RequestEnded], None],
        span: trace.Span = trace.INVALID_SPAN,
    ) -> None:
        self.span = span
        self.job_id = identity.job_id
        self.request_id = identity.request_id
        self.ttft_budget_s: float | None = None
        self._promised_ttft_s: float | None = None
        self._decode_wait_s = 0.0
        self._unattainable: tuple[ObjectiveName, ...] = ()
        self.predicted_ttft_s: float | None = None
        self.local_prefill = ""
        self.meter: TokenMeter | None = None
        self.delivered_tokens: Callable[[], int] = lambda: 0
        self._instruments = instruments
        self._objective = objective
        self._arrived_s = arrived_s
        self._ended = ended
        self._identity = identity
        self._tell = tell
        self._first: _Moment | None = None
        self._began: dict[int, _Moment] = {}  # the first tokens of each answer
        self._latest: dict[int, _Moment] = {}
        self._unread_s = 0.0
        self._events = 0  # that bring tokens
        self._outcome: Outcome | None = None

    def placed(
        self,
        ttft_budget_s: float | None,
        predicted_ttft_s: float | None,
        promised_ttft_s: float | None,
        decode_wait_s: float = 0.0,
        unattainable: tuple[ObjectiveName, ...] = (),
    ) -> None:
        """Take the first token's budget, its prediction if there is one, and the promise that is judged.

        The promise is that of `Objective.judged_ttft_s`. `decode_wait_s` is the part of the prediction in
        which decode has no memory for it; `unattainable` are its objectives that an idle fleet would miss.
        """
        self.ttft_budget_s = ttft_budget_s
        self.predicted_ttft_s = predicted_ttft_s
        self._decode_wait_s = decode_wait_s
        self._promised_ttft_s = promised_ttft_s
        self._unattainable = unattainable

    def answered(self, usage: Any) -> None:
        """Take the usage of an answer that came as a whole; None of one that was refused or never began."""
        if self.meter is not None:
            self.meter.answered(usage)

    def event(self, text: str) -> str:
        """Note an event of the stream; returns what of it goes to the client, nothing when it is empty."""
        now = _Moment(time.monotonic(), self._unread_s)
        if self._first is None:
            self._first = now
            self._record_first_token(now.at_s - self._arrived_s)
            self.span.add_event("first_token")
        if has_choice(text) and not is_role(text):
            self._events += 1
            answer = 0 if self._identity.answers == 1 else choice_of(text)
            # Tokens of the first answer may be there and not shown yet, as of hidden reasoning.
            self._began.setdefault(answer, now if self._began else self._first)
            self._latest[answer] = now
        return text if self.meter is None else self.meter.read(text)

    def unread(self, seconds: float) -> None:
        """For so long its client has left an event of the stream that there was."""
        self._unread_s += seconds

    def traced(self, error: HTTPError) -> HTTPError:
        """The error that the request is answered with, naming the trace in which it is recorded, if it is."""
        error.trace_id = trace_id_of(self.span)
        return error

    def refused(self, outcome: Outcome, *, lacked_decode: bool = False) -> None:
        """Note a refusal before the request was queued; the gatekeeper counts it.

        `lacked_decode` is that of `Rejected`.
        """
        if self._outcome is None:
            self._outcome = outcome
            told = self._account(outcome)
            self._finish(replace(told, up_to_decode=told.up_to_decode or lacked_decode))

    def end(self, outcome: Outcome) -> None:
        """Note the end of the request."""
        if self._outcome is not None:
            return
        self._outcome = outcome
        model, tier = self._identity.model, self._objective.tier
        self._instruments.count(REQUESTS, model=model, tier=tier, outcome=outcome.value)
        account = self._account(outcome)
        if account.tpot_s is not None:
            self._instruments.observe(TPOT, account.tpot_s, model=model, tier=tier)
        is_cancelled = outcome is Outcome.CANCELLED
        used = None if self.meter is None else self.meter.used(is_cancelled=is_cancelled)
        self._ended(JobEnded(self.job_id, self._ttft_s, used, self._answer(outcome)))
        self._finish(account)
        logs.event(
            "request_ended",
            request_id=self.request_id,
            job_id=self.job_id,
            trace_id=trace_id_of(self.span),
            tenant=self._identity.tenant,
            model=model,
            tier=tier,
            outcome=outcome.value,
            ttft_s=self._ttft_s,
            predicted_ttft_s=self.predicted_ttft_s,
            decode_wait_s=self._decode_wait_s,
            budget_s=self.ttft_budget_s,
            tpot_s=account.tpot_s,
            e2e_budget_s=self._objective.e2e_s,
            prompt_tokens=self._prompt_tokens,
            tokens=self._output_tokens,
            seconds=time.monotonic() - self._arrived_s,
        )

    def _finish(self, ended: RequestEnded) -> None:
        self._tell(ended)
        if self.span.is_recording():
            known = {
                "gen_ai.request.model": ended.model,
                "gen_ai.usage.input_tokens": self._prompt_tokens,
                "gen_ai.usage.output_tokens": self._output_tokens or None,
                "slackserve.request_id": self.request_id,
                "slackserve.job_id": self.job_id,
                "slackserve.tier": ended.tier,
                "slackserve.outcome": ended.outcome.value,
                "slackserve.attained": ended.attained,
                "slackserve.ttft_s": ended.ttft_s,
                "slackserve.ttft_budget_s": ended.ttft_budget_s,
                "slackserve.predicted_ttft_s": ended.predicted_ttft_s,
                "slackserve.tpot_s": ended.tpot_s,
            }
            known = {name: value for name, value in known.items() if value not in {None, math.inf}}
            self.span.set_attributes(known)
            if ended.outcome is Outcome.FAILED:
                self.span.set_attribute("error.type", ended.outcome.value)
                self.span.set_status(trace.StatusCode.ERROR)
        self.span.end()

    def _account(self, outcome: Outcome) -> RequestEnded:
        tpot_s, tpot_unread_s = self._tpot_s()
        return RequestEnded(
            model=self._identity.model,
            tier=self._objective.tier,
            tenant=self._identity.tenant,
            outcome=outcome,
            e2e_s=time.monotonic() - self._arrived_s - self._unread_s,
            streamed=self._identity.streams,
            ttft_s=self._ttft_s,
            ttft_budget_s=self._promised_ttft_s,
            predicted_ttft_s=self.predicted_ttft_s,
            tpot_s=tpot_s,
            tpot_budget_s=self._objective.tpot_s,
            e2e_budget_s=self._objective.e2e_s,
            unattainable=self._unattainable,
            up_to_decode=self._identity.only_decode or self._waited_for_memory(),
            unread_s=self._unread_s,
            tpot_unread_s=tpot_unread_s,
        )

    def _waited_for_memory(self) -> bool:
        """Whether its first token is late, and only by the predicted wait for decode's memory."""
        if (budget_s := self._promised_ttft_s) is None:
            return False
        took_s = time.monotonic() - self._arrived_s if self._ttft_s is None else self._ttft_s
        return took_s - self._decode_wait_s <= budget_s < took_s

    def _answer(self, outcome: Outcome) -> Answered | None:
        """How long its answer became, if it ended by itself and somebody counted."""
        tokens = self._counted_tokens
        if outcome is not Outcome.FINISHED or not tokens:
            return None
        return Answered(self._objective.tier, self._identity.tenant, max(1, tokens // self._identity.answers))

    @property
    def _ttft_s(self) -> float | None:
        return None if self._first is None else self._first.at_s - self._arrived_s

    def _tpot_s(self) -> tuple[float | None, float]:
        """Its mean time per output token, and beside that what of such a time was unread.

        Of several answers each counts from its own first tokens on, as each is computed at a time of its own;
        they have none where nobody sees when those came. Nor has it one where nobody has counted its tokens.
        """
        intervals = (self._counted_tokens or 0) - len(self._began)
        hides = self._identity.answers > 1 and self.meter is not None and self.meter.is_silent_at_times
        if not self._began or intervals < 1 or hides:
            return None, 0.0
        took_s = unread_s = 0.0
        for answer, began in self._began.items():
            latest = self._latest[answer]
            took_s += latest.at_s - began.at_s
            unread_s += latest.unread_s - began.unread_s
        return (took_s - unread_s) / intervals, unread_s / intervals

    @property
    def _prompt_tokens(self) -> int | None:
        return None if self.meter is None else self.meter.prompt_tokens

    @property
    def _counted_tokens(self) -> int | None:
        """Its tokens, of which an event may bring several, by the engine's count; None where it said none.

        That of a stream which ends early may be known by the tokens themselves that came with its events.
        """
        counted = None if self.meter is None else self.meter.output_tokens
        return counted or self.delivered_tokens() or None

    @property
    def _output_tokens(self) -> int:
        """Its tokens; where nobody has counted them, at least so many."""
        return self._counted_tokens or self._events

    def _record_first_token(self, ttft_s: float) -> None:
        model, tier = self._identity.model, self._objective.tier
        self._instruments.observe(TTFT, ttft_s, model=model, tier=tier)
        if self.ttft_budget_s is not None:
            self._instruments.observe(
                SLACK_AT_FIRST_TOKEN, self.ttft_budget_s - ttft_s, model=model, tier=tier
            )
        if self.predicted_ttft_s is not None:
            error_s = self.predicted_ttft_s - ttft_s
            self._instruments.observe(TTFT_PREDICTION_ERROR, error_s, model=model, tier=tier)
            self._instruments.observe(TTFT_PREDICTION_RATIO, error_s / ttft_s, model=model, tier=tier)
