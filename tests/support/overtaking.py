"""Urgent requests overtake running prefills of a deployment."""

from __future__ import annotations

import asyncio
import random
import re
import time

from streams import lines
from waiting import assert_soon, at_rest

LONG, URGENT = 3900, 64
COMPARED = 3
"""How many prefills that were overtaken are computed again; `test_exactness` sees that they are exact."""


def random_prompt(tokens):
    return random.choices(range(200), k=tokens)


class Caller:
    """Sends completions and notes when the first chunk came."""

    def __init__(self, deployment):
        self._http = deployment.http()

    async def complete(self, prompt, salt=None, **headers):
        """(text, TTFT in seconds, when the first chunk came); nothing is shared with another salt."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        body |= {"cache_salt": salt} if salt else {}
        started_s = time.monotonic()
        first_s, text = 0.0, ""
        async with self._http.stream(
            "POST", "/v1/completions", json=body | {"stream": True}, headers=headers
        ) as answer:
            assert answer.status_code == 200, await answer.aread()
            self.predicted_s = float(answer.headers["x-slo-predicted-ttft-ms"]) / 1e3
            async for line in lines(answer):
                first_s = first_s or time.monotonic()
                text += "".join(re.findall(r'"text":\s*"((?:[^"\\]|\\.)*)"', line))
        return text, first_s - started_s, first_s

    async def long(self, prompt, salt=None):
        return await self.complete(prompt, salt, **{"x-slo-tier": "background"})

    async def long_as_predicted(self):
        """What a long one takes, seconds, once no more than 1.5 times that is predicted.

        A machine that was slower a minute ago has taught more, and a stop is ordered for what is predicted to
        be in time by it.
        """
        for _ in range(100):
            _, took_s, _ = await self.long(random_prompt(LONG))
            if self.predicted_s < 1.5 * took_s:
                return took_s
        raise AssertionError(f"{self.predicted_s:.3f} s are predicted of what takes {took_s:.3f} s")

    async def urgent(self, prompt, ttft_ms):
        return await self.complete(prompt, **{"x-slo-tier": "premium", "x-slo-ttft-ms": f"{ttft_ms:.0f}"})


async def assert_overtaken(deployment):
    """An urgent request overtakes a running prefill, which then ends as if nothing had been."""
    caller = Caller(deployment)
    await caller.long(random_prompt(LONG))
    long_s = await caller.long_as_predicted()
    _, alone_s, _ = await caller.urgent(random_prompt(URGENT), 2000)
    # Less than the long one has left when it is asked, more than a stop takes whatever is predicted of it.
    budget_ms = (alone_s + 0.65 * long_s) * 1e3
    before = deployment.metric("slackserve_preemptions_total", outcome="kept")
    overtook = compared = 0
    for _ in range(8):
        running = asyncio.create_task(caller.long(prompt := random_prompt(LONG)))
        await asyncio.sleep(long_s / 5)
        _, _, urgent_at_s = await caller.urgent(random_prompt(URGENT), budget_ms)
        text, _, long_at_s = await running
        overtaken = urgent_at_s < long_at_s
        overtook += overtaken
        if overtaken and compared < COMPARED:
            compared += 1
            assert (await caller.long(prompt))[0] == text, "from the KV that the stopped prefill has left"
            anew, anew_s, _ = await caller.long(prompt, salt="anew")
            assert anew_s > long_s / 2, "it is computed again"
            assert anew == text
    assert overtook >= 6, f"only {overtook} of 8 overtook"
    await asyncio.to_thread(
        assert_soon,
        lambda: deployment.metric("slackserve_preemptions_total", outcome="kept") >= before + 4,
        30,
        "the stops do not show in the metrics",
    )
    await asyncio.to_thread(assert_soon, lambda: at_rest(deployment), 10)
    assert deployment.metric("slackserve_prefill_suspended_steps") == 0
    assert deployment.metric("slackserve_preemption_available") == 1
