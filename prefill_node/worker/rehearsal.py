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
_PASSES: Final = (0, 1)
"""The first tokens of two passes, which have no token in the same place."""


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
    run: Callable[[int], torch.Tensor],
    seen: Callable[[Checkpoint], None] = lambda _: None,
) -> str:
    """What keeps a pass from being resumed exactly; empty for nothing. All ranks call it together.

    Args:
        forward: The model's forward pass; no step runs.
        boundaries: How many one pass has.
        tokens: Rows of the batch that `run` computes.
        run: Runs a whole pass and returns its hidden states, of shape [tokens, width]; with another number
            it is over other tokens in all places.
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
    run: Callable[[int], torch.Tensor],
    seen: Callable[[Checkpoint], None],
) -> str:
    def begin(checkpoint: Checkpoint | None) -> None:
        forward.begin(_STEP_ID, lambda: (("rehearsal", tokens),), checkpoint)

    expected = [run(first) for first in _PASSES]
    begin(None)
    again = run(_PASSES[0])
    forward.end()
    if not torch.equal(again, expected[0]) or not all(each.isfinite().all() for each in expected):
        return "two undisturbed passes of it do not end with the same values"
    kept: list[Checkpoint | None] = [None for _ in _PASSES]
    for script.stop_at in range(boundaries):
        for number, first in enumerate(_PASSES):
            begin(kept[number])
            run(first)
            if (stop := forward.end()) is None or stop.boundary != script.stop_at:
                return f"a pass of it does not stop at boundary {script.stop_at}"
            kept[number] = stop.checkpoint
            if number == 0:
                seen(stop.checkpoint)
    script.stop_at = None
    for number, first in enumerate(_PASSES):
        begin(kept[number])
        output = run(first)
        forward.end()
        if not torch.equal(output, expected[number]):
            return "a pass of it that is stopped and resumed ends with other values than an undisturbed one"
    return ""
