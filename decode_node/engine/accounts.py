"""What the scheduler of a decode engine remembers of each request beyond vLLM's own record of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from decode_node.requests.dropping import MAY_DROP_XARG
from decode_node.requests.leaving import MAY_LEAVE_XARG
from sampling.carried import Carried
from slo.request import (
    DECODE_SINCE_XARG,
    FIRST_DUE_XARG,
    JOB_XARG,
    SEARCH_STEP_XARG,
    TENANT_XARG,
    TIER_XARG,
    TPOT_XARG,
    JobId,
)
from slo.tiers import SYSTEM, Tier

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Away(NamedTuple):
    """A request that has left, until it comes back.

    Attributes:
        preemptions: How often its memory was taken.
        arrived_s: When it reached the engine first.
        since_s: When its memory was taken.
        left_s: When it left.
        tokens: Whose KV is to be computed.
        first_s: When its first token was there.
        first_tokens: How many tokens it had then.
    """

    preemptions: int
    arrived_s: float
    since_s: float
    left_s: float
    tokens: int
    first_s: float | None
    first_tokens: int


@dataclass(slots=True)
class StreamAccount:
    """One request.

    Attributes:
        job: The router's name for it; the engine's when it has none.
        tier: Its tier; the server's own requests have none of the clients'.
        tenant: Whose it is.
        tpot_s: Its objective; None for none.
        arrived_s: When it reached the engine, first if it is back because its KV could not be pulled.
        first_due_s: When its first token is due, if it is sampled here; None for no deadline.
        first_s: When its first token was there; None before that.
        first_tokens: How many tokens it had then.
        started_tokens: How many tokens it had when it started, or started again.
        parked_s: When its memory was taken; None while it has it.
        lost_tokens: Tokens that it has to compute again for that.
        left_out_s: When it had its latest token, while steps leave it out; None otherwise.
        may_leave: Whether the prefill tier can compute its KV again.
        pulls: Whether its KV comes from there.
        way_s: How long it was away from the engine, once it is back.
        pulls_since_s: When it got memory to pull its KV into; None before that.
        preemptions_before: How often its memory had been taken before it left.
        may_drop: Whether it may be ended for good.
        is_answer: Whether it is all of an answer, and not one step of a beam search.
        ahead_s: By how much earlier it has its place among newcomers: of such a step, that of its search.
    """

    job: JobId
    tier: Tier
    tenant: str
    tpot_s: float | None
    arrived_s: float
    first_s: float | None
    first_tokens: int
    started_tokens: int
    parked_s: float | None = None
    lost_tokens: int = 0
    left_out_s: float | None = None
    may_leave: bool = False
    pulls: bool = False
    way_s: float = 0.0
    pulls_since_s: float | None = None
    preemptions_before: int = 0
    may_drop: bool = False
    first_due_s: float | None = None
    is_answer: bool = True
    ahead_s: float = 0.0

    @staticmethod
    def of(request: Request, now_s: float) -> StreamAccount:
        """Of one that arrives; what has been generated of it elsewhere is with its client already."""
        sampling = request.sampling_params
        given = {} if sampling is None else sampling.extra_args or {}
        brought = 0 if (carried := Carried.of(sampling)) is None else len(carried.token_ids)
        tpot_s, first_due_s = given.get(TPOT_XARG), given.get(FIRST_DUE_XARG)
        since_s = float(given.get(DECODE_SINCE_XARG, now_s))
        is_step = SEARCH_STEP_XARG in given
        return StreamAccount(
            JobId(given.get(JOB_XARG) or request.request_id),
            Tier(given.get(TIER_XARG) or SYSTEM),
            str(given.get(TENANT_XARG) or ""),
            None if tpot_s is None else float(tpot_s),
            now_s if is_step else since_s,
            since_s if brought or given.get(SEARCH_STEP_XARG) else None,
            brought,
            brought,
            may_leave=bool(given.get(MAY_LEAVE_XARG)),
            pulls=bool((request.kv_transfer_params or {}).get("do_remote_prefill")),
            may_drop=bool(given.get(MAY_DROP_XARG)),
            first_due_s=None if first_due_s is None else float(first_due_s),
            is_answer=not is_step,
            ahead_s=now_s - since_s if is_step else 0.0,
        )

    def is_back(self, away: Away, now_s: float) -> None:
        """The request has left before; it is no newcomer."""
        self.way_s = now_s - away.left_s
        self.arrived_s, self.parked_s, self.lost_tokens = away.arrived_s, away.since_s, away.tokens
        self.first_s, self.first_tokens = away.first_s, away.first_tokens
        self.preemptions_before = away.preemptions

    def leaves(self, preemptions: int, tokens: int, now_s: float) -> Away:
        """What is to be remembered of the request until it comes back."""
        since_s = now_s if self.parked_s is None else self.parked_s
        return Away(preemptions, self.arrived_s, since_s, now_s, tokens, self.first_s, self.first_tokens)

    def credit_s(self, emitted: int, now_s: float) -> float:
        """By how much a stream of so many tokens is ahead of its objective; infinite without one."""
        if self.tpot_s is None:
            return math.inf
        if self.first_s is None:
            return 0.0
        return self.first_s + (emitted - self.first_tokens) * self.tpot_s - now_s
