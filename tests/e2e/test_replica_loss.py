"""A replica that loses one of its processes gets no more requests, leaves nothing behind, and is replaced."""

import asyncio
import random
import time
from pathlib import Path

import httpx
import psutil
import pytest
from processes import of_kind, processes_of
from waiting import assert_soon, at_rest

pytestmark = pytest.mark.e2e

LONG = 3900


def boards():
    return list(Path("/dev/shm").glob("slackserve-board-*"))


async def ask(client, tokens, **headers):
    """(status, seconds until the answer was complete); status 0 for a broken connection."""
    prompt = random.choices(range(200), k=tokens)
    started_s = time.monotonic()
    try:
        answer = await client.post(
            "/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 2}, headers=headers
        )
    except httpx.TransportError:
        return 0, time.monotonic() - started_s
    return answer.status_code, time.monotonic() - started_s


async def suspend_a_prefill(client, deployment):
    """Have a long prefill suspended, with more urgent ones to come before it; the requests under way."""
    await ask(client, LONG)
    _, long_s = await ask(client, LONG)
    await ask(client, 64)
    _, alone_s = await ask(client, 64)
    later = {"x-slo-tier": "premium", "x-slo-ttft-ms": "60000"}
    for part in (0.5, 0.3, 0.7, 0.4, 0.6, 0.9) * 3:
        stops = deployment.log.read_text().count("prefill_stopped")
        calls = [asyncio.create_task(ask(client, LONG, **{"x-slo-tier": "background"}))]
        await asyncio.sleep(long_s / 5)
        # More than a stop takes, less than the long one has left.
        urgent = {"x-slo-tier": "premium", "x-slo-ttft-ms": f"{(alone_s + long_s * part) * 1e3:.0f}"}
        calls.append(asyncio.create_task(ask(client, 64, **urgent)))
        await asyncio.sleep(0.03)
        calls += [asyncio.create_task(ask(client, 2000, **later)) for _ in range(12)]
        for _ in range(10):
            await asyncio.sleep(0.05)
            if deployment.log.read_text().count("prefill_stopped") > stops:
                return calls
        await asyncio.gather(*calls)
    pytest.fail("no prefill was stopped")


@pytest.mark.parametrize("kind", ["worker", "engine"])  # the replica itself: tests/degraded
async def test_killed_while_a_prefill_is_suspended(deployment, kind):
    if deployment.log is None:
        pytest.skip("needs the log of a deployment of its own")
    client = httpx.AsyncClient(
        base_url=deployment.url, headers={"authorization": "Bearer key-of-acme"}, timeout=60
    )
    processes = processes_of("Prefill")
    calls = await suspend_a_prefill(client, deployment)
    next(of_kind(kind, processes)).kill()
    killed_s = time.monotonic()
    answers = await asyncio.gather(*calls)
    assert time.monotonic() - killed_s < 30, "a client waited for too long"
    assert all(status in (0, 200, 500, 502, 503) for status, _ in answers), answers
    assert any(status != 200 for status, _ in answers), "nobody noticed; was the right process killed?"

    def ready():
        return httpx.post(
            f"{deployment.url}/v1/completions",
            json={"model": "tiny", "prompt": "hello", "max_tokens": 2},
            headers={"authorization": "Bearer key-of-acme"},
            timeout=60,
        )

    if kind == "engine":
        refused = ready()
        assert refused.json()["error"]["code"] == "no_replica"
        assert int(refused.headers["retry-after"]) >= 1
    await asyncio.to_thread(
        assert_soon, lambda: ready().status_code == 200, 180, "the replica was not replaced"
    )
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive, f"left behind: {[' '.join(process.cmdline()) for process in alive]}"
    assert boards() == [], "shared memory was left behind"
    await asyncio.to_thread(assert_soon, lambda: at_rest(deployment), 60)
