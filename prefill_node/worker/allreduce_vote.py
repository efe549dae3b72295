"""Votes between hosts, where the ranks share no memory: an all-reduce over the group for CPU tensors.

An all-reduce tells that it failed, not who was missing. For that the ranks meet once more, in the store
through which the group was formed.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from queue import Empty, Queue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import AllreduceOptions, ReduceOp

from prefill_node.board.layout import BOUNDARY_BITS, BOUNDARY_MASK, STEP_BITS
from prefill_node.worker.vote_errors import FIRST_PASS_S, VoteMismatchError, VoteTimeoutError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ROLL_CALL_S = 1.0
_ROLL_CALL_PAUSE_S = 0.02


class _Round(NamedTuple):
    """A vote that has been asked for."""

    step_id: int
    boundary: int
    ballot: torch.Tensor
    work: Any
    began_s: float
    limit_s: float

    @property
    def place(self) -> int:
        """Step and boundary, packed."""
        return self.step_id << BOUNDARY_BITS | self.boundary


class AllReduceVote:
    """Votes with a MAX over (wish, place, -place), where place packs step and boundary.

    The maximum of the places and the negated maximum of their opposites are the highest and the lowest
    place: equal exactly if all ranks are at the same one. All ranks receive the same three numbers, so they
    come to the same answer or the same mismatch.

    The limit is given to the operation itself and not only to the wait for it: an operation left pending
    would hold the process up at its end, for as long as the group's own limit of many minutes. So the time in
    which ranks are frozen counts, which `prefill_node.worker.vote.BoardVote` leaves out.
    """

    def __init__(self, group: ProcessGroup, rank: int, ranks: int, timeout_s: float) -> None:
        """Use a group, which stays the caller's; its ranks are numbered as the vote's are."""
        self.timeout_s = timeout_s
        self.is_first_pass = False
        self._group = group
        self._rank = rank
        self._ranks = ranks
        self._options = AllreduceOptions()
        self._options.reduceOp = ReduceOp.MAX
        self._round = 0
        self._failure: VoteTimeoutError | VoteMismatchError | None = None

    def vote(self, step_id: int, boundary: int, wish: bool) -> bool:  # noqa: FBT001 - protocol
        """See `VoteTransport.vote`."""
        return self._collect(self._issue(step_id, boundary, wish))

    def _issue(self, step_id: int, boundary: int, wish: bool) -> _Round:  # noqa: FBT001 - as a vote
        """Say what this rank wishes."""
        if self._failure is not None:
            raise self._failure
        if step_id >> STEP_BITS or boundary >> BOUNDARY_BITS:
            raise ValueError(f"step {step_id}, boundary {boundary}: does not fit into a vote")
        self._round += 1
        place = step_id << BOUNDARY_BITS | boundary
        ballot = torch.tensor((wish, place, -place), dtype=torch.int64, device="cpu")
        began_s = time.monotonic()
        limit_s = max(self.timeout_s, FIRST_PASS_S) if self.is_first_pass else self.timeout_s
        self._options.timeout = timedelta(seconds=limit_s)
        try:
            work = self._group.allreduce([ballot], self._options)
        except RuntimeError as error:
            raise self._timed_out(step_id, boundary, began_s, limit_s) from error
        return _Round(step_id, boundary, ballot, work, began_s, limit_s)

    def _collect(self, asked: _Round) -> bool:
        """What all wish together."""
        step_id, boundary, place = asked.step_id, asked.boundary, asked.place
        try:
            asked.work.wait(timedelta(seconds=asked.limit_s))
        except RuntimeError as error:
            raise self._timed_out(step_id, boundary, asked.began_s, asked.limit_s) from error
        any_wish, highest, lowest_negated = asked.ballot.tolist()
        if highest != -lowest_negated:
            other = highest if highest != place else -lowest_negated
            where = other >> BOUNDARY_BITS, other & BOUNDARY_MASK
            self._failure = VoteMismatchError(step_id, boundary, "another rank", where)
            raise self._failure
        return bool(any_wish)

    def _timed_out(self, step_id: int, boundary: int, began_s: float, limit_s: float) -> VoteTimeoutError:
        """What every vote fails with from now on."""
        absent = self._absent(began_s + limit_s + _ROLL_CALL_S)
        self._failure = VoteTimeoutError(absent, step_id, boundary, time.monotonic() - began_s)
        return self._failure

    def _absent(self, until_s: float) -> tuple[int, ...]:
        """The ranks that do not answer the roll call; rank 0 serves the store, and is absent if that is.

        A store on a host that is gone may keep a caller for minutes, so it is asked from a thread.
        """
        answer: Queue[tuple[int, ...]] = Queue()
        Thread(target=lambda: answer.put(self._roll_call(until_s)), daemon=True).start()
        with contextlib.suppress(Empty):
            return answer.get(timeout=max(0.0, until_s - time.monotonic()) + _ROLL_CALL_S)
        return (0,)

    def _roll_call(self, until_s: float) -> tuple[int, ...]:
        """Report this vote's failure, and return the ranks that have not by then.

        A closed connection is noticed at once by some ranks and by others only at the end of their limit, so
        all have until then, and a second for having come late themselves.
        """
        report = f"slackserve-vote/{self._round}/"
        missing = set(range(self._ranks)) - {self._rank}
        try:
            store = self._group.get_group_store()
            store.set(f"{report}{self._rank}", "")
            while True:
                missing = {peer for peer in missing if not store.check([f"{report}{peer}"])}
                if not missing or time.monotonic() > until_s:
                    return tuple(sorted(missing))
                time.sleep(_ROLL_CALL_PAUSE_S)
        except RuntimeError:
            return (0,)


class LateVote(AllReduceVote):
    """The same, with the answer one boundary later: no rank waits for the network.

    At a boundary each rank collects what was voted at the one before, in the same step, and votes anew. All
    act on the same vote at the same boundary. What was voted at the last boundary of a step is asked of
    nobody any more; it is collected at the next step's first, as every rank has to take part in it.
    """

    def __init__(self, group: ProcessGroup, rank: int, ranks: int, timeout_s: float) -> None:
        super().__init__(group, rank, ranks, timeout_s)
        self._asked: _Round | None = None

    def vote(self, step_id: int, boundary: int, wish: bool) -> bool:  # noqa: FBT001 - protocol
        """See `VoteTransport.vote`; the answer is that of the boundary before."""
        if self._failure is not None:
            raise self._failure
        asked, self._asked = self._asked, None
        if asked is not None and self._collect(asked) and asked.step_id == step_id:
            return True
        self._asked = self._issue(step_id, boundary, wish)
        return False
