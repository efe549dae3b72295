"""Whether a loaded model's forward pass resumes exactly: seen before the first request, not assumed.

A model may compute between its decoder layers, keep a state of its own or write over what it was given; then
a pass that went on from a checkpoint would end with other values, and nothing would tell. So a pass of dummy
tokens runs once undisturbed, and once stopped at every boundary in turn. Owns that comparison; what follows
from it is the worker's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from prefill_node.worker.checkpoint import Checkpoint
from prefill_node.worker.forward import Forward, NoBoard

TOKENS: Final = 32
_STEP_ID: Final = 1


class _Script(NoBoard):
    """In place of board and vote: every rank stops at the same boundary, which it knows beforehand."""

    stop_at: int | None = None
    is_first_pass = False

    def vote(self, step_id: int, boundary: int, wish: bool) -> bool:  # noqa: ARG002, FBT001 - as a vote
        """Whether this is the place."""
        return boundary == self.stop_at


def why_inexact(
    forward: Forward,
    boundaries: int,
    tokens: int,
    run: Callable[[], torch.Tensor],
    seen: Callable[[Checkpoint], None] = lambda _: None,
) -> str:
    """What keeps a pass from being resumed exactly; empty for nothing. All ranks call it together.

    Args:
        forward: The model's forward pass; no step runs.
        boundaries: How many one pass has.
        tokens: Rows of the batch that `run` computes.
        run: Runs the whole pass and returns its hidden states, of shape [tokens, width].
        seen: Is told the checkpoint of each boundary, in order.
    """
    signal, votes, script = forward.signal, forward.votes, _Script()
    forward.signal, forward.votes = script, script
    try:
        return _compare(forward, script, boundaries, tokens, run, seen)
    finally:
        forward.end()
        forward.signal, forward.votes = signal, votes


def _compare(
    forward: Forward,
    script: _Script,
    boundaries: int,
    tokens: int,
    run: Callable[[], torch.Tensor],
    seen: Callable[[Checkpoint], None],
) -> str:
    def begin(checkpoint: Checkpoint | None) -> None:
        forward.begin(_STEP_ID, lambda: (("rehearsal", tokens),), checkpoint)

    expected = run()
    begin(None)
    again = run()
    forward.end()
    if not torch.equal(again, expected) or not expected.isfinite().all():
        return "two undisturbed passes of it do not end with the same values"
    checkpoint = None
    for script.stop_at in range(boundaries):
        begin(checkpoint)
        run()
        if (stop := forward.end()) is None or stop.boundary != script.stop_at:
            return f"a pass of it does not stop at boundary {script.stop_at}"
        checkpoint = stop.checkpoint
        seen(checkpoint)
    script.stop_at = None
    begin(checkpoint)
    if not torch.equal(run(), expected):
        return "a pass of it that is stopped and resumed ends with other values than an undisturbed one"
    return ""
