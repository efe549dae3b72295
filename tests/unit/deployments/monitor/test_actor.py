"""The monitor's actor, without a Ray: its watch goes on whatever fails."""

import asyncio
from types import SimpleNamespace

from deployments.monitor import actor
from deployments.monitor.actor import MonitorOptions, SloMonitor
from slo.monitor.settings import MonitorSettings


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
