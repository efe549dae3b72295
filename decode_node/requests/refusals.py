"""What a request is answered with that decode does not go on with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from decode_node.answers import NOTHING_ALLOWED, EngineError
from slo.errors import EvictionReason, RejectionReason
from slo.replacement import ReplacementOutcome

_NOT_REPLACED: Final[Mapping[ReplacementOutcome, EngineError]] = {
    ReplacementOutcome.LIMIT: EngineError(
        "one replica after the other failed while it computed the prompt; try again", "prefill_failed", 503
    ),
    ReplacementOutcome.DEADLINE: EngineError(
        "the replica that computed the prompt failed, and no other can give the first token in time; "
        "retry later, or ask for a longer x-slo-ttft-ms",
        EvictionReason.DEADLINE_PASSED.value,
        429,
    ),
    ReplacementOutcome.NO_REPLICA: EngineError(
        "the replica that computed the prompt failed, and no other is running; try again later",
        "prefill_failed",
        503,
        param="10",
    ),
}
_NOT_BEGUN: Final = EngineError(
    "no prefill replica is running; try again when one has been started",
    RejectionReason.NO_REPLICA.value,
    503,
)
ENDED_BY_GRAMMAR: Final = EngineError(
    "the answer cannot go on: no token that conforms to what it must conform to is allowed by the "
    "request's other parameters, such as allowed_token_ids, bad_words and min_tokens",
    NOTHING_ALLOWED,
    400,
    param="structured_outputs",
)
"""Of one whose own grammar ends its answer."""


def not_replaced(outcome: ReplacementOutcome, *, is_begun: bool) -> EngineError | None:
    """Of one whose prefill has failed; None for one that is placed again.

    Args:
        outcome: Whether it is.
        is_begun: Whether a replica may have computed something of it.
    """
    if outcome is ReplacementOutcome.NO_REPLICA and not is_begun:
        return _NOT_BEGUN
    return _NOT_REPLACED.get(outcome)
