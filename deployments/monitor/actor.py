"""The cluster-wide SLO monitor: one named actor that everybody reports to, detached from whoever started it.

A thin shell around `slo.monitor.core`, of which each model that is served has one: its objectives are judged,
and its requests shed, by what happens to its own. Owns the clock, its log lines and its end: when nobody has
reported for minutes it goes, so that it is not left behind on a cluster that serves no more. Ray restarts it
when it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import ray
from ray import serve

from deployments.monitor.exporter import Exporter
from slo.autoscaling.need import FleetDemand
from slo.monitor.core import FORGET_AFTER_S, MonitorCore, MonitorState
from slo.monitor.messages import MonitorAnswer, MonitorReport
from slo.monitor.settings import MonitorSettings
from telemetry.reporting.monitor_names import NAMESPACE, monitor_name, monitors_of
from telemetry.reporting.of_model import named

LOOK_S: Final = 1.0
ABANDONED_AFTER_S: Final = 300.0
"""Longer than it takes to forget who reports, so that alerts see for minutes that nobody is left."""
_SHOW_RARELY: Final = 50
"""Merging the sketches of many tenants takes a while: a fiftieth of a core at most, while it is fresh."""
_SHOWN_FOR_S: Final = 15.0
"""What is exported gets no older, whatever it costs: Prometheus scrapes as often, and alerts hang on it."""
_HEAD_NODE: Final = "node:__internal_head__"
"""The resource that Ray gives its head node."""
_ANY_AMOUNT: Final = 0.001
_LOGGER: Final = logging.getLogger("slackserve.monitor")


@dataclass(frozen=True, slots=True)
class MonitorOptions:
    """What it is started with, and where.

    Attributes:
        settings: By model; hold until an ingress reports others.
        on_head: Whether it runs on Ray's head node, where a scrape finds it, or on any.
    """

    settings: Mapping[str, MonitorSettings]
    on_head: bool = True


class SloMonitor:
    """Hears reports, answers with the policy, and looks at the whole once a second."""

    def __init__(self, options: MonitorOptions, name: str) -> None:
        self._name = name
        logging.basicConfig(level=logging.INFO)
        now_s = time.monotonic()
        self._cores = {model: MonitorCore(settings, now_s) for model, settings in options.settings.items()}
        self._exporter = Exporter()
        for settings in options.settings.values():
            self._export_as(settings)
        self._show_at_s = 0.0
        self._exported_by = name
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def report(self, report: MonitorReport) -> MonitorAnswer:
        """Hear from somebody; of a model that is new, as after an upgrade, from now on."""
        now_s = time.monotonic()
        if (core := self._cores.get(report.model)) is None:
            core = self._cores[report.model] = MonitorCore(MonitorSettings(), now_s)
        before = core.settings
        answer = core.heard(report, now_s)
        if core.settings.exported_at != before.exported_at:
            self._export_as(core.settings)
        return answer

    async def export_by(self, name: str) -> None:
        """Leave the port to the application's monitor of that name, to which new ingresses report."""
        self._exported_by = name

    async def demand(self, model: str) -> FleetDemand | None:
        """What there is to do for a model's replicas; None when nobody has said."""
        core = self._cores.get(model)
        return None if core is None else core.demand(time.monotonic())

    async def state(self, model: str = "") -> dict[str, Any]:
        """What there is to know of a model, by default the first, as plain data for `slackserve top`."""
        if (core := named(self._cores, model)) is None:
            raise ValueError(f"this monitor has no model {model!r}, but {', '.join(self._cores)}")
        return shown(core.state(time.monotonic()), self._exporter)

    async def _watch(self) -> None:
        while True:
            try:
                self._look()
            except Exception:
                _LOGGER.exception("look_failed")
            try:
                await self._see_who_exports()
                self._export()
            except Exception:
                _LOGGER.exception("export_failed")
            try:
                if self._is_abandoned():
                    _LOGGER.info("abandoned")
                    ray.kill(ray.get_actor(self._name, namespace=NAMESPACE), no_restart=True)
                    return
            except Exception:
                _LOGGER.exception("end_failed")
            await asyncio.sleep(LOOK_S)

    def _is_abandoned(self) -> bool:
        return self._unheard_s() > ABANDONED_AFTER_S

    def _unheard_s(self) -> float:
        return time.monotonic() - max(core.heard_s for core in self._cores.values())

    def _look(self) -> None:
        now_s = time.monotonic()
        for model, core in list(self._cores.items()):
            if self._is_gone(core, now_s):
                del self._cores[model]
                continue
            before = core.policy.version
            reason = core.look(now_s)
            if (policy := core.policy).version != before:
                _LOGGER.info("policy_revised model=%s reason=%s %s", model, reason.value, policy)

    def _export_as(self, settings: MonitorSettings) -> None:
        if settings.exported_at is not None:
            self._exporter.move(*settings.exported_at)

    async def _see_who_exports(self) -> None:
        """Export again once the monitor that does so instead has ended; one that is restarted has not."""
        if self._exported_by != self._name:
            try:
                await asyncio.to_thread(ray.get_actor, self._exported_by, namespace=NAMESPACE)
            except ValueError:
                self._exported_by = self._name

    def _export(self) -> None:
        started_s = time.monotonic()
        is_heard = self._unheard_s() <= FORGET_AFTER_S  # else the port may be wanted for one that is
        if self._exported_by != self._name:
            self._leave_port()
        elif is_heard and self._exporter.open():
            self._show_at_s = started_s
        if started_s >= self._show_at_s:
            computed_s = time.thread_time()  # without that of others, which counts most under overload
            self._exporter.show(self._cores, started_s)
            computed_s = time.thread_time() - computed_s
            self._show_at_s = started_s + min(_SHOW_RARELY * computed_s, _SHOWN_FOR_S)

    def _leave_port(self) -> None:
        """Export no more; were counters to go on when the port is back, all would count as new once more."""
        if self._exporter.port:
            self._exporter.close()
            for core in self._cores.values():
                core.count_anew()

    def _is_gone(self, core: MonitorCore, now_s: float) -> bool:
        """Whether a model is served no more, while another is."""
        return len(self._cores) > 1 and now_s - core.heard_s > ABANDONED_AFTER_S


