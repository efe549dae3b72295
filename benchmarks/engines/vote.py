"""How long a vote takes, per transport and tensor-parallel size, and what a boundary costs without peers.

Real processes vote in a loop and do nothing else, so this is the vote itself: no rank waits for another's
computation. Ranks have a core each where there are enough; with more ranks than cores they wait for each
other's turn, and the time says so.

    python -m benchmarks.engines.vote
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from benchmarks.report import print_rows, quantiles, write
from prefill_node.board.board import Board
from prefill_node.worker.vote import SoleVote, VoteTransport, choose_transport

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

RANKS = (2, 4, 8)
VOTES = {"shared memory": 20_000, "all-reduce": 2_000}
WARM_UP = 200
TIMEOUT_S = 60.0
CHECKS = 200_000


def main() -> None:
    """Measure all and print one table."""
    rows = [
        {"transport": transport, "ranks": ranks, "votes": votes, "us": measure(transport, ranks, votes)}
        for transport, votes in VOTES.items()
        for ranks in RANKS
    ]
    print_rows(f"Microseconds of one vote, on {len(os.sched_getaffinity(0))} cores", rows)
    lone_us = lone_boundary_us()
    print(f"A boundary on one rank (publish progress, compare, vote): {lone_us:.2f} µs")
    print(write("vote", {"rows": rows, "lone_boundary_us": lone_us}))


def measure(transport: str, ranks: int, votes: int) -> dict[str, float]:
    """Microseconds per vote, over all ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    port = _free_port() if transport == "all-reduce" else None
    times_us: list[float] = []
    with Board.create(ranks) as board:
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_vote, args=(theirs, board.path, rank, ranks, votes, port))
            process.start()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            times_us += pipe.recv()
        for process in processes:
            process.join()
    return quantiles(times_us, 50, 99)


def lone_boundary_us() -> float:
    """Mean microseconds of what a single rank does at a boundary, calls included."""
    vote = SoleVote()
    with Board.create(1) as board:
        started_ns = time.perf_counter_ns()
        for boundary in range(CHECKS):
            board.reach(0, 1, boundary & 31)
            vote.vote(1, boundary & 31, board.is_target(1))
        return (time.perf_counter_ns() - started_ns) / CHECKS / 1e3


def _vote(pipe: Connection, path: Path, rank: int, ranks: int, votes: int, port: int | None) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
    group = None if port is None else _group(rank, ranks, port)
    with Board.attach(path) as board:
        transport = choose_transport(
            rank, ranks, TIMEOUT_S, same_host=group is None, board=board, group=group
        )
        pipe.send(_times_us(transport, board, votes))


def _times_us(transport: VoteTransport, board: Board, votes: int) -> list[float]:
    times_us = []
    for number in range(WARM_UP + votes):
        started_ns = time.perf_counter_ns()
        transport.vote(1 + (number >> 5), number & 31, board.is_target(1 + (number >> 5)))
        times_us.append((time.perf_counter_ns() - started_ns) / 1e3)
    return times_us[WARM_UP:]


def _group(rank: int, ranks: int, port: int) -> Any:
    from torch import distributed

    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    return distributed.group.WORLD


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
