"""Keeps the cluster-wide SLO monitor informed, and a process at the policy that it answers with.

Owns how reports are batched, how the monitor is found again, and what holds while it is gone: the last
policy. What is reported and what a policy changes is its caller's. Nobody ever waits for the monitor.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import ray

from slo.monitor.messages import MonitorAnswer, MonitorReport, Role, Seen
from slo.monitor.policy import UNSTEERED, ClusterPolicy, newer_of
from telemetry import logs
from telemetry.catalogue import MONITOR_LOST, POLICY_APPLIED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from slo.monitor.directives import PreemptDirective
    from slo.monitor.settings import MonitorSettings
    from telemetry.instruments import Instruments

MONITOR_NAME: Final = "slo-monitor"
NAMESPACE: Final = "slackserve"
METRICS: Final = (MONITOR_LOST, POLICY_APPLIED)
INTERVAL_S: Final = 0.5
MOST_EVENTS: Final = 8192
"""Kept while the monitor does not answer; the oldest go first."""
_TIMEOUT_S: Final = 5.0


def find_monitor() -> Any:
    """The monitor's actor handle.

    Raises:
        ValueError: when there is none.
    """
    return ray.get_actor(MONITOR_NAME, namespace=NAMESPACE)


@dataclass(frozen=True, slots=True)
class Participant:
    """A process that reports and follows.

    Attributes:
        reporter: Its name; unique in the cluster.
        role: What it is.
        seen: Makes what to report from the events noted since the last report.
        follow: Called with each new policy.
        direct: Called with each directive.
        settings: What the monitor shall work with; from those that know the configuration.
    """

    reporter: str
    role: Role
    seen: Callable[[tuple[Any, ...]], Seen | None]
    follow: Callable[[ClusterPolicy], None] = lambda _: None
    direct: Callable[[PreemptDirective], None] = lambda _: None
    settings: MonitorSettings | None = None


class MonitorClient:
    """Reports every `interval_s` and follows what comes back.

    `instruments` must have `METRICS`. `find` returns the monitor's actor handle, or raises; it is called in a
    thread of its own.
    """

    def __init__(
        self,
        participant: Participant,
        instruments: Instruments,
        find: Callable[[], Any] = find_monitor,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.policy = UNSTEERED
        self._participant = participant
        self._instruments = instruments
        self._find = find
        self._interval_s = interval_s
        self._events: deque[Any] = deque(maxlen=MOST_EVENTS)
        self._dropped = 0
        self._monitor: Any = None
        self._wanted = False
        self._lost: bool | None = None
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
            await self._once()
            await asyncio.sleep(self._interval_s)

    async def _once(self) -> None:
        events = tuple(self._events)
        self._events.clear()
        try:
            async with asyncio.timeout(_TIMEOUT_S):  # `wait_for` may swallow a cancellation
                if self._monitor is None:
                    self._monitor = await asyncio.to_thread(self._find)
                answer = await self._monitor.report.remote(self._report(events))
        except TimeoutError as error:  # it may have heard; nothing is told twice
            self._tell(error)
        except Exception as error:  # noqa: BLE001 - the edge of a task; serving goes on with the last policy
            self._monitor = None
            self._put_back(events)
            self._tell(error)
        else:
            self._dropped = 0
            self._tell(None)
            self._take(answer)

    def _report(self, events: tuple[Any, ...]) -> MonitorReport:
        return MonitorReport(
            reporter=self._participant.reporter,
            role=self._participant.role,
            follows=self.policy.version,
            seen=self._participant.seen(events),
            policy=self.policy if self._wanted else None,
            settings=self._participant.settings,
            dropped=self._dropped,
        )

    def _put_back(self, events: tuple[Any, ...]) -> None:
        newer = tuple(self._events)
        self._dropped += max(0, len(events) + len(newer) - MOST_EVENTS)
        self._events = deque((*events, *newer), maxlen=MOST_EVENTS)

    def _take(self, answer: MonitorAnswer) -> None:
        self._wanted = answer.wanted
        newer = newer_of(self.policy, answer.policy)
        if newer is not self.policy:
            self.policy = newer
            logs.event("policy_applied", version=newer.version, reserved=newer.reserved, shed=newer.shed)
            self._guarded("follow", self._participant.follow, [newer])
        self._guarded("direct", self._participant.direct, answer.directives)
        self._instruments.set(POLICY_APPLIED, self.policy.version)

    @staticmethod
    def _guarded(what: str, act: Callable[[Any], None], on: Iterable[Any]) -> None:
        """A policy that cannot be carried out must not end the reports."""
        for each in on:
            try:
                act(each)
            except Exception as error:  # noqa: BLE001 - the edge between the monitor and serving
                logs.event(f"{what}_failed", level=logging.ERROR, error=repr(error)[:500])

    def _tell(self, error: Exception | None) -> None:
        lost = error is not None
        if lost and not self._lost:
            logs.event("monitor_lost", level=logging.WARNING, error=repr(error)[:300])
        elif self._lost and not lost:
            logs.event("monitor_found")
        self._lost = lost
        self._instruments.set(MONITOR_LOST, float(lost))
