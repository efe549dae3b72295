"""A request as the router and the nodes see it, and the context that travels with it.

Owns the identity of a request and the one message that carries its objective from process to process.
Remaining budgets travel, never timestamps: clocks of two hosts need not agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, NewType

import msgspec

from slo.model_digest import UNTOLD, ModelDigest
from slo.protocol import PROTOCOL, check
from slo.tiers import Tier

JobId = NewType("JobId", str)
"""Unique per accepted request; the client's own request id may repeat and is only logged."""
ReplicaId = NewType("ReplicaId", str)

CONTEXT_HEADER: Final = "x-slackserve-context"
REQUEST_ID_HEADER: Final = "x-request-id"
INTERNAL_HEADER_PREFIX: Final = "x-slackserve-"
"""Headers that only the server itself may set."""
HANDSHAKE_DUE_S: Final = 10.0
"""Within so long a prefill replica answers a decode replica that shakes hands with it."""
RESERVED_XARG_PREFIX: Final = "slackserve_"
"""Engine arguments (`vllm_xargs`) that only the server itself may set."""
JOB_XARG: Final = "slackserve_job"
DEADLINE_XARG: Final = "slackserve_deadline_s"
"""Local deadline of the prefill, seconds on this host's CLOCK_MONOTONIC; absent for none."""
WEIGHT_XARG: Final = "slackserve_weight"
"""The weight of its tier."""
TIER_XARG: Final = "slackserve_tier"
TENANT_XARG: Final = "slackserve_tenant"
TPOT_XARG: Final = "slackserve_tpot_s"
"""Its objective for the time per output token, seconds; absent for none."""
FIRST_DUE_XARG: Final = "slackserve_first_due_s"
"""When a first token is due that decode samples, seconds on this host's CLOCK_MONOTONIC; absent for none."""
DECODE_SINCE_XARG: Final = "slackserve_decode_since_s"
"""When the decode engine was first given the request, seconds on this host's CLOCK_MONOTONIC."""
SEARCH_STEP_XARG: Final = "slackserve_search_step"
"""Of a step of a beam search, whether the search has had its first; absent for any other request."""
ARRIVED_XARG: Final = "slackserve_arrived_s"
"""When the request reached the replica, seconds on this host's CLOCK_MONOTONIC."""
PREDICTOR_XARG: Final = "slackserve_predictor"
"""The replica's predictor, as `PrefillPredictor.encode` writes it; without the handoff."""
STOP_BOUND_XARG: Final = "slackserve_stop_bound"
"""How soon steps must be able to stop: `slo.queue.chunks.StopBound`, encoded; absent for no bound."""
BEGUN_XARG: Final = "slackserve_begun"
"""Prefills that the replica has begun, this one included; see `prefill_node.release`."""
CACHED_XARG: Final = "slackserve_cached"
"""Prompt tokens that the prefix cache is expected to hold; absent for none."""
ENGINE_DIED: Final = "engine_died"
"""Type of the error that a replica answers with when its engine is dead."""
ATTEMPTS_PER_PLACE: Final = 100
"""A decode replica has so many attempts at a prefill before the next replica's begin."""


class Party(NamedTuple):
    """Whose a request is, and what it is worth to them."""

    tenant: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What the ingress decided about a request, for every process that handles it.

    Attributes:
        job_id: Identity inside the deployment.
        request_id: What the client and the logs call it.
        ttft_budget_s: Seconds left until its first token is due, at the moment of sending; None for never.
        handoff_s: Predicted seconds from the end of prefill to the first token.
        prefill_replica: Where it was placed; None lets any replica take it.
        decode_replica: Where it decodes; None lets any replica take it.
        prompt_bytes: Size of the prompt's text, 0 when it came as tokens or may be cut.
        cached_tokens: Prompt tokens whose KV the prefill replica is expected to have in its prefix cache.
        explicit_deadline: Whether the client itself named the budget for the first token.
        failed_replicas: Replicas that failed with the request; it is not sent there again.
        tenant: Whose it is.
        traceparent: Continues the trace of whoever sends it, as the W3C has it; empty for none.
        attempt: How often it has been placed again.
        local_prefill: Why the decode replica computes the prompt itself; empty when it does not.
        tpot_s: Objective for the time per output token; None for none.
        tenant_weight: The tenant's part of what it shares with others, relative to theirs.
        digest: Of the model that has generated what is delivered of its answer; only that goes on with it.
        explicit_e2e_s: Seconds left of the client's own budget for the whole answer; None for none. With one
            there is a `ttft_budget_s`, too.
    """

    job_id: JobId
    request_id: str
    tier: Tier
    ttft_budget_s: float | None
    handoff_s: float = 0.0
    prefill_replica: ReplicaId | None = None
    decode_replica: ReplicaId | None = None
    prompt_bytes: int = 0
    cached_tokens: int = 0
    explicit_deadline: bool = False
    failed_replicas: tuple[ReplicaId, ...] = ()
    tenant: str = ""
    traceparent: str = ""
    attempt: int = 0
    local_prefill: str = ""
    tpot_s: float | None = None
    tenant_weight: float = 1.0
    digest: ModelDigest = UNTOLD
    explicit_e2e_s: float | None = None

    @property
    def attempt_id(self) -> JobId:
        """What a prefill replica calls the job: another name for each attempt, so that none ends another."""
        return self.job_id if self.attempt == 0 else JobId(f"{self.job_id}#{self.attempt}")

    @property
    def party(self) -> Party:
        """Whose it is."""
        return Party(self.tenant, self.tier)

    def after(self, elapsed_s: float) -> RequestContext:
        """The same context with `elapsed_s` of its budgets spent."""
        if self.ttft_budget_s is None:
            return self
        e2e_s = None if self.explicit_e2e_s is None else self.explicit_e2e_s - elapsed_s
        return replace(self, ttft_budget_s=self.ttft_budget_s - elapsed_s, explicit_e2e_s=e2e_s)

    def for_prefill(self) -> RequestContext:
        """The same context with the budget that prefill may use: all but the handoff."""
        return self.after(self.handoff_s)

    def next_attempt(self) -> RequestContext:
        """The same context for another attempt, which is placed nowhere yet."""
        return replace(self, prefill_replica=None, prompt_bytes=0, cached_tokens=0, attempt=self.attempt + 1)

    def encode(self) -> str:
        """One header value, ASCII: the version of the protocol, then the context."""
        return f"{PROTOCOL} {_ENCODER.encode(self).decode()}"

    @staticmethod
    def from_headers(headers: Mapping[str, str]) -> RequestContext | None:
        """The context among a request's headers; None when the server's ingress set none."""
        text = headers.get(CONTEXT_HEADER)
        return None if text is None else RequestContext.decode(text)

    @staticmethod
    def decode(text: str) -> RequestContext:
        """Read a header value written by `encode`.

        Raises:
            OtherProtocolError: when a process that speaks another protocol has written it.
            msgspec.ValidationError: when it is not one.
        """
        version, _, content = text.partition(" ")
        check(int(version) if version.isdigit() else version)
        return _DECODER.decode(content)


def job_of(attempt_id: JobId) -> JobId:
    """The job that an attempt is of, see `RequestContext.attempt_id`."""
    job_id, _, attempt = attempt_id.rpartition("#")
    return JobId(job_id) if attempt.isdigit() and job_id else attempt_id


def attempt_of(attempt_id: JobId) -> int:
    """Which attempt at its job it is, 0 for the first."""
    attempt = attempt_id.rpartition("#")[2]
    return int(attempt) if job_of(attempt_id) != attempt_id else 0


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(RequestContext)
