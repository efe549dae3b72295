"""How a vote fails, and when not yet."""

from __future__ import annotations

from typing import Final

FIRST_PASS_S: Final = 300.0
"""A rank may compile a kernel in the first pass of a size; vLLM gives up a step after this."""


class VoteTimeoutError(RuntimeError):
    """Not all ranks came to a vote within its limit.

    Attributes:
        absent: The ranks that did not come; empty when they have come after all, too late for this vote.
        boundary: The boundary that this rank voted at.
    """

    def __init__(self, absent: tuple[int, ...], step_id: int, boundary: int, waited_s: float) -> None:
        who = f"rank {', '.join(map(str, absent))}" if absent else "a rank that has come since"
        super().__init__(
            f"vote at boundary {boundary} of step {step_id}: {who} did not come within {waited_s:.1f} s; "
            "it died, hangs, left the forward pass or is slow: look at its worker's log and restart the "
            "engine, with a longer limit on votes if it was only slow"
        )
        self.absent = absent
        self.step_id = step_id
        self.boundary = boundary
        self.waited_s = waited_s


class VoteMismatchError(RuntimeError):
    """Ranks met in one vote on different steps or boundaries: they do not run the same work.

    Attributes:
        step_id: The step that this rank voted on.
        boundary: The boundary that this rank voted at.
        met: Step and boundary of another rank.
    """

    def __init__(self, step_id: int, boundary: int, who: str, met: tuple[int, int]) -> None:
        super().__init__(
            f"vote at boundary {boundary} of step {step_id}: {who} votes at boundary {met[1]} of step "
            f"{met[0]}; ranks that run different work cannot stop together: restart the engine and report "
            "its workers' logs"
        )
        self.step_id = step_id
        self.boundary = boundary
        self.met = met
