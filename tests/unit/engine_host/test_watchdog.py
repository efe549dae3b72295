"""An engine that answers is not killed, however busy the replica's own process is."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from engine_host import watchdog
from engine_host.watchdog import EngineWatchdog
from slo.reports import EngineEnd


@pytest.fixture
def killed(monkeypatch):
    found = []
    monkeypatch.setattr(watchdog, "kill_engine", found.append)
    monkeypatch.setattr(watchdog, "_ANSWER_S", 0.05)
    monkeypatch.setattr(watchdog, "_END_S", 0.0)
    return found


@pytest.mark.parametrize(("stalled_s", "is_killed"), [(29.0, False), (31.0, True)])
async def test_nothing_is_killed_before_the_limit_that_is_configured(killed, stalled_s, is_killed):
    async def is_sleeping():
        await asyncio.sleep(1)

    processor = SimpleNamespace(has_unfinished_requests=lambda: True)
    client = SimpleNamespace(is_sleeping=is_sleeping, output_processor=processor, errored=True)
    watchdog = EngineWatchdog(client, lambda: 0, lambda: 0.1, hung_after_s=30.0)
    watchdog._account = SimpleNamespace(look=lambda *_, **__: stalled_s)
    await watchdog._look()
    assert bool(killed) == is_killed
    assert watchdog.engine_end is (EngineEnd.HUNG if is_killed else EngineEnd.FAILED)


async def test_an_answer_that_came_while_the_loop_was_busy_counts(killed):
    answer = asyncio.get_running_loop().create_future()

    async def is_sleeping():
        threading.Timer(0.02, answer.get_loop().call_soon_threadsafe, (answer.set_result, False)).start()
        asyncio.get_running_loop().call_soon(time.sleep, 0.2)  # other requests
        return await answer

    processor = SimpleNamespace(has_unfinished_requests=lambda: True)
    client = SimpleNamespace(is_sleeping=is_sleeping, output_processor=processor, errored=True)
    watchdog = EngineWatchdog(client, lambda: 0, lambda: 0.0)
    watchdog._account = SimpleNamespace(look=lambda *_, **__: 1e9)
    await watchdog._look()
    assert not killed
