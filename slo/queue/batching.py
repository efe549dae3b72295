"""Which waiting prefills share the next forward pass.

Owns the rule that decides how far down the ordered queue one step reaches. Does not order the queue (see
`slo.queue.order`) and knows nothing of KV memory.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Final

import msgspec

from slo.predict.prefill_time import PrefillPredictor
from slo.queue.chunks import StopBound

STEP_TOKENS: Final = 8192
"""Default maximum of tokens in one step. A longer prompt is prefilled in chunks of this many, which fill a
device as well as larger ones do and have their boundaries closer together; where those are still too far
apart, in smaller ones (`slo.queue.chunks`)."""


class Candidate(msgspec.Struct, frozen=True):
    """A prefill that could join the next step.

    Attributes:
        tokens: Prompt tokens still to compute.
        deadline_s: When its prefill must end; infinite for none.
        pairs: The `slo.predict.prefill_time.attention_pairs` of those tokens.
    """

    tokens: int
    deadline_s: float
    pairs: float = 0.0


class StepLimit(enum.StrEnum):
    """What ended the composition of a step."""

    QUEUE_EMPTY = "queue_empty"
    TOKEN_BUDGET = "token_budget"  # noqa: S105 - tokens of text
    SLACK = "slack"
    STOP = "stop"
    """A larger step could not be stopped soon enough."""


JOIN_MARGIN: Final = 1.05
"""How many times its predicted time a shared pass is assumed to take."""


class Step(msgspec.Struct, frozen=True):
    """How many of the first candidates run together, and why no more."""

    size: int
    limit: StepLimit


def compose_step(
    candidates: Sequence[Candidate],
    now_s: float,
    predictor: PrefillPredictor,
    token_budget: int,
    stop: StopBound | None = None,
) -> Step:
    """Choose the longest prefix of `candidates` in which sharing the pass makes nobody late.

    A forward pass ends for all its requests at once, so each further request delays those already in it. One
    joins only if every member that would be on time without it is still on time with it, should the pass take
    `JOIN_MARGIN` times its predicted time, and if the whole can still be stopped as soon as it must be. The
    first candidate always runs. The step starts at `now_s`; the candidates come most urgent first.
    """
    if not candidates:
        return Step(0, StepLimit.QUEUE_EMPTY)
    tokens, pairs = candidates[0].tokens, candidates[0].pairs
    earliest_deadline_s = _binding_deadline_s(candidates[0], now_s + predictor.pass_s(tokens, pairs))
    for size, candidate in enumerate(candidates[1:], start=1):
        if tokens + candidate.tokens > token_budget:
            return Step(size, StepLimit.TOKEN_BUDGET)
        tokens += candidate.tokens
        pairs += candidate.pairs
        pass_s = predictor.pass_s(tokens, pairs)
        if now_s + JOIN_MARGIN * pass_s > earliest_deadline_s:
            return Step(size, StepLimit.SLACK)
        if stop is not None and not stop.is_kept(tokens, pairs, predictor):
            return Step(size, StepLimit.STOP)
        earliest_deadline_s = min(earliest_deadline_s, _binding_deadline_s(candidate, now_s + pass_s))
    return Step(len(candidates), StepLimit.QUEUE_EMPTY)


def _binding_deadline_s(candidate: Candidate, end_s: float) -> float:
    """Its deadline if a step that ends at `end_s` meets it, else infinity: an infeasible one binds nobody."""
    return candidate.deadline_s if end_s <= candidate.deadline_s else math.inf
