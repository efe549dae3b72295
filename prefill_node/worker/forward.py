"""One forward pass that can stop at a boundary and go on from a checkpoint.

Owns what the decoder layers do (`prefill_node.worker.boundary` wraps them), or the stretches of a compiled
pass (`prefill_node.worker.compiled`), and what happens at each boundary: bound the launch-ahead, publish
progress, vote, stop. After a stop the rest computes nothing and the pass leaves the model on its ordinary
way, so that whatever the model runner does around it is done; its result is meaningless and the worker drops
it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from prefill_node.board.board import Board
from prefill_node.worker.checkpoint import Checkpoint, Kept, Rows, hollow, map_tensors
from prefill_node.worker.launch_ahead import LaunchAhead
from prefill_node.worker.vote import VoteTransport
from prefill_node.worker.vote_errors import VoteTimeoutError

if TYPE_CHECKING:
    import torch


class ForwardStopped(Exception):  # noqa: N818 - control flow, not an error
    """Leaves the decoder layer in which the pass stopped; never leaves the layer's wrapper."""


class NoBoard:
    """For ranks on other hosts than the board: they learn of a stop from the vote."""

    def is_target(self, step_id: int) -> bool:  # noqa: ARG002 - nobody tells this rank
        """Whether this very step shall stop."""
        return False

    def reach(self, rank: int, step_id: int, boundary: int) -> None:
        """Publish the boundary that this rank has reached."""

    def vote_timed_out(self, rank: int) -> None:
        """Publish that a vote of this rank has timed out."""


Signal: TypeAlias = "Board | NoBoard"
"""The board as a worker sees it."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A forward pass that stopped.

    Attributes:
        boundary: Where it stopped: where its checkpoint goes on, or at an operator behind that.
        stopped_s: When, CLOCK_MONOTONIC.
    """

    boundary: int
    checkpoint: Checkpoint
    stopped_s: float


