"""A minute of mixed traffic leaves nothing behind."""

import asyncio
import random
import time

import pytest
from waiting import assert_soon, at_rest

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SECONDS = 60
STREAMS = 10


async def test_concurrent_streams_of_mixed_tiers(deployment):
    def counted(outcome):
        return deployment.metric("slackserve_requests_total", outcome=outcome)

    assert_soon(lambda: at_rest(deployment), 10)
    client = deployment.async_client()
    before = {outcome: counted(outcome) for outcome in ("finished", "failed")}
    end_s = time.monotonic() + SECONDS
    rng = random.Random(11)
    served = {"premium": 0, "standard": 0, "background": 0}

    async def stream():
        while time.monotonic() < end_s:
            tier = rng.choice(list(served))
            wanted = rng.randint(1, 30)
            chunks = await client.chat.completions.create(
                model="tiny",
                messages=[
                    {"role": "user", "content": "".join(rng.choices("abcdef ", k=rng.randint(5, 1500)))}
                ],
                max_tokens=wanted,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={"x-slo-tier": tier, "x-slo-ttft-ms": "30000"},
                extra_body={"ignore_eos": True},
            )
            usage = None
            async for chunk in chunks:
                usage = chunk.usage or usage
            assert usage.completion_tokens == wanted
            served[tier] += 1

    await asyncio.gather(*(stream() for _ in range(STREAMS)))
    assert min(served.values()) > 5, served
    assert_soon(lambda: at_rest(deployment), 5, f"something was left behind: {deployment.fleet()}")
    finished = sum(served.values())
    assert_soon(lambda: counted("finished") - before["finished"] >= finished, 30)
    assert counted("failed") == before["failed"]
