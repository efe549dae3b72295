"""Inside a prefill replica the order is by slack."""

import asyncio
import random
import time

import pytest
from waiting import assert_soon, at_rest, until_queued

pytestmark = pytest.mark.e2e


async def test_a_late_urgent_request_overtakes_queued_ones(deployment):
    assert_soon(lambda: at_rest(deployment), 10)
    client = deployment.async_client()
    first_token_s = {}

    async def ask(name, tier, tokens):
        chunks = await client.completions.create(
            model="tiny",
            prompt=random.Random(name).choices(range(200), k=tokens),
            max_tokens=2,
            stream=True,
            extra_headers={"x-slo-tier": tier},
        )
        async for _ in chunks:
            first_token_s.setdefault(name, time.monotonic())

    queue = [asyncio.create_task(ask(f"background-{n}", "background", 4000)) for n in range(14)]
    await until_queued(deployment, 10)
    await ask("urgent", "premium", 64)
    await asyncio.gather(*queue)
    order = sorted(first_token_s, key=first_token_s.__getitem__)
    behind = len(order) - 1 - order.index("urgent")
    assert behind >= 6, f"the urgent request was number {order.index('urgent') + 1} of {len(order)}"
