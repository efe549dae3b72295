"""A request as the router is asked for a place for it, and as it goes on once it has one.

Owns what of a body, its headers and its tenant counts for the place.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from deployments.http.body import asks
from deployments.http.body.prompt_size import prompt_size
from deployments.http.placing.prefix_hashes import prefix_hashes
from router.messages import Placed, PlacementReason, PlacementRequested
from slo.objectives import E2E_HEADER, TTFT_HEADERS, Objective
from slo.request import JobId, RequestContext

if TYPE_CHECKING:
    from starlette.datastructures import State


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for which a place is asked.

    Attributes:
        body: vLLM's chat or completion request.
        placement: What the router is asked, and in part again when the answer goes on elsewhere.
        arrived_s: When it came, on this process's monotonic clock.
    """

    body: Any
    placement: PlacementRequested
    arrived_s: float

    @classmethod
    def of(
        cls,
        body: Any,
        state: State,
        objective: Objective,
        job_id: JobId,
        arrived_s: float,
        output_tokens: int,
    ) -> Self:
        """The request whose body was read.

        Args:
            body: vLLM's chat or completion request.
            state: What the gatekeeper knows of the request.
            objective: What holds for it.
            job_id: What it is called.
            arrived_s: When it came, on this process's monotonic clock.
            output_tokens: The most that all its answers may have together.
        """
        size = prompt_size(body)
        prefix = prefix_hashes(body)
        placement = PlacementRequested(
            job_id=job_id,
            objective=objective,
            explicit_deadline=any(name in TTFT_HEADERS for name, _ in state.headers),
            prompt_tokens=size.tokens,
            prompt_bytes=size.text_bytes,
            elapsed_s=time.monotonic() - arrived_s,
            tenant=state.tenant.name,
            prefix_hashes=prefix.hashes,
            hash_block=prefix.block,
            prompt_hash=prefix.whole,
            limit=state.tenant.limit,
            key_limit=state.tenant.key_limit,
            answers_per_prompt=asks.answers_per_prompt(body),
            decode_samples_first=asks.decode_samples_first(body),
            output_tokens=output_tokens,
            prompts=asks.prompts(body),
            only_decode=asks.only_decode(body),
            explicit_e2e_s=objective.e2e_s if any(name == E2E_HEADER for name, _ in state.headers) else None,
        )
        return cls(body, placement, arrived_s)

    @property
    def telling_bytes(self) -> int:
        """Bytes of the prompt's text, whose tokens tell how long such texts are; 0 of one that may be cut."""
        is_cut = getattr(self.body, "truncate_prompt_tokens", None) is not None
        return 0 if is_cut else self.placement.prompt_bytes


def at_place(context: RequestContext, placed: Placed | None) -> RequestContext:
    """The context of a request at its place; without one the replicas are Serve's choice."""
    if placed is None:
        return replace(context, prefill_replica=None, decode_replica=None, cached_tokens=0, local_prefill="")
    is_left_to_decode = placed.prefill_replica is None and placed.reason is not PlacementReason.ONLY_DECODE
    return replace(
        context,
        ttft_budget_s=placed.ttft_budget_s,
        handoff_s=placed.handoff_s,
        prefill_replica=placed.prefill_replica,
        decode_replica=placed.decode_replica,
        cached_tokens=placed.cached_tokens,
        local_prefill=placed.reason.value if is_left_to_decode else "",
    )
