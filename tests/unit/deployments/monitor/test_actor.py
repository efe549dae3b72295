"""The monitor's actor, without a Ray: its watch goes on whatever fails."""

import asyncio
import itertools
import time
from types import SimpleNamespace
from urllib.request import urlopen

import pytest
from ports import free_port

from deployments.monitor import actor
from deployments.monitor.actor import MonitorOptions, SloMonitor, start_monitor
from observability.causes import cause_alerts
from slo.monitor.core import FORGET_AFTER_S
from slo.monitor.messages import IngressSeen, MonitorReport, Role
from slo.monitor.settings import MonitorSettings
from slo.monitor.shedding import SteerReason
from slo.outcomes import Outcome, RequestEnded
from slo.tiers import PREMIUM


async def test_a_monitor_that_could_not_end_itself_tries_again(monkeypatch, caplog):
    tried, killed = [], []

    def get_actor(name, namespace):
        tried.append(name)
        if len(tried) < 3:
            raise ConnectionError("the head is away")
        return name

    ray = SimpleNamespace(get_actor=get_actor, kill=lambda name, no_restart: killed.append(name))
    monkeypatch.setattr(actor, "ray", ray)
    monkeypatch.setattr(actor, "LOOK_S", 0.01)
    monkeypatch.setattr(actor, "ABANDONED_AFTER_S", 0.0)
    monitor = SloMonitor(MonitorOptions({"tiny": MonitorSettings()}), "slo-monitor-x")
    async with asyncio.timeout(10):
        await monitor._watching
    assert killed == ["slo-monitor-x"]
    assert caplog.text.count("the head is away") >= 2


SCRAPED_EVERY_S = 30.0
"""At most, whatever Prometheus does."""


class Outlived:
    """A monitor whose application is lost at `lost_s`; of its clock each look takes a second."""

    def __init__(self, monkeypatch, lost_s=100.0):
        self.now_s, self._lost_s, self.shown, self.opened, self.killed = 0.0, lost_s, [], [], []
        clock = SimpleNamespace(monotonic=lambda: self.now_s, thread_time=lambda: 0.0)
        ray = SimpleNamespace(
            get_actor=lambda name, **_: name, kill=lambda name, **_: self.killed.append(name)
        )
        monkeypatch.setattr(actor, "time", clock)
        monkeypatch.setattr(actor, "ray", ray)
        monkeypatch.setattr(actor, "LOOK_S", 0.0)
        monkeypatch.setattr(actor.Exporter, "open", lambda _: self.opened.append(self.now_s))
        monkeypatch.setattr(actor.Exporter, "show", lambda _, cores, now_s: self._show(cores, now_s))

    def _show(self, cores, now_s):
        (core,) = cores.values()
        self.shown.append((now_s, core.state(now_s).subscribers.get(Role.DECODE, 0)))
        self.now_s += 1.0

    async def ends(self):
        monitor = SloMonitor(MonitorOptions({"tiny": MonitorSettings()}), "slo-monitor-x")
        async with asyncio.timeout(10):
            while not self.killed:
                if self.now_s < self._lost_s:
                    await monitor.report(report_of_decode())
                await asyncio.sleep(0)


def report_of_decode():
    return MonitorReport(
        reporter="decode", role=Role.DECODE, follows=0, batch=0, seen=None, policy=None, model="tiny"
    )


async def test_that_nobody_is_left_is_exported_for_long_enough_to_be_told(monkeypatch):
    outlived = Outlived(monkeypatch)
    await outlived.ends()
    lost = next(each.fields() for each in cause_alerts().rules if each.alert == "SlackServeDecodeLost")
    empty_s = [now_s for now_s, decoding in outlived.shown if not decoding and now_s > 100]
    assert len(empty_s) >= 60 * int(lost["for"].removesuffix("m")) + 2 * SCRAPED_EVERY_S
    assert [decoding for now_s, decoding in outlived.shown if 1 < now_s < 100] == [1] * 98


