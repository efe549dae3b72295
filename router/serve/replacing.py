"""A lost prefill as a request for a place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.messages import PlacementRequested
from slo.objectives import Objective

if TYPE_CHECKING:
    from slo.replacement import ReplacementRequested


def again(request: ReplacementRequested) -> PlacementRequested:
    """The same request with what is left of its budget, bound to its decode replica."""
    return PlacementRequested(
        job_id=request.job_id,
        objective=Objective(request.tier, request.ttft_budget_s, None),
        explicit_deadline=request.explicit_deadline,
        prompt_tokens=request.tokens,
        prompt_bytes=0,
        failed_replicas=request.failed_replicas,
        decode_replica=request.decode_replica,
        is_admitted=True,
    )
