"""What runs in the background outlives the request that causes it, and its failures are logged."""

import asyncio
import contextvars
import logging

import pytest

from telemetry.reporting.background import Background

REQUEST = contextvars.ContextVar("request", default="none")


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_it_runs_outside_the_requests_context_and_survives_its_cancellation():
    seen = []
    background = Background()

    async def work():
        seen.append(REQUEST.get())
        await asyncio.sleep(0)
        seen.append("done")

    async def request():
        REQUEST.set("mine")
        background.run("work", work())
        await asyncio.sleep(60)

    task = asyncio.create_task(request())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settle()
    assert seen == ["none", "done"]


async def test_a_failure_is_logged_by_name(caplog):
    async def work():
        raise RuntimeError("the replica is gone")

    with caplog.at_level(logging.WARNING, logger="ray.serve"):
        Background().run("release", work(), job_id="job-1")
        await settle()
    assert "release_failed" in caplog.text
    assert "the replica is gone" in caplog.text
    assert "job_id=job-1" in caplog.text
