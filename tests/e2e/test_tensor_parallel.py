"""Prefill has two ranks, decode one: prefills are stopped by a vote, and decode joins what it pulls."""

import pytest
from overtaking import assert_overtaken
from ports import free_port, side_channels
from serving import deployed

pytestmark = [pytest.mark.e2e, pytest.mark.long]

KEYS = {"acme": "key-of-acme"}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, tiny_model):
    config = {
        "model": str(tiny_model),
        "model_name": "tiny",
        "port": free_port(),
        "kv_transfer": side_channels(),
        "prefill": {"tensor_parallel_size": 2},
        "monitor": {"port": 0, "shed": False},
        "max_model_len": 4096,
        "warmup_tokens": [32, 512, 2048],
        "preemption": {"stop_within_ms": 10_000},  # whole prompts, however slow the machine
        "tiers": {
            "premium": {"ttft_ms": 2000, "sheddable": False, "weight": 4},
            "standard": {"ttft_ms": 4000, "weight": 2},
            "background": {"weight": 1},
        },
        "api_keys": [{"tenant": "acme", "key": KEYS["acme"]}],
    }
    with deployed(tmp_path_factory.mktemp("two-ranks"), config, KEYS) as running:
        yield running


async def test_a_prefill_with_two_ranks_is_overtaken(two_ranks):
    await assert_overtaken(two_ranks)
