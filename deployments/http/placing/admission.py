"""A request's admission: a place for it, or the refusal that its client gets.

Owns what follows from the router's answer before anything is generated: the promise that the request is
judged by, what is metered of its tokens, the context that goes with it, and what its client is told of it.
"""

from __future__ import annotations

import asyncio
import time

from opentelemetry.trace import set_span_in_context
from ray.exceptions import TaskCancelledError

from deployments.http import errors as http_errors
from deployments.http.accounting import RequestRecord
from deployments.http.errors import HTTPError
from deployments.http.placing.asked import Asked, at_place
from deployments.http.placing.placement_client import PlacementClient
from deployments.http.token_meter import TokenMeter
from router.messages import Placed, PlacementReason, PlacementRequested
from slo.admission.tenant_limits import Usage
from slo.errors import Rejected
from slo.objectives import Objective
from slo.outcomes import Outcome, outcome_of
from slo.predict.prompt_length import PromptLengthEstimator
from slo.request import RequestContext
from telemetry.tracing import TRACER, traceparent_of


async def admit(
    placement: PlacementClient, asked: Asked, record: RequestRecord, *, shows_usage: bool
) -> RequestContext:
    """Get a place for a request; its record knows of it from then on.

    Args:
        placement: Gives places.
        asked: The request; if it streams, its body asks for the counts that are metered.
        record: Its account.
        shows_usage: Whether all streams of its model say their usage, whoever asks.

    Returns:
        The context as of now.

    Raises:
        HTTPError: when the router refuses it.
    """
    placing = TRACER.start_span("place", set_span_in_context(record.span))
    try:
        decision = await placement.place(asked.placement)
    except (asyncio.CancelledError, TaskCancelledError):
        # The router may give it a place all the same: it has taken nothing of that.
        record.meter = TokenMeter(asked.body, _admitted(asked.placement, None))
        record.answered(None)
        record.end(Outcome.CANCELLED)
        raise
    finally:
        placing.end()
    objective = asked.placement.objective
    if isinstance(decision, Rejected):
        raise _refusal(decision, objective, record)
    admitted = _admitted(asked.placement, decision)
    record.meter = TokenMeter(asked.body, admitted, shows_all=shows_usage)
    context = _context(record, asked, decision)
    if decision is None:
        record.placed(context.ttft_budget_s, None, objective.judged_ttft_s(None))
    else:
        record.placed(
            context.ttft_budget_s,
            decision.predicted_ttft_s,
            objective.judged_ttft_s(decision.promised_ttft_s),
            decision.decode_wait_s,
            decision.unattainable,
        )
    record.local_prefill = context.local_prefill
    return context.after(time.monotonic() - asked.arrived_s)


def response_headers(objective: Objective, record: RequestRecord) -> dict[str, str]:
    """Response headers that tell the client what it got."""
    budget_s = record.ttft_budget_s
    headers = {
        "x-slo-tier": objective.tier,
        "x-slo-ttft-budget-ms": "none" if budget_s is None else f"{budget_s * 1e3:.1f}",
    }
    if record.predicted_ttft_s is not None:
        headers["x-slo-predicted-ttft-ms"] = f"{record.predicted_ttft_s * 1e3:.1f}"
    if record.local_prefill == PlacementReason.CHEAPER_ON_DECODE:
        headers["x-slo-prefilled-by"] = "decode"
    elif record.local_prefill:
        headers["x-slo-degraded"] = "local_prefill"
    if objective.clamped_from is not None:
        headers["x-slo-tier-clamped-from"] = objective.clamped_from
    return headers


def _refusal(decision: Rejected, objective: Objective, record: RequestRecord) -> HTTPError:
    """What a request is answered with that the router refuses; its record knows of it from then on."""
    promised_s = objective.judged_ttft_s(decision.ttft_budget_s)
    record.placed(
        decision.ttft_budget_s, decision.predicted_ttft_s, promised_s, unattainable=decision.unattainable
    )
    record.refused(outcome_of(decision.reason), lacked_decode=decision.lacked_decode)
    refused = http_errors.rejected(decision, response_headers(objective, record), objective)
    return record.traced(refused)


def _admitted(asked: PlacementRequested, placed: Placed | None) -> Usage | None:
    """The most tokens that a request may take; None when nothing limits it.

    Without a placement as well: the router may have given one too late to be heard of. The length of a prompt
    that came as text is guessed then.
    """
    if not asked.counts_tokens:
        return None
    tokens = asked.prompt_tokens if placed is None else placed.tokens
    if tokens is None:
        tokens = PromptLengthEstimator().tokens(asked.prompt_bytes)
    return Usage(tokens * asked.answers_per_prompt, asked.output_tokens)


def _context(record: RequestRecord, asked: Asked, placed: Placed | None) -> RequestContext:
    """What the request's other processes need to know; without a placement they choose for themselves."""
    objective = asked.placement.objective
    context = RequestContext(
        record.job_id,
        record.request_id,
        objective.tier,
        objective.known_ttft_budget_s,
        prompt_bytes=asked.telling_bytes,
        explicit_deadline=asked.placement.explicit_deadline,
        tenant=asked.placement.tenant,
        traceparent=traceparent_of(record.span),
        tpot_s=objective.tpot_s,
        tenant_weight=1.0 if asked.placement.limit is None else asked.placement.limit.weight,
        explicit_e2e_s=asked.placement.explicit_e2e_s,
    )
    return at_place(context, placed)
