"""How the ranks of a running step agree to stop: a vote at every boundary, and its limit in time.

Every rank calls `vote` at the same boundaries of the same steps, with `board.is_target(step_id)` as its
wish, before anything else there that can leave the forward pass. Ranks look at the target at different times
and may differ; the answer, the OR over all of them, is the same for all. When a step stops is
`prefill_node.replica.governing.governor`'s business, what stopping means the worker's.

A transport that has failed stays failed: a rank that went on after its peers gave up could stop where they do
not. The engine is restarted, with a new board.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Protocol

from prefill_node.board.board import Board
from prefill_node.board.layout import BOUNDARY_BITS, STEP_BITS, vote_words
from prefill_node.board.segment import BoardUnavailableError
from prefill_node.worker.vote_errors import FIRST_PASS_S, VoteMismatchError, VoteTimeoutError
from slo.liveness import StallAccount

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_WISH_BITS = 1
_STEP_AT = _WISH_BITS + BOUNDARY_BITS
_LAP_AT = _STEP_AT + STEP_BITS
_LAP_MASK = (1 << (64 - _LAP_AT)) - 1

# A peer that votes at the same moment on a core of its own is there within microseconds: look again at once.
# One that shares this core must be let run first. One that still computes needs the core more than we do.
_SPINS = 400
_YIELDS = 100
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 500e-6


class VoteTransport(Protocol):
    """What carries votes between the ranks.

    Attributes:
        is_first_pass: Whether the running pass is the first of its size, in which ranks may come late.
    """

    is_first_pass: bool

    def vote(self, step_id: int, boundary: int, wish: bool) -> bool:  # noqa: FBT001 - the ballot itself
        """Whether any rank wishes to stop here; the same answer for all ranks.

        Args:
            step_id: The running step, below 2^40.
            boundary: The boundary that it has reached, below 2^16.
            wish: Whether this rank has seen the order to stop the step.

        Raises:
            VoteTimeoutError: Another rank did not come within the limit.
            VoteMismatchError: Another rank is somewhere else.
        """
        ...


class SoleVote:
    """The vote of a step that runs on one rank."""

    is_first_pass = False

    def vote(self, step_id: int, boundary: int, wish: bool) -> bool:  # noqa: ARG002, FBT001 - protocol
        """The rank's own wish."""
        return wish


class BoardVote:
    """Votes through the board, for ranks that share a host.

    A vote is a round. Each rank has two cells, used in turn, and writes into one of them a single word: the
    round's lap (the round halved, 7 bits), step (40), boundary (16) and wish (1). It then reads the same
    cell of every peer until each holds a word of that lap, and answers with the OR of the wishes.

    Why this is exact. A rank begins round r+1 only when it has read every peer's word of round r, so nobody
    is ever two rounds ahead of anybody. A cell is used again in round r+2, which its owner begins when all
    have written their word of r+1, hence have read all words of r: no word is overwritten before everybody
    has read it. All ranks thus evaluate the same words, and come to the same answer or the same mismatch. A
    cell read in round r holds r's word or the one of r-2, and the lap tells them apart. As one word says
    everything, and the next is written only after a branch on those read before, no order between words is
    asked of the memory.
    """

    def __init__(self, board: Board, rank: int, timeout_s: float) -> None:
        """Take the rank's seat on a board, once in the board's life.

        Raises:
            BoardUnavailableError: The rank has voted on this board in an earlier life.
        """
        self.timeout_s = timeout_s
        self.is_first_pass = False
        self._words = board.words
        self._own = vote_words(rank)
        self._peers = tuple(
            tuple((peer, vote_words(peer)[parity]) for peer in range(board.ranks) if peer != rank)
            for parity in (0, 1)
        )
        self._round = 1  # the first vote is round 2, lap 1: an unused cell reads as lap 0, still to come
        self._failure: VoteTimeoutError | VoteMismatchError | None = None
        if any(self._words[cell] for cell in self._own):
            remedy = "restart all ranks together, with a new board"
            raise BoardUnavailableError(board.path, f"rank {rank} has voted on it in an earlier life", remedy)

    def vote(self, step_id: int, boundary: int, wish: bool) -> bool:  # noqa: FBT001 - protocol
        """See `VoteTransport.vote`."""
        if self._failure is not None:
            raise self._failure
        if step_id >> STEP_BITS or boundary >> BOUNDARY_BITS:
            raise ValueError(f"step {step_id}, boundary {boundary}: does not fit into a vote")
        words = self._words
        self._round += 1
        parity = self._round & 1
        place = (self._round >> 1 & _LAP_MASK) << _LAP_AT | step_id << _STEP_AT | boundary << _WISH_BITS
        words[self._own[parity]] = place | wish
        verdict: int = wish
        pauses = None
        for peer, cell in self._peers[parity]:
            word = words[cell]
            if word & ~1 != place:
                if pauses is None:
                    pauses = _pauses(self._limit_s)
                word = self._await(peer, cell, place, pauses)
            verdict |= word & 1
        return bool(verdict)

    @property
    def _limit_s(self) -> float:
        return max(self.timeout_s, FIRST_PASS_S) if self.is_first_pass else self.timeout_s

    def _await(self, peer: int, cell: int, place: int, pauses: Iterator[None]) -> int:
        """The peer's word of this round."""
        lap_before = (place >> _LAP_AT) - 1 & _LAP_MASK
        for _ in pauses:
            word = self._words[cell]
            if word & ~1 == place:
                return word
            if word >> _LAP_AT != lap_before:
                self._failure = VoteMismatchError(*_where(place), f"rank {peer}", _where(word))
                raise self._failure
        lap = place >> _LAP_AT
        absent = tuple(
            each
            for each, its_cell in self._peers[self._round & 1]
            if each == peer or self._words[its_cell] >> _LAP_AT != lap
        )
        self._failure = VoteTimeoutError(absent, *_where(place), self._limit_s)
        raise self._failure


def choose_transport(
    rank: int,
    ranks: int,
    timeout_s: float,
    *,
    same_host: bool,
    board: Board | None,
    group: ProcessGroup | None,
) -> VoteTransport:
    """The cheapest transport that reaches all ranks.

    `same_host` says whether all ranks have attached to `board`, which is needed on one host only. `group` is
    the one for CPU tensors, needed across hosts only, where the answer comes one boundary late.
    """
    if ranks == 1:
        return SoleVote()
    if same_host:
        assert board is not None
        return BoardVote(board, rank, timeout_s)
    from prefill_node.worker.allreduce_vote import LateVote  # noqa: PLC0415 - torch only where it is used

    assert group is not None
    return LateVote(group, rank, ranks, timeout_s)


def _pauses(limit_s: float) -> Iterator[None]:
    """Yield between two looks, with longer and longer pauses, until the limit has passed.

    The time in which it was itself frozen does not count: those that it waits for may have been frozen, too.
    """
    yield from repeat(None, _SPINS)
    waited = StallAccount()
    waited.look(None, has_work=True, now_s=time.monotonic())
    for _ in range(_YIELDS):
        os.sched_yield()
        yield
    pause_s = _FIRST_PAUSE_S
    while waited.look(None, has_work=True, now_s=time.monotonic()) < limit_s:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        yield


def _where(word: int) -> tuple[int, int]:
    """Step and boundary of a word."""
    return word >> _STEP_AT & (1 << STEP_BITS) - 1, word >> _WISH_BITS & (1 << BOUNDARY_BITS) - 1
