"""Carries the governor's decisions out, in the replica process.

Owns the replica's side of the board, the one timer, and what happens when the governor fails: serving goes on
without preemption, a metric says so, and what the engine reports is taken in as before. Woken by every
arrival, end and abort, by the scheduler when it has issued a step, and by the timer at the next instant at
which a waiter becomes critical; nothing is polled.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from prefill_node.board.board import Board
from prefill_node.board.doorbell import Doorkeeper
from prefill_node.board.messages import Reached, SchedulerView, StopOrder
from prefill_node.replica.governing.governor import Governor
from slo.monitor.directives import PreemptDirective
from slo.preemption.types import Keep, KeepReason, Preempt
from telemetry import logs

if TYPE_CHECKING:
    from prefill_node.replica.preemption_metrics import PreemptionRecord

T = TypeVar("T")

_FIRST_RANK = 0


class Watch:
    """Lets a governor watch over a replica's engine."""

    def __init__(self, board: Board, governor: Governor, record: PreemptionRecord) -> None:
        self._board = board
        self._governor = governor
        self._record = record
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._kept: tuple[int, KeepReason] | None = None
        self._unrecorded: set[Callable[[], None]] = set()
        """What has failed to record, and not worked since."""
        self._doorkeeper = Doorkeeper(board.path, self.changed)
        self._tell()

    @property
    def is_up(self) -> bool:
        """Whether the governor still works; it is not asked again after it has failed."""
        return not self._governor.has_failed

    def changed(self) -> None:
        """Something has arrived, ended, left or started, or the timer is due: decide anew."""
        self._recorded(self._take)
        self._guarded(self._decide)

    def direct(self, directive: PreemptDirective) -> None:
        """The cluster's monitor orders a step to be stopped: do it if that still makes sense."""
        self._guarded(lambda: self._heed(directive))

    def kept(self, step_id: int) -> KeepReason | None:
        """Why the governor let this step go on, when it was last asked; None when it has not been."""
        return self._kept[1] if self._kept is not None and self._kept[0] == step_id else None

    def collect(self) -> None:
        """Take in what the scheduler and the workers have reported, without deciding anything."""
        self._recorded(self._collect)
        self._tell()  # Ray forgets a gauge that is not set again

    def _take(self) -> None:
        self._record.take(self._board.take_events())

    def _collect(self) -> None:
        self._take()
        self._record.votes(self._board)
        self._record.dropped(self._board)
        self._record.suspended(self._board.view())

    def _recorded(self, work: Callable[[], None]) -> None:
        """What cannot be recorded is lost, and must stop neither serving nor the governor.

        It is said once until it works again: something is recorded at every wake.
        """
        if self._is_closed:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the edge between what is watched and serving
            if work not in self._unrecorded:
                logs.event("record_failed", level=logging.ERROR, error=repr(error)[:500])
            self._unrecorded.add(work)
        else:
            self._unrecorded.discard(work)

    def _guarded(self, work: Callable[[], None]) -> None:
        """A governor that fails must not stop serving: it is left alone from then on."""
        if self._is_closed or not self.is_up:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the edge between preemption and serving
            self._governor.has_failed = True
            self._set_timer(math.inf, 0.0)
            self._tell()
            logs.event("governor_failed", level=logging.ERROR, error=repr(error)[:500])

    def _tell(self) -> None:
        self._record.available(is_available=self.is_up and self._governor.profile.boundaries > 0)

    def has_vote_timeout(self) -> bool:
        """Whether a rank has waited in vain for another's vote, which its engine does not survive."""
        return any(self._board.vote_timeouts(rank) for rank in range(self._board.ranks))

    def view(self) -> SchedulerView | None:
        """What the scheduler has published last."""
        return self._board.view()

    def told(self, by: Callable[[SchedulerView | None], T]) -> T:
        """What is told of the work here; nothing has begun if that is what the governor has failed on."""
        try:
            return by(self.view())
        except Exception:
            if self.is_up:
                raise
            return by(None)

    def reached(self) -> Reached:
        """What the first rank has reached."""
        return self._board.progress(_FIRST_RANK)

    def boundaries_reached(self) -> tuple[int, ...]:
        """How many boundaries each rank has ever reached."""
        return tuple(self._board.boundaries_reached(rank) for rank in range(self._board.ranks))

    def pass_s(self) -> float:
        """Predicted seconds of the forward pass that runs; 0 when none is known to."""
        view = self.view()
        return 0.0 if view is None or view.step is None else self._governor.total_s(view.step)

    def close(self) -> None:
        """Stop watching."""
        self._is_closed = True
        self._set_timer(math.inf, 0.0)
        self._doorkeeper.close()
        self._board.close()

    def _decide(self) -> None:
        now_s, view = time.monotonic(), self.view()
        decision = self._governor.decide(view, self.reached(), now_s)
        decided_s = time.monotonic()
        match decision:
            case Preempt():
                self._stop(decision, decided_s)
            case Keep(reason, recheck_at_s):
                self._record.kept(reason)
                self._set_timer(recheck_at_s, decided_s)
                if view is not None and view.step is not None:
                    self._kept = view.step.step_id, reason
        self._record.decided(decided_s - now_s)

    def _heed(self, directive: PreemptDirective) -> None:
        now_s = time.monotonic()
        decision = self._governor.direct(directive, self.view(), self.reached(), now_s)
        match decision:
            case Preempt():
                self._stop(decision, now_s)
                self._record.directed("stopped")
            case Keep(reason):
                self._record.directed(reason.value)

    def _stop(self, order: Preempt, now_s: float) -> None:
        self._board.order_stop(StopOrder(order.step_id, order.beneficiary, order.reason.value, now_s))
        self._set_timer(math.inf, now_s)
        logs.event(
            "stop_ordered", step=order.step_id, beneficiary=order.beneficiary, reason=order.reason.value
        )

    def _set_timer(self, at_s: float, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at_s < math.inf:
            self._timer = asyncio.get_running_loop().call_later(at_s - now_s, self._due)

    def _due(self) -> Any:
        self._timer = None
        self.changed()
