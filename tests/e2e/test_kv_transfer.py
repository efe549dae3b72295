"""Prefill happens on the prefill tier and its KV moves over NIXL."""

import random
import time

import pytest
from serving import METRICS_EVERY_S
from waiting import assert_soon, at_rest

pytestmark = pytest.mark.e2e

BLOCK_TOKENS = 128
BYTES_PER_TOKEN = 4 * 2 * 2 * 32 * 4
"""Layers, keys and values, KV heads, head size, bytes of a float32."""


def test_the_prompts_kv_moves_over_nixl_and_decode_computes_next_to_none_of_it(deployment):
    decode = deployment.fleet()["decode"][0]["replica"]
    prefill = deployment.fleet()["prefill"][0]["replica"]

    def moved():
        return deployment.metric("slackserve_kv_transfer_bytes_total", replica=decode)

    def computed(replica):
        return deployment.metric(
            "vllm_prompt_tokens_by_source_total", source="local_compute", ReplicaId=replica
        )

    assert_soon(lambda: at_rest(deployment), 10)
    assert_soon(lambda: computed(prefill) > 0, 30)
    settle(deployment)
    moved_before, here_before, there_before = moved(), computed(decode), computed(prefill)
    tokens = 1500
    prompt = random.choices(range(200), k=tokens)  # never cached
    answer = deployment.client().completions.create(model="tiny", prompt=prompt, max_tokens=4)
    assert answer.usage.prompt_tokens == tokens

    assert_soon(lambda: moved() - moved_before >= tokens * BYTES_PER_TOKEN, 30)
    assert moved() - moved_before <= (tokens + BLOCK_TOKENS) * BYTES_PER_TOKEN
    assert_soon(lambda: computed(prefill) - there_before == tokens, 30)
    assert computed(decode) - here_before <= BLOCK_TOKENS


def settle(deployment):
    """Wait until two scrapes more than a reporting period apart agree."""
    name = "vllm_prompt_tokens_by_source_total"
    last = -1.0
    for _ in range(10):
        now = deployment.metric(name)
        if now == last:
            return
        last = now
        time.sleep(2.2 * METRICS_EVERY_S)
    pytest.fail("the metrics do not come to rest")


def test_both_tiers_give_back_all_blocks(deployment):
    client = deployment.client()
    for size in (10, 127, 128, 129, 1000, 4000):
        prompt = random.Random(size).choices(range(200), k=size)
        client.completions.create(model="tiny", prompt=prompt, max_tokens=3)
    assert_soon(lambda: at_rest(deployment), 5, "KV blocks were not given back")
