"""Turns what happened to a replica's steps into metrics, log lines and span events.

Owns the names under which preemption is observed. Reads what the scheduler has put on the board
(`prefill_node.board.events`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_never

from opentelemetry import trace

from prefill_node.board.events import Dropped, Passed, Resumed, Served, Started, Stopped, decode
from slo.preemption.types import KeepReason
from telemetry import logs
from telemetry.catalogue import (
    DIRECTIVES,
    DROPPED_EVENTS,
    GOVERNOR_DECISION,
    PREEMPTION_ARRIVAL_TO_STOP,
    PREEMPTION_AVAILABLE,
    PREEMPTION_ORDER_TO_STOP,
    PREEMPTION_REFUSALS,
    PREEMPTION_RESUME_OVERHEAD,
    PREEMPTION_STOP_TO_SERVICE,
    PREEMPTIONS,
    SUSPENDED_BYTES,
    SUSPENDED_SECONDS,
    SUSPENDED_STEPS,
    VOTE_TIMEOUTS,
    VOTES,
    WORK_WASTED,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prefill_node.board.board import Board
    from prefill_node.board.events import Notice
    from prefill_node.board.messages import SchedulerView
    from prefill_node.replica.governing.ledger import PrefillLedger
    from slo.request import JobId
    from telemetry.instruments import Instruments

METRICS = (
    DIRECTIVES,
    DROPPED_EVENTS,
    GOVERNOR_DECISION,
    PREEMPTIONS,
    PREEMPTION_REFUSALS,
    PREEMPTION_ARRIVAL_TO_STOP,
    PREEMPTION_ORDER_TO_STOP,
    PREEMPTION_STOP_TO_SERVICE,
    PREEMPTION_RESUME_OVERHEAD,
    PREEMPTION_AVAILABLE,
    SUSPENDED_BYTES,
    SUSPENDED_SECONDS,
    SUSPENDED_STEPS,
    VOTES,
    VOTE_TIMEOUTS,
    WORK_WASTED,
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
        self._spans: dict[str, trace.Span] = {}
        self._arrived_s: dict[str, float] = {}
        self._votes = 0
        self._timeouts = 0
        self._dropped = 0

    def follow(self, job_id: JobId) -> None:
        """A job was accepted: what happens to it is added to the span that is current now."""
        self._spans[job_id] = trace.get_current_span()
        if (job := self._ledger.accepted.get(job_id)) is not None:
            self._arrived_s[job_id] = job.arrived_s

    def leave(self, job_id: JobId) -> None:
        """The job has ended."""
        self._spans.pop(job_id, None)
        self._arrived_s.pop(job_id, None)

    def available(self, *, is_available: bool) -> None:
        """Whether running prefills can be stopped here."""
        self._instruments.set(PREEMPTION_AVAILABLE, float(is_available))

    def decided(self, seconds: float) -> None:
        """The governor took so long for a decision."""
        self._instruments.observe(GOVERNOR_DECISION, seconds)

    def kept(self, reason: KeepReason) -> None:
        """The governor let a step go on; not counted when nobody asked it to stop."""
        if reason in _NOBODY_ASKED:
            return
        self._instruments.count(PREEMPTION_REFUSALS, reason=reason.value)

    def directed(self, outcome: str) -> None:
        """An order of the cluster's monitor was carried out, "stopped", or not, and why not."""
        self._instruments.count(DIRECTIVES, outcome=outcome)

    def suspended(self, view: SchedulerView | None) -> None:
        """What is suspended now."""
        steps = () if view is None else view.suspended
        self._instruments.set(SUSPENDED_STEPS, len(steps))
        self._instruments.set(SUSPENDED_BYTES, sum(step.checkpoint_bytes for step in steps))

    def votes(self, board: Board) -> None:
        """Votes and timed-out votes of the ranks since the last call; a vote of all ranks counts once."""
        votes = board.boundaries_reached(0)
        timeouts = sum(board.vote_timeouts(rank) for rank in range(board.ranks))
        self._instruments.count(VOTES, votes - self._votes)
        self._instruments.count(VOTE_TIMEOUTS, timeouts - self._timeouts)
        self._votes, self._timeouts = votes, timeouts

    def dropped(self, board: Board) -> None:
        """Events that found no room on the board since the last call."""
        dropped = board.dropped_events
        self._instruments.count(DROPPED_EVENTS, dropped - self._dropped)
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
                self._instruments.observe(SUSPENDED_SECONDS, notice.suspended_s)
                overhead_s = notice.first_operator_s - notice.issued_s
                self._instruments.observe(PREEMPTION_RESUME_OVERHEAD, overhead_s)
                fields: dict[str, float | str] = {
                    "boundary": notice.boundary,
                    "suspended_s": notice.suspended_s,
                    "overhead_s": overhead_s,
                }
                self._tell("prefill_resumed", notice.jobs, fields)
            case Served():
                waited_s = notice.first_operator_s - notice.stopped_s
                self._instruments.observe(PREEMPTION_STOP_TO_SERVICE, waited_s)
                self._tell("prefill_served", (notice.job,), {"after_stop_s": waited_s})
            case Dropped():
                wasted_s = self._lost(notice, notice.done, notice.reason)
                self._tell("prefill_dropped", notice.jobs, {"reason": notice.reason, "wasted_s": wasted_s})
            case Passed():
                self._passed(notice)
            case Started():
                self._started(notice)
            case _:
                assert_never(notice)

    def _stopped(self, stop: Stopped) -> None:
        is_kept = stop.checkpoint_bytes or stop.done == 0
        outcome = "abandoned" if not stop.jobs else "kept" if is_kept else "recompute"
        self._instruments.count(PREEMPTIONS, outcome=outcome, reason=stop.reason)
        self._instruments.observe(PREEMPTION_ORDER_TO_STOP, stop.stopped_s - stop.ordered_s)
        if (arrived_s := self._arrived_s.get(stop.beneficiary)) is not None:
            self._instruments.observe(PREEMPTION_ARRIVAL_TO_STOP, stop.stopped_s - arrived_s)
        if outcome != "kept":
            self._lost(stop, stop.computed, outcome)
        elif stop.computed > stop.done:
            self._lost(stop, stop.computed - stop.done, "operator")
        fields: dict[str, float | str] = {
            "step": stop.step_id,
            "boundary": stop.boundary,
            "boundaries": stop.boundaries,
            "checkpoint_bytes": stop.checkpoint_bytes,
            "reason": stop.reason,
            "beneficiary": stop.beneficiary,
            "stop_ms": (stop.stopped_s - stop.ordered_s) * 1e3,
        }
        self._tell("prefill_stopped", stop.jobs, fields)

    def _lost(self, step: Stopped | Dropped, fraction: float, reason: str) -> float:
        """Count the work that will have to be done again, or was done for nobody."""
        wasted_s = self._ledger.predictor.pass_s(step.tokens, step.pairs) * fraction
        self._instruments.count(WORK_WASTED, wasted_s, reason=reason)
        return wasted_s

    def _tell(self, event: str, jobs: tuple[str, ...], fields: dict[str, float | str]) -> None:
        shown: dict[str, Any] = {"jobs": ",".join(jobs), **fields}
        logs.event(event, **shown)
        for job in jobs:
            if (span := self._spans.get(job)) is not None:
                span.add_event(event, fields)