def start_monitor(options: MonitorOptions, application: str, *, is_ingress: bool = False) -> Any:
    """The handle of an application's monitor; started if there is none.

    It needs no CPU of its own, so that a full cluster still has one. Where an ingress that starts asks for
    it, the application's monitors of other code leave the port to it: from now on it hears what is judged.
    """
    place = {_HEAD_NODE: _ANY_AMOUNT} if options.on_head else {}
    name = monitor_name(application)
    actor = ray.remote(SloMonitor).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        num_cpus=0,
        resources=place,
    )
    monitor = actor.remote(options, name)
    if is_ingress:
        for each in monitors_of(application):
            with contextlib.suppress(AttributeError):  # other code may not know how
                each.export_by.remote(name)
    return monitor


def start_own_monitor(options: MonitorOptions, *, is_ingress: bool = False) -> Any:
    """The handle of the monitor of this replica's application; started if there is none."""
    return start_monitor(options, serve.get_replica_context().app_name, is_ingress=is_ingress)


class IngressMonitor:
    """The monitor of an ingress: one that starts asks for it, one that has lost it finds it again."""

    def __init__(self, options: MonitorOptions) -> None:
        self._options = options
        self._is_new = True

    def find(self) -> Any:
        """As `start_own_monitor`.

        The monitor is given the port the first time alone: from then on the port may be that of an ingress
        that has started later.
        """
        monitor = start_own_monitor(self._options, is_ingress=self._is_new)
        self._is_new = False
        return monitor


def stop_monitor(application: str) -> None:
    """End an application's monitors for good, whatever code they run."""
    for each in monitors_of(application):
        ray.kill(each, no_restart=True)


def shown(state: MonitorState, exporter: Exporter) -> dict[str, Any]:
    """A state as plain data, with where metrics are exported; port 0 for nowhere, and why."""
    policy = state.policy
    return {
        "uptime_s": state.uptime_s,
        "metrics_port": exporter.port,
        "metrics_refused": exporter.refused,
        "policy": {
            "version": policy.version,
            "shed": dict(policy.shed.items()),
            "reserved": policy.reserved,
            "preemption": None if policy.preemption is None else policy.preemption.value,
            "margin": policy.margin,
        },
        "corrections": dict(state.corrections),
        "reason": state.reason.value,
        "tiers": {
            tier: {
                "target": each.target,
                "attained": each.long.ratio,
                "judged": each.long.judged,
                "burn": {"short": each.burn.short.rate, "long": each.burn.long.rate},
                "goodput_per_s": each.long.goodput_per_s,
                "headroom": each.long.headroom,
                "ttft": None if each.long.ttft is None else each.long.ttft._asdict(),
                "at_risk": each.at_risk,
            }
            for tier, each in state.tiers.items()
        },
        "error": None if state.error is None else asdict(state.error),
        "ttft_error": None if state.ttft_error is None else asdict(state.ttft_error),
        "subscribers": {role.value: count for role, count in state.subscribers.items()},
        "behind": state.behind,
    }
