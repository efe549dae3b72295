"""What the engine's scheduler puts on the board and reads there.

Owns the scheduler's side of the board and the notices about the step that runs. Without a board nothing is
published, no step is ever stopped, and serving goes on.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from pathlib import Path

import msgspec

from prefill_node.board import events as notices
from prefill_node.board.board import Board, BoardUnavailableError
from prefill_node.board.doorbell import Doorbell
from prefill_node.board.events import Notice, Passed, Resumed, Served, Stopped
from prefill_node.board.messages import SchedulerView, StepView, StopOrder

_log = logging.getLogger(__name__)
_IDLE = SchedulerView()
_MAX_AWAITED = 256


class Bulletin:
    """The scheduler's side of the board.

    Args:
        path: Where the board is; empty for none.
    """

    def __init__(self, path: str) -> None:
        self._board: Board | None = None
        self._view = _IDLE
        self._resumed: Resumed | None = None
        self._passed: Passed | None = None
        self._served: OrderedDict[str, float] = OrderedDict()
        self._doorbell: Doorbell | None = None
        if path:
            try:
                self._board = Board.attach(Path(path))
                self._doorbell = Doorbell(Path(path))
            except BoardUnavailableError as error:
                _log.warning("steps of this engine cannot be stopped: %s", error)

    def issued(self, view: SchedulerView, resumed: Resumed | None) -> None:
        """A step starts; `resumed` when it is one that was suspended."""
        self._tell_passed()
        self._resumed = resumed
        self._publish(view)
        if self._doorbell is not None:
            self._doorbell.ring()

    def ended(self) -> None:
        """The step has ended, whether complete or not: say when those in it began to compute."""
        step = self._view.step
        if step is None:
            return
        began_s = self._first_operator_s(step)
        if self._resumed is None:
            self._passed = Passed(step.tokens, step.pairs, time.monotonic() - step.started_s)
        else:
            self.notice(msgspec.structs.replace(self._resumed, first_operator_s=began_s))
            self._resumed = None
        for job in step.jobs:
            if (stopped_s := self._served.pop(job, None)) is not None:
                self.notice(Served(job, stopped_s, began_s))

    def show(self, view: SchedulerView) -> None:
        """No step was issued, or one that runs now had been before."""
        self._tell_passed()
        if view != self._view:
            self._publish(view)

    def preempted(self, job: str, stopped_s: float) -> None:
        """A step was preempted for `job`."""
        self._served[job] = stopped_s
        while len(self._served) > _MAX_AWAITED:
            self._served.popitem(last=False)

    def forget(self, job: str) -> None:
        """A job has left."""
        self._served.pop(job, None)

    def stop_order(self, step_id: int) -> StopOrder | None:
        """The governor's order that stopped this step; None when its last order was for another."""
        order = None if self._board is None else self._board.stop_order()
        return order if order is not None and order.step_id == step_id else None

    def notice(self, notice: Notice) -> None:
        """Tell the replica process what happened."""
        if isinstance(notice, Stopped):
            self._passed = None
        if self._board is not None:
            self._board.append_events([notices.encode(notice)])

    def close(self) -> None:
        """Let go of the board."""
        board, self._board = self._board, None
        doorbell, self._doorbell = self._doorbell, None
        if board is not None:
            board.close()
        if doorbell is not None:
            doorbell.close()

    def _tell_passed(self) -> None:
        """A step that has ended, and of which nobody has said since that it stopped, was complete."""
        passed, self._passed = self._passed, None
        if passed is not None:
            self.notice(passed)

    def _publish(self, view: SchedulerView) -> None:
        self._view = view
        if self._board is not None:
            self._board.publish(view)

    def _first_operator_s(self, step: StepView) -> float:
        began_s = None if self._board is None else self._board.began(0, step.step_id)
        return step.started_s if began_s is None else began_s
