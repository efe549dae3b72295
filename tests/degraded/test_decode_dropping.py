"""A decode replica without memory for all its streams ends some that were promised nothing, and says so."""

import asyncio
import json
import random

import pytest
from serving import serving_tiny
from waiting import assert_soon, at_rest

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

KEY = "key-of-acme"
PREEMPTIONS = "slackserve_decode_preemptions_total"
BLOCKS = 24
"""Of 128 tokens: room for six of these answers at their ends."""


@pytest.fixture
def deployment(tmp_path):
    settings = {
        "max_model_len": 2048,
        "pressure": {"enabled": True, "reprefill": False, "drop_after_s": 0.1},
        "decode": {"engine_kwargs": {"num_gpu_blocks_override": BLOCKS, "max_num_batched_tokens": 2048}},
        "admission": {"calm_s": 600},
    }
    with serving_tiny(tmp_path, KEY, **settings) as running:
        yield running


async def answer(client, tier, max_tokens, prompt=200, **headers):
    """Status, events, and the error among them or in their place, of a streamed answer."""
    body = {
        "model": "tiny",
        "prompt": [random.randrange(200) for _ in range(prompt)],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    response = await client.post("/v1/completions", json=body, headers={"x-slo-tier": tier, **headers})
    if response.status_code != 200:
        return response.status_code, [], response.json()["error"]
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    errors = [json.loads(event)["error"] for event in events if event.startswith('{"error"')]
    return response.status_code, events, errors[0] if errors else None


async def test_who_was_promised_nothing_is_told_when_it_is_dropped(deployment, capsys):
    async with deployment.http(wait_s=300) as client:
        # Short answers first: the long ones are not expected, and too many of them are admitted.
        for _ in range(4):
            await asyncio.gather(*[answer(client, "background", 4, 20) for _ in range(12)])
        lasting = {"x-slo-e2e-ms": "3000000"}
        asked = [answer(client, "background", 300, **(lasting if one < 3 else {})) for one in range(14)]
        ended = await asyncio.gather(*asked)
        errors = [error for *_, error in ended if error is not None]
        assert errors, "nobody was dropped"
        assert {(error["code"], error["type"]) for error in errors} == {("dropped", "overloaded_error")}
        assert all(error is None for *_, error in ended[:3]), "those have an objective of their own"
        for status, events, error in ended:
            assert status == (200 if events else 429)
            assert ("[DONE]" in events) is (error is None)
            assert error is None or not events or events[-1].startswith('{"error"')
        after = await asyncio.gather(*[answer(client, "background", 20) for _ in range(6)])
        assert all(error is None for *_, error in after), "there is memory again"
    assert_soon(lambda: at_rest(deployment), 30, "something was left")
    # Ray tells of metrics from time to time.
    assert_soon(lambda: deployment.metric(PREEMPTIONS, by="drop") >= len(errors), 30, "they were not counted")
    assert deployment.metric(PREEMPTIONS, by="drop", tier="background") == len(errors)
    assert deployment.metric("slackserve_requests_total", outcome="evicted") == len(errors)
    taken = deployment.metric(PREEMPTIONS)
    with capsys.disabled():
        print(f"\n{len(errors)} dropped, memory taken {taken - len(errors):.0f} times")  # noqa: T201 - measured
    assert "request_failed" not in deployment.log.read_text()
