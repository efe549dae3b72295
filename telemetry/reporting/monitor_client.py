"""Keeps the cluster-wide SLO monitor informed, and a process at the policy that it answers with.

Owns how reports are batched, how the monitor is found again, and what holds while it is gone: the last
policy, for a minute. What is reported and what a policy changes is its caller's. Nobody ever waits for the
monitor.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from slo.monitor.directives import PreemptDirective
from slo.monitor.messages import MonitorAnswer, MonitorReport, Role, Seen
from slo.monitor.policy import UNSTEERED, ClusterPolicy, newer_of
from slo.monitor.settings import MonitorSettings
from slo.predict.prediction_error import UNCORRECTED, is_correction
from telemetry import logs
from telemetry.catalogue import MONITOR_LOST, POLICY_APPLIED, Metric
from telemetry.instruments import Instruments
from telemetry.reporting.monitor_names import find_own_monitor
from telemetry.reporting.search import Search

METRICS: Final = (MONITOR_LOST, POLICY_APPLIED)
INTERVAL_S: Final = 0.5
QUIET_INTERVALS: Final = 4
"""Of which one is reported while nothing happens; less than a new monitor waits to hear from all."""
MOST_EVENTS: Final = 8192
"""Kept while the monitor does not answer, beside those of the last report; the oldest go first."""
EXPIRES_AFTER_S: Final = 60.0
"""A policy does not outlive its monitor for longer: nobody could take back what it sheds."""
_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Participant:
    """A process that reports and follows.

    Attributes:
        reporter: Its name; unique in the cluster.
        role: What it is.
        seen: Makes what to report from the events noted since the last report.
        follow: Called with each new policy.
        direct: Called with each directive.
        correct: Called with each new correction of its predictions; 1 is none.
        settings: What the monitor shall work with; from those that know the configuration.
        model: What it serves; one of several has a participant for each.
    """

    reporter: str
    role: Role
    seen: Callable[[tuple[Any, ...]], Seen | None]
    follow: Callable[[ClusterPolicy], None] = lambda _: None
    direct: Callable[[PreemptDirective], None] = lambda _: None
    correct: Callable[[float], None] = lambda _: None
    settings: MonitorSettings | None = None
    model: str = ""


class MonitorClient:
    """Reports every `interval_s`, while idle in one of `QUIET_INTERVALS`, and follows what comes back.

    What was not answered is told again under the same number, by which a monitor knows what it has heard.
    `instruments` must have `METRICS`. `find` returns the monitor's actor handle, or raises; it is called in a
    thread of its own. A policy that breaks its own rules is refused, and the last expires without a monitor.
    """

    def __init__(
        self,
        participant: Participant,
        instruments: Instruments,
        find: Callable[[], Any] = find_own_monitor,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.policy = UNSTEERED
        self._correction = UNCORRECTED
        self._participant = participant
        self._instruments = instruments
        self._search = Search(find)
        self._interval_s = interval_s
        self._events: deque[Any] = deque(maxlen=MOST_EVENTS)
        self._batch = 0
        self._unanswered: tuple[Any, ...] = ()
        """The events of the report with that number, until the monitor has answered it."""
        self._dropped = self._acknowledged = 0
        self._monitor: Any = None
        self._wanted = False
        self._lost_since_s: float | None = None
        self._may_skip = 0
        """How often nothing need be reported, as it was that nothing happens."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Report from now on; needs a running event loop. Later calls do nothing."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Report no more."""
        if self._task is not None:
            self._task.cancel()

    def note(self, event: Any) -> None:
        """Something to tell with the next report."""
        self._dropped += len(self._events) == MOST_EVENTS
        self._events.append(event)

    async def _run(self) -> None:
        while True:
            if not self._may_wait():
                await self._once()
            await asyncio.sleep(self._interval_s)

    def _may_wait(self) -> bool:
        """Whether what would be reported now was reported not long ago: that nothing happens."""
        if self._may_skip == 0 or self._events:
            return False
        self._may_skip -= 1
        with suppress(Exception):  # the report will tell
            return _is_quiet(self._participant.seen(()))
        return False

    async def _once(self) -> None:
        try:
            if self._monitor is None:
                async with asyncio.timeout(_TIMEOUT_S):  # `wait_for` may swallow a cancellation
                    self._monitor = await self._search.found()
        except Exception as error:  # noqa: BLE001 - the edge of a task; serving goes on with the last policy
            self._tell(error)
            return
        if not self._unanswered:
            self._batch, self._unanswered = self._batch + 1, tuple(self._events)
            self._events.clear()
        dropped = self._dropped
        try:
            report = self._report()
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await self._monitor.report.remote(report)
        except Exception as error:  # noqa: BLE001 - as above
            self._may_skip = 0
            if not isinstance(error, TimeoutError):
                self._monitor = None
            self._tell(error)
        else:
            self._unanswered = ()
            self._may_skip = QUIET_INTERVALS - 1 if _is_quiet(report.seen) and not answer.wanted else 0
            self._acknowledged = dropped
            self._take(answer)
            self._tell(None)

    def _report(self) -> MonitorReport:
        return MonitorReport(
            reporter=self._participant.reporter,
            role=self._participant.role,
            follows=self.policy.version,
            batch=self._batch,
            seen=self._participant.seen(self._unanswered),
            policy=self.policy if self._wanted else None,
            settings=self._participant.settings,
            dropped=self._dropped,
            acknowledged=self._acknowledged,
            model=self._participant.model,
        )

    def _take(self, answer: MonitorAnswer) -> None:
        self._wanted = answer.wanted
        newer = newer_of(self.policy, _checked(answer.policy))
        if newer is not self.policy:
            self._apply(newer)
        if answer.correction is not None:
            self._correct(answer.correction)
        self._guarded("direct", self._participant.direct, answer.directives)

    def _apply(self, policy: ClusterPolicy) -> None:
        self.policy = policy
        logs.event("policy_applied", version=policy.version, reserved=policy.reserved, shed=policy.shed)
        self._guarded("follow", self._participant.follow, [policy])

    def _correct(self, factor: float) -> None:
        if not is_correction(factor):
            logs.event("correction_refused", level=logging.ERROR, factor=factor)
        elif factor != self._correction:
            self._correction = factor
            self._guarded("correct", self._participant.correct, [factor])

    @staticmethod
    def _guarded(what: str, act: Callable[[Any], None], on: Iterable[Any]) -> None:
        """A policy that cannot be carried out must not end the reports."""
        for each in on:
            try:
                act(each)
            except Exception as error:  # noqa: BLE001 - the edge between the monitor and serving
                logs.event(f"{what}_failed", level=logging.ERROR, error=repr(error)[:500])

    def _tell(self, error: Exception | None) -> None:
        now_s = time.monotonic()
        was_lost = self._lost_since_s is not None
        if error is None:
            if was_lost:
                logs.event("monitor_found")
            self._lost_since_s = None
        else:
            if not was_lost:
                logs.event("monitor_lost", level=logging.WARNING, error=repr(error)[:300])
                self._lost_since_s = now_s
            follows = self.policy.version or self._correction != UNCORRECTED
            if now_s - (self._lost_since_s or now_s) >= EXPIRES_AFTER_S and follows:
                logs.event("policy_expired", level=logging.WARNING, version=self.policy.version)
                self._wanted = False
                self._apply(UNSTEERED)
                self._correct(UNCORRECTED)
        self._set(MONITOR_LOST, float(error is not None))
        self._set(POLICY_APPLIED, self.policy.version)

    def _set(self, metric: Metric, value: float) -> None:
        self._instruments.set(metric, value, model=self._participant.model)


def _is_quiet(seen: Seen | None) -> bool:
    return seen is None or seen.is_quiet


def _checked(policy: ClusterPolicy | None) -> ClusterPolicy | None:
    """A policy that keeps to its ranges, else None: what comes over the wire has not been checked."""
    try:
        if policy is not None:
            replace(policy)  # checks
    except Exception as error:  # noqa: BLE001 - whatever it holds, it is not a policy
        logs.event("policy_refused", level=logging.ERROR, error=repr(error)[:300])
        return None
    return policy
