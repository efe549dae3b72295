"""Whether decode computes a prompt itself although the prefill tier could.

The way through the prefill tier costs a short prompt the queue there, the handoff, and the way of its KV
cache. Computing it among decode's tokens costs each stream that runs there what its tokens add to a step.
"""

from __future__ import annotations

from router.fleet.decode_replica import DecodeView
from router.placement.policies import Choice
from slo.predict.handoff import TransferFit


def is_cheaper_on_decode(
    tokens: int, choice: Choice, decode: DecodeView, now_s: float, link: TransferFit | None
) -> bool:
    """Whether it delays this prompt and the streams together less than prefill would delay the prompt.

    Decode is taken to compute as fast as the prefill replica; what it has of the prompt in its cache is not
    known. What a pass costs in any case, its streams' step costs as well: only the tokens' part delays them.

    Args:
        tokens: Of the prompt.
        choice: Where and when the prefill tier would compute it.
        decode: The replica that would do it instead, with its streams.
        now_s: The router's clock.
        link: What KV moves over; None when that is part of the handoff.
    """
    predictor = choice.replica.predictor
    pass_s = predictor.prefill_s(tokens)
    transfer_s = 0.0 if link is None else link.transfer_s(tokens)
    remote_s = choice.end_s - now_s + predictor.handoff_s + transfer_s
    return pass_s + decode.streams_soon * (pass_s - predictor.least_s) < remote_s
