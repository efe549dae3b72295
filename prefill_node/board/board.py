"""The board: shared memory through which the processes of one prefill replica steer a running forward pass.

The governor (replica process) writes which step is to be stopped, the scheduler (EngineCore) what it runs and
what has happened, each worker how far it is. Nobody waits for anybody here, and nobody is woken: who wants to
know looks. `layout` says where each field stands and who writes it, `segment` owns the file, `cells` how
bytes are handed over, and `prefill_node.worker.vote` uses the vote cells.

Each field has one writer; that means one thread of one process. Each process joins with its own `Board`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from prefill_node.board import layout
from prefill_node.board.cells import EventRing, Latest
from prefill_node.board.messages import Reached, SchedulerView, StopOrder
from prefill_node.board.segment import (
    SHARED_MEMORY,
    BoardUnavailableError,
    Segment,
    remove_stale_boards,
)

__all__ = ["Board", "BoardUnavailableError", "remove_stale_boards"]

_SHORT_QUEUE = 512
"""Of a queue that does not fit, so many are told."""
_TARGET = layout.TARGET_AT // layout.WORD


class Board:
    """One replica's board, as one process sees it.

    Attributes:
        path: Its file, by which other processes attach.
        ranks: How many workers it is for.
        words: All of it as 64-bit words, for the vote.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.path = segment.path
        self.ranks = segment.ranks
        self.words = segment.words
        self._progress = tuple(layout.progress_word(rank) for rank in range(segment.ranks))
        self._order = Latest(
            segment, layout.ORDER_SEQUENCE_AT, layout.ORDER_SLOTS_AT, layout.ORDER_SLOT_BYTES, StopOrder
        )
        self._view = Latest(
            segment, layout.VIEW_SEQUENCE_AT, layout.VIEW_SLOTS_AT, layout.VIEW_SLOT_BYTES, SchedulerView
        )
        self._events = EventRing(
            segment, layout.EVENTS_WRITTEN_AT, layout.EVENTS_READ_AT, layout.EVENTS_AT, layout.EVENTS_BYTES
        )

    @classmethod
    def create(cls, ranks: int, directory: Path = SHARED_MEMORY) -> Self:
        """Make a new board, and remove those that crashed replicas have left.

        Raises:
            BoardUnavailableError: There is no room for it.
        """
        remove_stale_boards(directory)
        return cls(Segment.create(ranks, directory))

    @classmethod
    def attach(cls, path: Path) -> Self:
        """Join the board that the replica process has made.

        Raises:
            BoardUnavailableError: It is missing, foreign, or of another version.
        """
        return cls(Segment.attach(path))

    def __enter__(self) -> Self:
        """The board; it is left with the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave it."""
        self.close()

    def unlink(self) -> None:
        """Remove the name, once all have attached; a crash of all processes then leaves nothing behind."""
        self._segment.unlink()

    def close(self) -> None:
        """Leave the board; after it every call fails. The creator removes the name as well."""
        self._segment.close()

    # Governor

    def order_stop(self, order: StopOrder) -> None:
        """Ask for a step to be stopped; the order for another step, if any, is withdrawn.

        Raises:
            ValueError: The step id is not one, or the order's texts are thousands of characters long.
        """
        if not 0 < order.step_id < 1 << layout.STEP_BITS:
            raise ValueError(f"step id {order.step_id}: ids are positive and below 2^{layout.STEP_BITS}")
        if not self._order.store(order):
            raise ValueError(
                f"the order to stop step {order.step_id} exceeds {layout.ORDER_SLOT_BYTES} bytes"
            )
        self.words[_TARGET] = order.step_id

    def view(self) -> SchedulerView | None:
        """What the scheduler last published; None before that. The same object until something changes."""
        return self._view.load()

    def progress(self, rank: int) -> Reached:
        """What a rank has reached; zeros before its first step."""
        word = self.words[self._progress[rank]]
        return Reached(word >> layout.BOUNDARY_BITS, word & layout.BOUNDARY_MASK)

    def boundaries_reached(self, rank: int) -> int:
        """How many boundaries a rank has reached since the board was made, a vote at each."""
        return self.words[self._progress[rank] + 2]

    def vote_timeouts(self, rank: int) -> int:
        """How many votes of a rank have timed out."""
        return self.words[self._progress[rank] + 3]

    def take_events(self) -> list[bytes]:
        """The scheduler's records since the last call, in their order."""
        return self._events.take()

    @property
    def dropped_events(self) -> int:
        """Records that found no room because the reader was behind, since the board was made."""
        return self._events.dropped

    # Scheduler

    def publish(self, view: SchedulerView) -> bool:
        """Tell the governor what runs; False when the view had to be cut to fit.

        The end of a long queue is cut off first: the governor takes who is not named for one that has not
        reached the engine, which is nearly what those at the end are. A step is stopped only by somebody who
        knows its members and what is suspended; a view that is still too large goes without both, and with
        its step marked as not to be stopped. So is one that would be stopped only for who comes later, or of
        which not all are told that it is not to be stopped for.
        """
        if self._view.store(view):
            return True
        queue = view.queue[:_SHORT_QUEUE]
        first = [item.prefill.job_id for item in queue]
        passed = {job_id: view.passed[job_id] for job_id in first if job_id in view.passed}
        stays = view.step and msgspec.structs.replace(view.step, stoppable=False)
        cut = msgspec.structs.replace(view, queue=queue, step=stays if view.none_can_start else view.step)
        for told in (
            cut,
            msgspec.structs.replace(cut, passed=passed, step=stays),
            SchedulerView(stays, (), view.suspended),
            SchedulerView(stays and msgspec.structs.replace(stays, members=())),
        ):
            if self._view.store(told):
                break
        return False

    def append_events(self, records: Iterable[bytes]) -> int:
        """Send records to the governor; returns how many of the last found no room and were dropped."""
        return self._events.append(records)

    def began(self, rank: int, step_id: int) -> float | None:
        """When a rank reached the first boundary of its step, for use once the step has ended.

        Returns:
            Seconds on CLOCK_MONOTONIC; None when the rank has reached none, or is in a later step.
        """
        word = self._progress[rank]
        if self.words[word] >> layout.BOUNDARY_BITS != step_id:
            return None
        return self.words[word + 1] / 1e9

    def stop_order(self) -> StopOrder | None:
        """The governor's last order; None before the first.

        The order is not the authority on what is to be stopped, the target is: compare the step id before
        using the rest, as it may be newer than the target that stopped a step, or on aarch64 older.
        """
        return self._order.load()

    # Workers

    def is_target(self, step_id: int) -> bool:
        """Whether this very step is to be stopped, rather than another; 0 asks whether none is."""
        return self.words[_TARGET] == step_id

    def reach(self, rank: int, step_id: int, boundary: int) -> None:
        """Say that a rank has reached a boundary; at a step's first, note the time as well."""
        word = self._progress[rank]
        if self.words[word] >> layout.BOUNDARY_BITS != step_id:
            self.words[word + 1] = time.monotonic_ns()
        self.words[word] = step_id << layout.BOUNDARY_BITS | boundary
        self.words[word + 2] += 1

    def vote_timed_out(self, rank: int) -> None:
        """Say that a vote of a rank has timed out."""
        self.words[self._progress[rank] + 3] += 1