async def test_a_monitor_to_which_nobody_reports_takes_no_port(monkeypatch):
    """It would be that of the one that is reported to, and tell that nobody is left."""
    outlived = Outlived(monkeypatch)
    await outlived.ends()
    assert outlived.opened[-1] < 100 + FORGET_AFTER_S + 2


def looked(monkeypatch, show, during_s):
    """How often a monitor shows its metrics when that takes `show`."""
    shown = []

    def counted(_, cores, now_s):
        shown.append(now_s)
        show(len(shown))

    monkeypatch.setattr(actor, "LOOK_S", 0.01)
    monkeypatch.setattr(actor.Exporter, "show", counted)

    async def watch():
        monitor = SloMonitor(MonitorOptions({"tiny": MonitorSettings()}), "slo-monitor-x")
        await asyncio.sleep(during_s)
        monitor._watching.cancel()

    asyncio.run(watch())
    return len(shown)


def test_metrics_get_no_older_when_others_have_the_cores(monkeypatch):
    """The time in which it does not run is not what it costs."""
    assert looked(monkeypatch, lambda count: time.sleep(0.2 if count == 1 else 0), 1) > 10


def test_metrics_that_take_long_to_compute_are_shown_rarely_but_never_get_old(monkeypatch):
    def compute(_):
        ends_s = time.thread_time() + 0.02
        while time.thread_time() < ends_s:
            pass

    assert looked(monkeypatch, compute, 0.8) == 1
    monkeypatch.setattr(actor, "_SHOWN_FOR_S", 0.1)
    assert looked(monkeypatch, compute, 0.8) > 3


def reason_and_refused(monkeypatch, host):
    """Why a new monitor left its policy as it is, once it has looked, and why it exports nothing."""
    monkeypatch.setattr(actor, "LOOK_S", 0.01)

    async def watch():
        settings = MonitorSettings(exported_at=(host, free_port()))
        monitor = SloMonitor(MonitorOptions({"tiny": settings}), "slo-monitor-x")
        await asyncio.sleep(0.2)
        monitor._watching.cancel()
        state = await monitor.state()
        return state["reason"], state["metrics_refused"]

    return asyncio.run(watch())


@pytest.mark.parametrize("host", ["head..svc", "x" * 70])
def test_a_monitor_decides_whatever_its_address_is(monkeypatch, host):
    reason, refused = reason_and_refused(monkeypatch, host)
    assert reason == SteerReason.TOO_SOON
    assert refused


async def test_metrics_are_where_the_latest_configuration_wants_them():
    """Ray restarts it with the settings that it was first started with."""
    before, after = (MonitorSettings(exported_at=("127.0.0.1", free_port())) for _ in range(2))
    monitor = SloMonitor(MonitorOptions({"tiny": before}), "slo-monitor-x")
    for model, reporter, settings, there in (
        ("tiny", "drains", before, before),
        ("new", "router", None, before),
        ("new", "comes", after, after),
        ("tiny", "drains", before, after),
        ("tiny", "comes", after, after),
        ("tiny", "drains", before, after),
    ):
        await monitor.report(MonitorReport(reporter, Role.INGRESS, 0, settings=settings, model=model))
        monitor._export()
        assert ("127.0.0.1", (await monitor.state())["metrics_port"]) == there.exported_at
    monitor._watching.cancel()
    monitor._exporter.close()


async def test_metrics_are_shown_at_once_where_they_have_moved(monkeypatch):
    """However long they take to compute."""
    clock = SimpleNamespace(monotonic=lambda: 100.0, thread_time=itertools.count().__next__)
    monkeypatch.setattr(actor, "time", clock)
    before, after = (MonitorSettings(exported_at=("127.0.0.1", free_port())) for _ in range(2))
    monitor = SloMonitor(MonitorOptions({"tiny": before}), "slo-monitor-x")
    monitor._watching.cancel()
    for reporter, settings in (("drains", before), ("comes", after)):
        await monitor.report(MonitorReport(reporter, Role.INGRESS, 0, settings=settings, model="tiny"))
        monitor._export()
        assert "slackserve_slo_target_ratio{" in scraped(settings.exported_at[1])
    monitor._exporter.close()


