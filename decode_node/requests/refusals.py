"""What a request is answered with that decode does not go on with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from decode_node.answers import ENDED_BY_GRAMMAR, EngineError
from slo.errors import NO_REPLICA_RETRY_S, EvictionReason, RejectionReason
from slo.replacement import ReplacementOutcome

_NOT_REPLACED: Final[Mapping[ReplacementOutcome, EngineError]] = {
    ReplacementOutcome.LIMIT: EngineError(
        "one replica after the other failed while it computed the prompt; try again", "prefill_failed", 503
    ),
    ReplacementOutcome.DEADLINE: EngineError(
        "the replica that computed the prompt failed, and no other can give the first token in time; "
        "retry later, or ask for a longer x-slo-ttft-ms or x-slo-e2e-ms",
        EvictionReason.DEADLINE_PASSED.value,
        429,
    ),
    ReplacementOutcome.NO_REPLICA: EngineError(
        "the replica that computed the prompt failed, and no other is running; try again later",
        "prefill_failed",
        503,
        param=str(NO_REPLICA_RETRY_S),
    ),
}
_NOT_BEGUN: Final = EngineError(
    "no prefill replica is running; try again when one has been started",
    RejectionReason.NO_REPLICA.value,
    503,
)
NOTHING_ALLOWED: Final = EngineError(
    "the answer cannot go on: no token that conforms to what it must conform to is allowed by the "
    "request's other parameters, such as allowed_token_ids, bad_words and min_tokens",
    ENDED_BY_GRAMMAR,
    400,
    param="structured_outputs",
)
"""Of one whose answer may go on with no token."""
GRAMMAR_TOO_SLOW: Final = EngineError(
    "the answer was ended before it was complete: finding out which tokens it may go on with took too long; "
    "write what it must conform to so that a text can be read in one way only (a list as its item repeated, "
    "not as two lists; no rule that matches nothing beside itself), or ask for a shorter answer",
    ENDED_BY_GRAMMAR,
    400,
    param="structured_outputs",
)
"""Of one whose grammar takes the engine too long, see `decode_node.grammars.bounded`."""


def not_replaced(outcome: ReplacementOutcome, *, is_begun: bool) -> EngineError | None:
    """Of one whose prefill has failed; None for one that is placed again.

    Args:
        outcome: Whether it is.
        is_begun: Whether a replica may have computed something of it.
    """
    if outcome is ReplacementOutcome.NO_REPLICA and not is_begun:
        return _NOT_BEGUN
    return _NOT_REPLACED.get(outcome)
