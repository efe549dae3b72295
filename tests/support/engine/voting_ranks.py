"""Real processes that vote as workers do, for tests: told over pipes what to do, and used again."""

import contextlib
import dataclasses
import gc
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Literal

from ports import free_port

from prefill_node.board.board import Board
from prefill_node.worker.vote import choose_transport
from prefill_node.worker.vote_errors import VoteMismatchError, VoteTimeoutError

GROUP_LIMIT_S = 600.0
"""The collective group's own limit: far beyond any vote's, as in vLLM."""

_END_S = 5.0
_PATIENCE_S = 120.0  # the first process imports torch, on a machine that may be busy
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed", "prefill_node.worker.vote"])


@dataclasses.dataclass(frozen=True)
class Join:
    """Take a seat; `port` is where rank 0 serves the group's store, None when votes go over the board."""

    board: Path
    rank: int
    ranks: int
    timeout_s: float
    port: int | None = None
    is_late: bool = False


@dataclasses.dataclass(frozen=True)
class Ballot:
    """One boundary: pause, look at the target, pause, vote. A given wish is voted without a look."""

    step_id: int
    boundary: int
    wish: bool | None = None
    before_look_s: float = 0.0
    before_vote_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class DropOut:
    """Where a rank drops out, by SIGKILL or by an exception of its model."""

    ballot: int
    moment: Literal["before_look", "before_vote", "after_vote"]
    how: Literal["killed", "left"] = "killed"


