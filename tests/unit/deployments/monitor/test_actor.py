"""The monitor's actor, without a Ray: its watch goes on whatever fails."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from ports import free_port

from deployments.monitor import actor
from deployments.monitor.actor import MonitorOptions, SloMonitor
from slo.monitor.settings import MonitorSettings
from slo.monitor.shedding import SteerReason


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
        monitor = SloMonitor(MonitorOptions({"tiny": MonitorSettings()}, host, free_port()), "slo-monitor-x")
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


def test_a_monitor_decides_whatever_becomes_of_its_metrics(monkeypatch, caplog):
    def fail(_):
        raise RuntimeError("no port today")

    monkeypatch.setattr(actor.Exporter, "open", fail)
    assert reason_and_refused(monkeypatch, "127.0.0.1")[0] == SteerReason.TOO_SOON
    assert "no port today" in caplog.text
