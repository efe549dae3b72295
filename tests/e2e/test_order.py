"""Inside a prefill replica the order is by slack."""

import asyncio
import random
import time

import pytest
from waiting import assert_soon, at_rest, until_queued

pytestmark = pytest.mark.e2e


async def test_a_late_urgent_request_overtakes_queued_ones(deployment):
    assert_soon(lambda: at_rest(deployment), 10)
    client = deployment.client().with_options()
    first_token_s = {}

    async def ask(name, tier, tokens):
        prompt = random.Random(name).choices(range(200), k=tokens)
        await asyncio.to_thread(first_token, name, tier, prompt)

    def first_token(name, tier, prompt):
        chunks = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=2, stream=True, extra_headers={"x-slo-tier": tier}
        )
        next(iter(chunks))
        first_token_s[name] = time.monotonic()
        for _ in chunks:
            pass

    queue = [asyncio.create_task(ask(f"background-{n}", "background", 4000)) for n in range(24)]
    await until_queued(deployment, 10)
    await ask("urgent", "premium", 64)
    await asyncio.gather(*queue)
    order = sorted(first_token_s, key=first_token_s.__getitem__)
    behind = len(order) - 1 - order.index("urgent")
    assert behind >= 6, f"the urgent request was number {order.index('urgent') + 1} of {len(order)}"