@dataclasses.dataclass(frozen=True)
class Run:
    """Vote on these; like a forward pass, end at the first stop unless told to go on."""

    ballots: tuple[Ballot, ...]
    drop_out: DropOut | None = None
    go_on: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a run: "voted", or why not, and then where.

    `absent` are the ranks that a timeout names, `met` where a mismatch met another rank.
    """

    kind: Literal["voted", "timeout", "mismatch", "left", "killed"]
    answers: tuple[bool, ...] = ()
    where: tuple[int, int] | None = None
    absent: tuple[int, ...] = ()
    met: tuple[int, int] | None = None
    waited_s: float = 0.0
    message: str = ""


class Ranks:
    """A pool of voting processes, numbered from 0."""

    def __init__(self):
        self._processes = []
        self._pipes = []
        self._busy = set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def join(
        self, ranks: int, board: Board, timeout_s: float, across_hosts: bool = False, is_late: bool = False
    ):
        """Give the first so many processes a seat each, and replace those that are gone or still busy."""
        for rank in range(ranks):
            if rank == len(self._processes):
                self._processes.append(None)
                self._pipes.append(None)
            if rank in self._busy:
                self._processes[rank].kill()
                self._processes[rank].join()
            if self._processes[rank] is None or not self._processes[rank].is_alive():
                self._start(rank)
        port = free_port() if across_hosts else None
        for rank in range(ranks):
            self._send(rank, Join(board.path, rank, ranks, timeout_s, port, is_late))
        assert [self.reply(rank) for rank in range(ranks)] == ["joined"] * ranks

    def run(self, *runs: Run, starvation_timeout_s: float = _PATIENCE_S) -> list[Outcome]:
        """Let each rank do its run, and wait for all."""
        self.begin(*runs)
        return self.finish(len(runs), starvation_timeout_s)

    def begin(self, *runs: Run):
        """Let each rank do its run."""
        for rank, run in enumerate(runs):
            self._send(rank, run)

    def finish(self, ranks: int, starvation_timeout_s: float = _PATIENCE_S) -> list[Outcome]:
        """The outcomes; a rank that gives none in time hangs, and fails the test."""
        until_s = time.monotonic() + starvation_timeout_s
        return [self.reply(rank, until_s - time.monotonic()) for rank in range(ranks)]

    def reply(self, rank: int, starvation_timeout_s: float = _PATIENCE_S):
        if not self._pipes[rank].poll(max(0.0, starvation_timeout_s)):
            raise AssertionError(f"rank {rank} hangs")
        self._busy.discard(rank)
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return Outcome("killed")

    def kill(self, rank: int):
        self._processes[rank].kill()

    def end(self, rank: int) -> bool:
        """Ask a process to end, and say whether it did; one that hangs is killed."""
        self._send(rank, None)
        self._processes[rank].join(_END_S)
        hangs = self._processes[rank].is_alive()
        if hangs:
            self._processes[rank].kill()
            self._processes[rank].join()
        return not hangs

    def close(self):
        """End all; one that cannot end by itself fails the test."""
        for rank in range(len(self._pipes)):
            self._send(rank, None)
        hanging = [rank for rank in range(len(self._processes)) if not self.end(rank)]
        assert not hanging, f"ranks {hanging} do not end"

    def _send(self, rank: int, command):
        self._busy.add(rank)
        with contextlib.suppress(BrokenPipeError):  # it is dead; its reply will say so
            self._pipes[rank].send(command)

    def _start(self, rank: int):
        self._busy.discard(rank)
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_rank_process, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._processes[rank], self._pipes[rank] = process, ours


def _rank_process(pipe):
    seat = None
    while (command := pipe.recv()) is not None:
        if isinstance(command, Join):
            if seat is not None:
                seat.leave()
            seat = _Seat(command)
            pipe.send("joined")
        else:
            pipe.send(seat.run(command))
    if seat is not None:
        seat.leave()


class _Seat:
    def __init__(self, join: Join):
        self.rank = join.rank
        self.board = Board.attach(join.board)
        self.group = None if join.port is None else _group(join)
        seat = join.rank, join.ranks, join.timeout_s
        if self.group is None or join.is_late or join.ranks == 1:
            same_host = self.group is None
            self.transport = choose_transport(*seat, same_host=same_host, board=self.board, group=self.group)
        else:
            from prefill_node.worker.allreduce_vote import AllReduceVote

            self.transport = AllReduceVote(self.group, *seat)

    def leave(self):
        self.board.close()
        if self.group is not None:
            from torch import distributed

            distributed.destroy_process_group()
            self.transport = self.group = None
            gc.collect()  # the group's end waits for what is pending

    def run(self, run: Run) -> Outcome:
        answers = []
        try:
            for number, ballot in enumerate(run.ballots):
                here = run.drop_out is not None and run.drop_out.ballot == number
                answers.append(self._vote(ballot, run.drop_out if here else None))
                if answers[-1] and not run.go_on:
                    break
        except _ModelError:
            return Outcome("left", tuple(answers))
        except VoteTimeoutError as error:
            where, waited_s = (error.step_id, error.boundary), error.waited_s
            return Outcome(
                "timeout", tuple(answers), where, absent=error.absent, waited_s=waited_s, message=str(error)
            )
        except VoteMismatchError as error:
            where = (error.step_id, error.boundary)
            return Outcome("mismatch", tuple(answers), where, met=error.met, message=str(error))
        return Outcome("voted", tuple(answers))

    def _vote(self, ballot: Ballot, drop_out: DropOut | None) -> bool:
        _pause(ballot.before_look_s)
        self.board.reach(self.rank, ballot.step_id, ballot.boundary)
        _drop_out("before_look", drop_out)
        wish = self.board.is_target(ballot.step_id) if ballot.wish is None else ballot.wish
        _pause(ballot.before_vote_s)
        _drop_out("before_vote", drop_out)
        answer = self.transport.vote(ballot.step_id, ballot.boundary, wish)
        _drop_out("after_vote", drop_out)
        return answer


class _ModelError(Exception):
    """What a forward pass can raise."""


def _drop_out(moment: str, drop_out: DropOut | None):
    if drop_out is None or drop_out.moment != moment:
        return
    if drop_out.how == "left":
        raise _ModelError
    os.kill(os.getpid(), signal.SIGKILL)


def _pause(seconds: float):
    if seconds:
        time.sleep(seconds)


def _group(join: Join):
    from datetime import timedelta

    from torch import distributed

    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{join.port}",
        rank=join.rank,
        world_size=join.ranks,
        timeout=timedelta(seconds=GROUP_LIMIT_S),
    )
    return distributed.new_group(list(range(join.ranks)), backend="gloo")
