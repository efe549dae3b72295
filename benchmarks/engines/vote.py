"""How long a vote takes, per transport and tensor-parallel size, and what a boundary costs without peers.

Real processes vote in a loop and do nothing else, so this is the vote itself: no rank waits for another's
computation. Ranks have a core each where there are enough; with more ranks than cores they wait for each
other's turn, and the time says so.

    python -m benchmarks.engines.vote
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.report import print_rows, quantiles, write
from prefill_node.board.board import Board
from prefill_node.worker.vote import SoleVote, VoteTransport, choose_transport

RANKS = (2, 4, 8)
VOTES = {"shared memory": 20_000, "all-reduce": 2_000}
WARM_UP = 200
TIMEOUT_S = 60.0
CHECKS = 200_000


def main() -> None:
    """Measure all and print one table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = [
        {"transport": transport, "ranks": ranks, "votes": votes, "us": measure(transport, ranks, votes)}
        for transport, votes in VOTES.items()
        for ranks in RANKS
    ]
    print_rows(f"Microseconds of one vote, on {len(os.sched_getaffinity(0))} cores", rows)
    lone_us = lone_boundary_us()
    print(f"A boundary on one rank (publish progress, compare, vote): {lone_us:.2f} µs")
    print(write("engines/vote", {"rows": rows, "lone_boundary_us": lone_us}))


def measure(transport: str, ranks: int, votes: int) -> dict[str, float]:
    """Microseconds per vote, over all ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    with (
        tempfile.TemporaryDirectory() as directory,
        Board.create(ranks) as board,
        ProcessPoolExecutor(ranks, mp_context=context) as processes,
    ):
        store = f"file://{directory}/store" if transport == "all-reduce" else None
        voting = [processes.submit(_vote, board.path, rank, ranks, votes, store) for rank in range(ranks)]
        return quantiles([time_us for each in voting for time_us in each.result()], 50, 99)


def lone_boundary_us() -> float:
    """Mean microseconds of what a single rank does at a boundary, calls included."""
    vote = SoleVote()
    with Board.create(1) as board:
        started_ns = time.perf_counter_ns()
        for boundary in range(CHECKS):
            board.reach(0, 1, boundary & 31)
            vote.vote(1, boundary & 31, board.is_target(1))
        return (time.perf_counter_ns() - started_ns) / CHECKS / 1e3


def _vote(path: Path, rank: int, ranks: int, votes: int, store: str | None) -> list[float]:
    cores = sorted(os.sched_getaffinity(0))
    if ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
    group = None if store is None else _group(rank, ranks, store)
    with Board.attach(path) as board:
        if group is None:
            transport = choose_transport(rank, ranks, TIMEOUT_S, same_host=True, board=board, group=None)
        else:
            from prefill_node.worker.allreduce_vote import AllReduceVote

            transport = AllReduceVote(group, rank, ranks, TIMEOUT_S)
        return _times_us(transport, board, votes)


def _times_us(transport: VoteTransport, board: Board, votes: int) -> list[float]:
    times_us = []
    for number in range(WARM_UP + votes):
        started_ns = time.perf_counter_ns()
        transport.vote(1 + (number >> 5), number & 31, board.is_target(1 + (number >> 5)))
        times_us.append((time.perf_counter_ns() - started_ns) / 1e3)
    return times_us[WARM_UP:]


def _group(rank: int, ranks: int, store: str) -> Any:
    from torch import distributed

    distributed.init_process_group("gloo", store, rank=rank, world_size=ranks)
    return distributed.group.WORLD


if __name__ == "__main__":
    main()
