"""Waiting for what must become true."""

import asyncio
import time


def assert_soon(condition, within_s, message="it did not happen in time"):
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{message} within {within_s} s"
        time.sleep(0.1)


async def until(condition, within_s=5.0):
    """Wait for a condition while the loop goes on.

    Raises:
        TimeoutError: if it does not come about.
    """
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - a condition has no event
            await asyncio.sleep(0.005)


async def seconds_until(condition, within_s, message):
    """Wait for what a coroutine says; the seconds that it took."""
    started_s = time.monotonic()
    while not await condition():
        assert time.monotonic() - started_s < within_s, f"{message} within {within_s} s"
        await asyncio.sleep(0.05)
    return round(time.monotonic() - started_s, 2)


def at_rest(deployment):
    """Whether no replica holds KV blocks or has anything to do."""
    fleet = deployment.fleet()
    return all(
        replica["kv_usage"] == 0 and replica.get("outstanding", 0) == 0 and replica.get("running", 0) == 0
        for replica in (*fleet["prefill"], *fleet["decode"])
    )


async def until_queued(deployment, requests):
    """Wait until the prefill replica has that many requests outstanding."""
    await asyncio.to_thread(
        assert_soon,
        lambda: deployment.fleet()["prefill"][0]["outstanding"] >= requests,
        10,
        "no queue built up",
    )
