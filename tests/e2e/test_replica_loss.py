"""The only replica of its kind loses a process: nobody notices, and nothing is left behind.

Decode computes the prompts itself until a prefill replica is replaced; for an ingress clients wait.
"""

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
    long_s = min([(await ask(client, LONG))[1] for _ in range(3)])
    alone_s = min([(await ask(client, 64))[1] for _ in range(3)])
    later = {"x-slo-tier": "premium", "x-slo-ttft-ms": "60000"}
    for _ in range(18):
        stops = deployment.log.read_text().count("prefill_stopped")
        calls = [asyncio.create_task(ask(client, LONG, **{"x-slo-tier": "background"}))]
        await asyncio.sleep(long_s / 5)
        # For one of them: more than a stop takes, less than the long one has left.
        for part in (0.3, 0.5, 0.7, 0.9):
            urgent = {"x-slo-tier": "premium", "x-slo-ttft-ms": f"{(alone_s + long_s * part) * 1e3:.0f}"}
            calls.append(asyncio.create_task(ask(client, 64, **urgent)))
        await asyncio.sleep(0.03)
        calls += [asyncio.create_task(ask(client, 2000, **later)) for _ in range(6)]
        for _ in range(10):
            await asyncio.sleep(0.05)
            if deployment.log.read_text().count("prefill_stopped") > stops:
                return calls
        await asyncio.gather(*calls)
    pytest.fail("no prefill was stopped")


async def test_an_engine_that_is_killed_while_a_prefill_is_suspended(deployment):
    if deployment.log is None:
        pytest.skip("needs the log of a deployment of its own")
    client = deployment.http()
    processes = processes_of("Prefill")
    lost = {one["replica"] for one in deployment.fleet()["prefill"]}
    calls = await suspend_a_prefill(client, deployment)
    next(of_kind("engine", processes)).kill()
    killed_s = time.monotonic()
    answers = await asyncio.gather(*calls)
    assert time.monotonic() - killed_s < 30, "a client waited for too long"
    assert {status for status, _ in answers} == {200}
    status, took_s = await ask(client, 64)
    assert (status, took_s < 5) == (200, True), took_s

    def computed_by_decode():
        return deployment.metric("slackserve_local_prefills_total", reason="no_prefill_replica")

    await asyncio.to_thread(assert_soon, computed_by_decode, 10, "was the right process killed?")
    ready, degraded = [await client.get(path) for path in ("/ready", "/ready?degraded")]
    assert (ready.status_code, degraded.status_code) == (503, 200), ready.text
    assert degraded.json()["status"] == "degraded"

    def replaced():
        replicas = deployment.fleet()["prefill"]
        return any(one["replica"] not in lost and one["reported_s_ago"] < 1.5 for one in replicas)

    await asyncio.to_thread(assert_soon, replaced, 180, "the replica was not replaced")
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive, f"left behind: {[' '.join(process.cmdline()) for process in alive]}"
    assert boards() == [], "shared memory was left behind"
    await asyncio.to_thread(assert_soon, lambda: at_rest(deployment), 60)


async def test_requests_wait_for_the_only_ingress_that_was_killed(deployment):
    if deployment.process is None:
        pytest.skip("kills a process of a deployment of its own")
    async with deployment.http() as client:
        assert (await ask(client, 64))[0] == 200
        started = lambda: "Ready after" in deployment.log.read_text()  # noqa: E731
        # Before that the command takes a replica that fails for one that cannot start.
        await asyncio.to_thread(assert_soon, started, 30)
        processes_of("Ingress")[0].kill()
        asked = []
        for _ in range(8):
            asked.append(asyncio.create_task(ask(client, 64)))
            await asyncio.sleep(0.5)
        answers = await asyncio.gather(*asked)
        # The first one may have gone out on the connection that broke.
        assert [status for status, _ in answers[1:]] == [200] * 7, answers
        assert (await ask(client, 64))[0] == 200
    await asyncio.to_thread(assert_soon, lambda: at_rest(deployment), 60)
