"""Reports go out on changes and regularly, whether somebody listens or not, until the last one."""

import asyncio
import time
from itertools import pairwise

import pytest

from telemetry.reporting import reporter as reporting
from telemetry.reporting.reporter import Reporter


class Listener:
    """Takes reports; one who is gone fails at each."""

    def __init__(self, *, listens=True):
        self.listens = listens
        self.heard = []
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    async def send(self, report):
        (self.second if self.heard else self.first).set()
        self.heard.append(report)
        if not self.listens:
            raise ConnectionError("the router is gone")


async def test_a_change_is_reported_soon_and_many_become_one():
    listener = Listener()
    reporter = Reporter(lambda: len(listener.heard), listener.send)
    await asyncio.wait_for(listener.first.wait(), 1)
    for _ in range(100):
        reporter.changed()
    await asyncio.wait_for(listener.second.wait(), 1)
    await asyncio.sleep(0.02)
    assert listener.heard == [0, 1]
    reporter.stop()


async def test_reports_that_take_long_to_make_come_less_often():
    listener = Listener()

    def long_report():
        until_s = time.thread_time() + 0.015
        while time.thread_time() < until_s:
            pass
        return time.monotonic()

    reporter = Reporter(long_report, listener.send)
    for _ in range(60):
        reporter.changed()
        await asyncio.sleep(0.01)
    reporter.stop()
    gaps_s = [later - earlier for earlier, later in pairwise(listener.heard)]
    assert gaps_s
    assert min(gaps_s) >= 0.15
    assert max(gaps_s) < reporting.HEARTBEAT_S, "still for the change"


@pytest.mark.parametrize("listens", [True, False])
async def test_after_the_last_report_there_is_none(listens):
    listener = Listener(listens=listens)
    reporter = Reporter(lambda: "alive", listener.send)
    await asyncio.wait_for(listener.first.wait(), 1)
    await reporter.end("gone")
    reporter.changed()
    await asyncio.sleep(0.02)
    assert listener.heard == ["alive", "gone"]


@pytest.mark.parametrize("turns", range(5))
async def test_the_last_report_is_the_last_though_one_arrives_as_it_is_made(turns, monkeypatch):
    monkeypatch.setattr(reporting, "HEARTBEAT_S", 0.01)
    heard, sends = [], asyncio.Event()

    async def send(report):
        heard.append(report)
        sends.set()
        for _ in range(turns):
            await asyncio.sleep(0)

    reporter = Reporter(lambda: "alive", send)
    await sends.wait()
    await reporter.end("gone")
    reported = len(heard)
    await asyncio.sleep(0.05)
    assert len(heard) == reported


async def test_a_report_that_is_cancelled_from_below_is_not_the_last(monkeypatch):
    """As Serve does with a call that its replica cancels."""
    monkeypatch.setattr(reporting, "HEARTBEAT_S", 0.01)
    heard, second, delivered = [], asyncio.Event(), []

    async def send(report):
        heard.append(report)
        if len(heard) == 1:
            raise asyncio.CancelledError
        second.set()

    reporter = Reporter(lambda: "alive", send, lambda: delivered.append(len(heard)))
    await asyncio.wait_for(second.wait(), 1)
    await asyncio.sleep(0)
    reporter.stop()
    assert delivered == [2]


async def test_what_did_not_arrive_is_not_taken_for_delivered():
    listener, delivered = Listener(listens=False), []
    reporter = Reporter(lambda: "news", listener.send, lambda: delivered.append(len(listener.heard)))
    await asyncio.wait_for(listener.first.wait(), 1)
    await asyncio.sleep(0)
    assert delivered == []
    listener.listens = True
    reporter.changed()
    await asyncio.wait_for(listener.second.wait(), 1)
    await asyncio.sleep(0)
    assert delivered == [2]
    reporter.stop()
