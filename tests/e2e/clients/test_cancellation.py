"""A client that goes away at any moment frees what it held on both tiers."""

import asyncio
import json
import random

import pytest
from waiting import assert_soon, at_rest, until_queued

pytestmark = pytest.mark.e2e


def body(tokens, max_tokens, stream=True):
    return {
        "model": "tiny",
        "prompt": random.choices(range(200), k=tokens),  # never cached
        "max_tokens": max_tokens,
        "stream": stream,
        "ignore_eos": True,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }


class Client:
    def __init__(self, deployment):
        self.http = deployment.http()
        self.http.headers["x-slo-tier"] = "background"

    async def send(self, request):
        """Read the whole answer; how many tokens it had."""
        async with self.http.stream("POST", "/v1/completions", json=request) as response:
            assert response.status_code == 200, await response.aread()
            events = [line async for line in response.aiter_lines() if line.startswith("data: {")]
            return json.loads(events[-1].removeprefix("data: "))["usage"]["completion_tokens"]

    async def leave_after(self, seconds, request):
        """Go away that long after sending; True if it was before the answer was complete."""
        task = asyncio.create_task(self.send(request))
        done, _ = await asyncio.wait([task], timeout=seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return not done

    async def leave_after_chunks(self, chunks, request):
        async with self.http.stream("POST", "/v1/completions", json=request) as response:
            seen = 0
            async for line in response.aiter_lines():
                seen += line.startswith("data: {")
                if seen == chunks:
                    return


@pytest.fixture
async def client(deployment):
    assert_soon(lambda: at_rest(deployment), 10)
    made = Client(deployment)
    yield made
    await made.http.aclose()


def assert_given_back(deployment):
    assert_soon(lambda: at_rest(deployment), 5, f"not everything was given back: {deployment.fleet()}")


async def test_who_leaves_while_queued_holds_nothing(deployment, client):
    busy = [asyncio.create_task(client.send(body(4000, 2))) for n in range(9)]
    await until_queued(deployment, 6)
    gone = await asyncio.gather(*(client.leave_after(0.1, body(4000, 90)) for _ in range(5)))
    assert all(gone)
    await asyncio.gather(*busy)
    assert_given_back(deployment)


async def test_who_leaves_while_prefilling_holds_nothing(deployment, client):
    for n in range(8):
        assert await client.leave_after(0.05 + 0.02 * n, body(4000, 90))
    assert_given_back(deployment)


async def test_who_leaves_between_prefill_and_decode_or_anywhere_else_holds_nothing(deployment, client):
    """Leave at closely spaced moments from arrival to the end of the answer."""
    left = [await client.leave_after(0.01 * n, body(1500, 4)) for n in range(50)]
    assert True in left[5:], "nobody has left while it was under way"
    assert False in left, "nobody has waited for the end"
    assert_given_back(deployment)


async def test_many_who_leave_at_random_moments_hold_nothing(deployment, client):
    rng = random.Random(5)
    moments = [rng.uniform(0.0, 1.0) for _ in range(60)]
    await asyncio.gather(*(client.leave_after(s, body(900, 8)) for n, s in enumerate(moments)))
    assert_given_back(deployment)


async def test_who_leaves_while_decoding_holds_nothing(deployment, client):
    for _ in range(3):
        await client.leave_after_chunks(5, body(600, 2000))
    assert_given_back(deployment)


async def test_who_leaves_without_streaming_holds_nothing(deployment, client):
    for n in range(5):
        assert await client.leave_after(0.1 * n + 0.05, body(1000, 1500, stream=False))
    assert_given_back(deployment)


async def test_others_are_not_disturbed(deployment, client):
    whole = asyncio.create_task(client.send(body(800, 60)))
    for _ in range(6):
        await client.leave_after(0.08, body(2000, 50))
    assert await whole == 60
    assert_given_back(deployment)
