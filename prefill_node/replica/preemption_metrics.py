"""Turns what happened to a replica's steps into metrics, log lines, spans and the history of its jobs.

Owns the names under which preemption is observed. Reads what the scheduler has put on the board
(`prefill_node.board.events`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, assert_never

from prefill_node.board.board import Board
from prefill_node.board.events import (
    Dropped,
    DropReason,
    Notice,
    Passed,
    Resumed,
    Served,
    Started,
    Stopped,
    decode,
)
from prefill_node.board.messages import SchedulerView
from prefill_node.replica.governing.ledger import PrefillLedger
from prefill_node.replica.job_history import JobHistory
from prefill_node.replica.job_spans import JobSpans
from slo.preemption.types import KeepReason
from slo.request import JobId
from telemetry import catalogue, logs

if TYPE_CHECKING:
    from telemetry.instruments import Instruments

METRICS = (
    catalogue.DIRECTIVES,
    catalogue.DROPPED_EVENTS,
    catalogue.GOVERNOR_DECISION,
    catalogue.PREEMPTIONS,
    catalogue.PREEMPTION_REFUSALS,
    catalogue.PREEMPTION_ARRIVAL_TO_STOP,
    catalogue.PREEMPTION_ORDER_TO_STOP,
    catalogue.PREEMPTION_STOP_TO_SERVICE,
    catalogue.PREEMPTION_RESUME_OVERHEAD,
    catalogue.PREEMPTION_AVAILABLE,
    catalogue.SUSPENDED_BYTES,
    catalogue.SUSPENDED_SECONDS,
    catalogue.SUSPENDED_STEPS,
    catalogue.VOTES,
    catalogue.WORK_WASTED,
)


_NOBODY_ASKED = (KeepReason.OFF, KeepReason.IDLE, KeepReason.NOBODY_WAITS)


class PreemptionRecord:
    """Records preemption on one replica.

    Args:
        instruments: Must have `METRICS`.
        ledger: What the replica has accepted, for arrival times and predictions.
        passed: Called with each forward pass that was measured.
        started: Called with each job that runs for the first time.
    """

    def __init__(
        self,
        instruments: Instruments,
        ledger: PrefillLedger,
        passed: Callable[[Passed], None] = lambda _: None,
        started: Callable[[Started], None] = lambda _: None,
    ) -> None:
        self._instruments = instruments
        self._ledger = ledger
        self._passed = passed
        self._started = started
        self.history = JobHistory()
        self._spans: dict[str, JobSpans] = {}
        self._arrived_s: dict[str, float] = {}
        self._votes = 0
        self._dropped = 0

    def follow(self, job_id: JobId, spans: JobSpans) -> None:
        """A job was accepted: what happens to it is added to these spans."""
        self._spans[job_id] = spans
        if (job := self._ledger.accepted.get(job_id)) is not None:
            self._arrived_s[job_id] = job.arrived_s
            self.history.arrived(job)

    def leave(self, job_id: JobId) -> None:
        """The job has ended."""
        if (spans := self._spans.pop(job_id, None)) is not None:
            spans.end()
        self._arrived_s.pop(job_id, None)
        self.history.ended(job_id, time.monotonic())

    def available(self, *, is_available: bool) -> None:
        """Whether running prefills can be stopped here."""
        self._instruments.set(catalogue.PREEMPTION_AVAILABLE, float(is_available))

    def decided(self, seconds: float) -> None:
        """The governor took so long for a decision."""
        self._instruments.observe(catalogue.GOVERNOR_DECISION, seconds)

    def kept(self, reason: KeepReason) -> None:
        """The governor let a step go on; not counted when nobody asked it to stop."""
        if reason in _NOBODY_ASKED:
            return
        self._instruments.count(catalogue.PREEMPTION_REFUSALS, reason=reason.value)

    def directed(self, outcome: str) -> None:
        """An order of the cluster's monitor was carried out, "stopped", or not, and why not."""
        self._instruments.count(catalogue.DIRECTIVES, outcome=outcome)

    def suspended(self, view: SchedulerView | None) -> None:
        """What is suspended now."""
        steps = () if view is None else view.suspended
        self._instruments.set(catalogue.SUSPENDED_STEPS, len(steps))
        self._instruments.set(catalogue.SUSPENDED_BYTES, sum(step.checkpoint_bytes for step in steps))

    def votes(self, board: Board) -> None:
        """Votes of the ranks since the last call; a vote of all ranks counts once."""
        votes = board.boundaries_reached(0)
        self._instruments.count(catalogue.VOTES, votes - self._votes)
        self._votes = votes

    def dropped(self, board: Board) -> None:
        """Events that found no room on the board since the last call."""
        dropped = board.dropped_events
        self._instruments.count(catalogue.DROPPED_EVENTS, dropped - self._dropped)
        self._dropped = dropped

    def take(self, records: Iterable[bytes]) -> None:
        """What the scheduler has put into the event log."""
        for record in records:
            self._take(decode(record))

    def _take(self, notice: Notice) -> None:
        match notice:
            case Stopped():
                self._stopped(notice)
            case Resumed():
                self._instruments.observe(catalogue.SUSPENDED_SECONDS, notice.suspended_s)
                overhead_s = notice.first_operator_s - notice.issued_s
                self._instruments.observe(catalogue.PREEMPTION_RESUME_OVERHEAD, overhead_s)
                fields: dict[str, float | str] = {
                    "boundary": notice.boundary,
                    "suspended_s": notice.suspended_s,
                    "overhead_s": overhead_s,
                }
                self._tell("prefill_resumed", notice.jobs, fields)
                for spans in self._spans_of(notice.jobs):
                    spans.resumed(notice)
                for job in notice.jobs:
                    self.history.started(job, notice.issued_s)
            case Served():
                waited_s = notice.first_operator_s - notice.stopped_s
                self._instruments.observe(catalogue.PREEMPTION_STOP_TO_SERVICE, waited_s)
                self._tell("prefill_served", (notice.job,), {"after_stop_s": waited_s})
            case Dropped():
                self._work_dropped(notice)
            case Passed():
                self._passed(notice)
            case Started():
                self._job_started(notice)
            case _:
                assert_never(notice)

    def _stopped(self, stop: Stopped) -> None:
        is_kept = stop.is_kept or stop.done == 0
        outcome = "abandoned" if not stop.jobs else "kept" if is_kept else "recompute"
        self._instruments.count(catalogue.PREEMPTIONS, outcome=outcome, reason=stop.reason)
        self._instruments.observe(catalogue.PREEMPTION_ORDER_TO_STOP, stop.stopped_s - stop.ordered_s)
        if (arrived_s := self._arrived_s.get(stop.beneficiary)) is not None:
            self._instruments.observe(catalogue.PREEMPTION_ARRIVAL_TO_STOP, stop.stopped_s - arrived_s)
        pass_s = self._ledger.predictor.pass_s(stop.tokens, stop.pairs)
        if outcome != "kept":
            self._lost(pass_s * stop.computed, outcome)
        elif stop.computed > stop.done:
            self._lost(pass_s * (stop.computed - stop.done), "operator")
        fields: dict[str, float | str] = {
            "step": stop.step_id,
            "boundary": stop.boundary,
            "boundaries": stop.boundaries,
            "is_kept": stop.is_kept,
            "checkpoint_bytes": stop.checkpoint_bytes,
            "reason": stop.reason,
            "beneficiary": stop.beneficiary,
            "stop_ms": (stop.stopped_s - stop.ordered_s) * 1e3,
        }
        self._tell("prefill_stopped", stop.jobs, fields)
        for spans in self._spans_of(stop.jobs):
            spans.stopped(stop, self._spans.get(stop.beneficiary))
        for job in stop.jobs:
            self.history.stopped(job, stop.stopped_s, stop.beneficiary, stop.reason, stop.checkpoint_bytes)

    def _work_dropped(self, drop: Dropped) -> None:
        predictor = self._ledger.predictor
        wasted_s = predictor.pass_s(drop.tokens, drop.pairs) * drop.done
        if drop.earlier_tokens:
            wasted_s += predictor.pass_s(drop.earlier_tokens, drop.earlier_pairs)
        self._lost(wasted_s, drop.reason)
        self._tell("prefill_dropped", drop.jobs, {"reason": drop.reason, "wasted_s": wasted_s})
        if drop.reason == DropReason.MEMORY:  # the others have left
            for spans in self._spans_of(drop.jobs):
                spans.dropped(drop)
            for job in drop.jobs:
                self.history.dropped(job, drop.dropped_s)

    def _job_started(self, start: Started) -> None:
        if start.is_first:
            self._started(start)
        for spans in self._spans_of((start.job,)):
            spans.started(start)
        self.history.started(start.job, start.issued_s)

    def _lost(self, wasted_s: float, reason: str) -> None:
        """Count the work that will have to be done again, or was done for nobody."""
        self._instruments.count(catalogue.WORK_WASTED, wasted_s, reason=reason)

    def _tell(self, event: str, jobs: tuple[str, ...], fields: dict[str, float | str]) -> None:
        shown: dict[str, Any] = {"jobs": ",".join(jobs), **fields}
        logs.event(event, **shown)
        for spans in self._spans_of(jobs):
            spans.event(event, fields)

    def _spans_of(self, jobs: tuple[str, ...]) -> list[JobSpans]:
        return [self._spans[job] for job in jobs if job in self._spans]
