"""A decode replica without memory for all its streams: the lower tier makes way, and all are answered."""

import asyncio
import random
import time

import pytest
from serving import serving_tiny

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

KEY = "key-of-acme"
BLOCKS = 24
"""Of 128 tokens: room for six of these answers at their ends."""
TPOT_MS = 400


WAYS = {
    "swap": {"swap_gib": 0.25, "reprefill": False},
    "reprefill": {},
    "recompute": {"reprefill": False},
}
"""What `pressure` says for each of what may become of a victim's KV."""


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture
def deployment(tmp_path, way):
    settings = {
        "max_model_len": 2048,
        "pressure": {"enabled": True, **WAYS[way]},
        "decode": {"engine_kwargs": {"num_gpu_blocks_override": BLOCKS, "max_num_batched_tokens": 2048}},
        "admission": {"calm_s": 600},
        "tiers": {
            "premium": {"ttft_ms": 30_000, "tpot_ms": TPOT_MS, "sheddable": False, "weight": 4},
            "standard": {"ttft_ms": 30_000, "weight": 2},
            "background": {"weight": 1},
        },
    }
    with serving_tiny(tmp_path, KEY, **settings) as running:
        yield running


async def answer(client, tier, max_tokens, prompt=200):
    """(tokens of a greedy answer, when each came)."""
    stream = await client.completions.create(
        model="tiny",
        prompt=[random.randrange(200) for _ in range(prompt)],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
        extra_headers={"x-slo-tier": tier},
    )
    times, tokens = [], 0
    async for chunk in stream:
        if chunk.choices:
            times.append(time.monotonic())
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    return tokens, times


async def test_background_streams_make_way_for_premium_ones(deployment, way, capsys):
    client = deployment.async_client(wait_s=300)
    # Short answers first: the long ones are not expected, and too many of them are admitted.
    for _ in range(4):
        await asyncio.gather(
            *[answer(client, tier, 4, 20) for tier in ("background", "premium") for _ in range(6)]
        )
    low = [asyncio.create_task(answer(client, "background", 300)) for _ in range(10)]
    await asyncio.sleep(2)
    top = [asyncio.create_task(answer(client, "premium", 250)) for _ in range(3)]
    served = await asyncio.gather(*top)
    others = await asyncio.gather(*low)
    assert [tokens for tokens, _ in served] == [250] * 3
    assert [tokens for tokens, _ in others] == [300] * 10
    tpots_ms = [1e3 * (times[-1] - times[0]) / 249 for _, times in served]
    # Ray shows a gauge for as long as it is set: while the engine takes steps.
    long = asyncio.create_task(answer(client, "background", 1700))
    shown = set()
    while not long.done():
        await asyncio.sleep(0.2)
        for name in ("predicted_peak", "reserve"):
            value = await asyncio.to_thread(deployment.metric, f"slackserve_decode_{name}_ratio")
            shown |= {name} if 0.05 <= value <= 1 else set()
    assert shown == {"predicted_peak", "reserve"}
    taken = deployment.metric("slackserve_decode_preemptions_total")
    restored = deployment.metric("slackserve_decode_restore_seconds_count")
    with capsys.disabled():
        print(f"\n{way}: {taken:.0f} lost memory, premium TPOT {max(tpots_ms):.0f} ms")  # noqa: T201 - measured
    assert taken > 0, "memory was never short"
    assert deployment.metric("slackserve_decode_preemptions_total", tier="premium") == 0
    assert deployment.metric("slackserve_decode_preemptions_total", reason="vllm") == 0
    assert restored == taken
    by = {one: deployment.metric("slackserve_decode_preemptions_total", by=one) for one in WAYS}
    assert by == {one: taken if one == way else 0 for one in WAYS}
    out, back = [
        deployment.metric("slackserve_decode_swapped_blocks_total", direction=direction)
        for direction in ("out", "back")
    ]
    recomputed = deployment.metric("slackserve_decode_recomputed_tokens_total")
    again = deployment.metric("slackserve_replacements_total", cause="left", outcome="router")
    assert (out >= back > 0, recomputed > 0, again == taken) == (
        way == "swap",
        way == "recompute",
        way == "reprefill",
    )
    assert max(tpots_ms) <= TPOT_MS
    assert "request_failed" not in deployment.log.read_text()