async def judging(monitor, requests):
    late = RequestEnded("tiny", PREMIUM, "acme", Outcome.FINISHED, 1.0, ttft_s=0.3, ttft_budget_s=0.2)
    await monitor.report(MonitorReport("i", Role.INGRESS, 0, IngressSeen((late,) * requests), model="tiny"))


def scraped(port):
    """The page at that port."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return answer.read().decode()


def counted(port):
    """The counters at that port that are not at zero."""
    series = [line.rsplit(" ", 1) for line in scraped(port).splitlines()]
    return {name: float(value) for name, value in series if "_total{" in name and float(value)}


@pytest.fixture
async def old_and_new(monkeypatch):
    """Two monitors that want one port, and look when they are told to."""
    clock = SimpleNamespace(monotonic=lambda: 100.0, thread_time=lambda: 0.0)
    monkeypatch.setattr(actor, "time", clock)
    settings = MonitorSettings(exported_at=("127.0.0.1", free_port()), models=("tiny",))
    monitors = [SloMonitor(MonitorOptions({"tiny": settings}), name) for name in ("old", "new")]
    for monitor in monitors:
        monitor._watching.cancel()
    yield *monitors, settings.exported_at[1]
    for monitor in monitors:
        monitor._exporter.close()


async def test_a_monitor_that_has_its_port_back_exports_nothing_twice(old_and_new):
    """As after a roll back: what was scraped before would count as judged in one moment."""
    old, new, port = old_and_new

    async def counted_by(name, monitor, requests):
        await judging(monitor, requests)
        for each in (old, new):
            await each.export_by(name)
        for each in (old, new, old):
            each._export()
        return sorted(counted(port).values())

    assert await counted_by("old", old, 1000) == [1000.0, 1000.0], "of objectives `ttft` and `all`"
    assert await counted_by("new", new, 7) == [7.0, 7.0]
    assert await counted_by("old", old, 3) == [3.0, 3.0]
    assert (await old.state("tiny"))["tiers"][PREMIUM]["judged"] == 1003


async def test_a_monitor_leaves_its_port_to_one_that_is_restarted_and_has_it_back_from_one_that_ended(
    old_and_new, monkeypatch
):
    old, new, port = old_and_new
    there = {"new": object()}

    def get_actor(name, namespace):
        if name not in there:
            raise ValueError(name)

    monkeypatch.setattr(actor, "ray", SimpleNamespace(get_actor=get_actor))

    async def port_of_old():
        await old._see_who_exports()
        old._export()
        return old._exporter.port

    assert await port_of_old() == port
    await old.export_by("new")
    assert await port_of_old() == 0, "and the process of the new one is not there yet"
    new._export()
    new._exporter.close()
    assert await port_of_old() == 0, "it is restarted"
    there.clear()
    assert await port_of_old() == port


def test_where_an_ingress_starts_its_monitor_exports(monkeypatch):
    said = []

    def monitor(name):
        return SimpleNamespace(export_by=SimpleNamespace(remote=lambda by: said.append((name, by))))

    started = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: None))
    monkeypatch.setattr(actor, "ray", SimpleNamespace(remote=lambda _: started))
    monkeypatch.setattr(
        actor, "monitors_of", lambda _: iter((monitor("old"), SimpleNamespace(), monitor("new")))
    )
    start_monitor(MonitorOptions({}), "app")
    assert said == []
    start_monitor(MonitorOptions({}), "app", is_ingress=True)
    own = actor.monitor_name("app")
    assert said == [("old", own), ("new", own)], "whoever knows how"


def test_a_monitor_decides_whatever_becomes_of_its_metrics(monkeypatch, caplog):
    def fail(_):
        raise RuntimeError("no port today")

    monkeypatch.setattr(actor.Exporter, "open", fail)
    assert reason_and_refused(monkeypatch, "127.0.0.1")[0] == SteerReason.TOO_SOON
    assert "no port today" in caplog.text