@dataclass(slots=True)
class Forward:
    """The forward pass that a worker runs, or none.

    Attributes:
        active: Whether a step runs; off in warm-up runs, whose layers just compute.
        resumed_from: The boundary where the pass began: 0, or that of the checkpoint it went on from.
    """

    rank: int
    signal: Signal
    votes: VoteTransport
    launch_ahead: LaunchAhead
    active: bool = False
    resumed_from: int = 0
    _step_id: int = 0
    _rows: Callable[[], Rows] = field(default=tuple)
    _kept: Kept | None = None
    _resume: Checkpoint | None = None
    _stop: Stop | None = None
    _started: bool = False
    _entering: Any = None
    _replies: list[Any] = field(default_factory=list)
    _replay: deque[Any] = field(default_factory=deque)
    _stand_in: Any = None
    _shape_of_output: Any = None
    _is_shape_known: bool = False
    _size: int = 0
    _sizes: set[int] = field(default_factory=set)

    def begin(
        self,
        step_id: int,
        rows: Callable[[], Rows],
        resume: Kept | None,
        at_s: Sequence[float] = (),
    ) -> None:
        """A step's forward pass starts.

        Args:
            step_id: The step.
            rows: Tells the rows of the batch, once the model runner has prepared it.
            resume: The checkpoint to go on from; one that does not hold all rows is ignored, and the pass
                starts at the first layer.
            at_s: When each boundary of a whole pass is reached, as predicted; empty where nothing is known.
        """
        self._step_id = step_id
        self._rows = rows
        self._kept, self._resume = resume, None
        self._stop = None
        self._started = False
        self.resumed_from = 0
        self.launch_ahead.start(at_s)
        self.active = True

    def end(self) -> Stop | None:
        """The forward pass is over; where it stopped, or None when it is complete. Drops its tensors."""
        if self.active and self._started and self._stop is None:
            self._sizes.add(self._size)
        self.active = False
        self._kept, self._resume = None, None
        self._entering = None
        self._stand_in = None
        self._replies.clear()
        self._replay.clear()
        stop, self._stop = self._stop, None
        return stop

    @property
    def resumes(self) -> bool:
        """Whether the pass that is about to start has a checkpoint to go on from."""
        return self._kept is not None

    def layer(self, span: range, compute: Callable[[], Any], tokens_of: Callable[[], torch.Tensor]) -> Any:
        """Run a decoder layer, or pass through it.

        Args:
            span: The boundaries at the layer's entry and within it.
            compute: The layer itself.
            tokens_of: One of the tensors that enter it, for the number of its rows.

        Returns:
            What the layer returns; what it returned before a checkpoint behind it; or, after a stop,
            zeros of that shape.
        """
        if self._stop is not None:
            return self._stand_in
        if not self._started:
            self._start()
        if self._resume is not None and self._resume.boundary >= span.stop:
            return self._entering
        with suppress(ForwardStopped):
            self._enter(span)
            output = compute()
        if self._stop is not None:  # what the layer had in hand is let go of by now
            self._stand_in = self._zeros(tokens_of)
            return self._stand_in
        self._entering = output
        if self._shape_of_output is None:
            self._shape_of_output = map_tensors(output, lambda tensor: tensor[:0].clone())
            self._is_shape_known = True
        return output

    def child(self, boundary: int | None, compute: Callable[[], Any]) -> Any:
        """Run a submodule of a layer, or repeat what it had returned before the pass stopped.

        Raises:
            ForwardStopped: when the pass stops at `boundary`, just before the submodule.
        """
        if self._replay:
            reply = self._replay.popleft()
        else:
            if boundary is not None:
                self._at(boundary)
            reply = compute()
        self._replies.append(reply)
        return reply

    def operator(self, boundary: int, resumes_at: int) -> None:
        """An operator within a submodule is next.

        Args:
            boundary: Its boundary.
            resumes_at: That of the half layer that it is in, where a pass that stops here goes on.

        Raises:
            ForwardStopped: when the pass stops here.
        """
        self._at(boundary, resumes_at)

    def walk(
        self, stretches: Sequence[Callable[[list[Any]], Any]], height: int, stand_in: Callable[[], Any]
    ) -> Any:
        """Run a compiled pass.

        It starts at its first stretch if its checkpoint is not of its height: all tensors of a compiled pass
        have the same, and what is left of a checkpoint has lost its padding.

        Args:
            stretches: One for each boundary, which begins there. Each takes what the one before it has
                returned, a list which it empties; the last one returns the outputs of the pass.
            height: Rows of the pass, with those that only pad the batch to the size of a CUDA graph.
            stand_in: Gives outputs for a pass that stops.

        Returns:
            The outputs of the pass.
        """
        self._is_shape_known = True
        self._start()
        resume, self._resume = self._resume, None
        if resume is not None and resume.height != height:
            resume, self.resumed_from = None, 0
        first, self._entering = (0, []) if resume is None else (resume.boundary, resume.entering)
        with suppress(ForwardStopped):
            for number in range(first, len(stretches)):
                self._at(number)
                self._entering = stretches[number](self._entering)
        if self._stop is not None:
            self._own_what_is_kept(height)
            self._entering = None
            return stand_in()
        return self._entering

    def _own_what_is_kept(self, height: int) -> None:
        """Copy it: parts of a larger tensor keep all of it, and a graph or a buffer may be written again."""
        assert self._stop is not None
        kept = self._stop.checkpoint
        entering = map_tensors(kept.entering, lambda tensor: tensor.clone())
        own = replace(kept, entering=entering, height=height)
        self._stop = replace(self._stop, checkpoint=own)

    def _start(self) -> None:
        """The first layer is reached: the batch is known."""
        self._started = True
        rows = self._rows()
        self._size = sum(tokens for _, tokens in rows).bit_length()
        self.votes.is_first_pass = self._size not in self._sizes
        kept, self._kept = self._kept, None
        if kept is not None:
            self._resume = kept.select(rows)
        if self._resume is not None:
            self._entering = self._resume.entering
            self.resumed_from = self._resume.boundary

    def _enter(self, span: range) -> None:
        self._replies.clear()
        resume, self._resume = self._resume, None
        if resume is not None:
            self._replay.extend(resume.replies)
        if resume is None or resume.boundary == span.start:
            self._at(span.start)

    def _at(self, boundary: int, resumes_at: int | None = None) -> None:
        """Go on, or stop together with all ranks."""
        self.launch_ahead.reach(boundary)
        self.signal.reach(self.rank, self._step_id, boundary)
        wish = self.signal.is_target(self._step_id)
        try:
            stops = self.votes.vote(self._step_id, boundary, wish and self._is_shape_known)
        except VoteTimeoutError:
            self.signal.vote_timed_out(self.rank)
            raise
        if stops:
            checkpoint = self._checkpoint(boundary if resumes_at is None else resumes_at)
            self._stop = Stop(boundary, checkpoint, time.monotonic())
            raise ForwardStopped

    def _checkpoint(self, resumes_at: int) -> Checkpoint:
        """What is needed to go on there: the last reply within the layer, or else what entered it.

        The layer's own code runs again and hands what is older to submodules that do not look at it.
        """
        replies = (*self._replies, *self._replay)
        if not replies:
            return Checkpoint(resumes_at, self._rows(), self._entering)
        return Checkpoint(
            resumes_at, self._rows(), hollow(self._entering), (*hollow(replies[:-1]), replies[-1])
        )

    def _zeros(self, tokens_of: Callable[[], torch.Tensor]) -> Any:
        """One tensor stands in for all outputs of one shape: nobody looks at what is computed of it."""
        rows = tokens_of().shape[0]
        made: dict[Any, torch.Tensor] = {}

        def zeros(tensor: torch.Tensor) -> torch.Tensor:
            like = (tensor.shape, tensor.dtype, tensor.device)
            if like not in made:
                made[like] = tensor.new_zeros((rows, *tensor.shape[1:]))
            return made[like]

        return map_tensors(self._shape_of_output, zeros)
