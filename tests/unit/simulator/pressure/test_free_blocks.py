"""Free blocks are given out as vLLM's own pool gives them."""

from random import Random

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from simulator.pressure.free_blocks import FreeBlocks

BLOCK, POOL = 16, 40
SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)


def vllms_memory():
    init_none_hash(sha256)
    groups = [KVCacheGroupSpec(["layer"], SPEC)]
    config = KVCacheConfig(num_blocks=POOL + 1, kv_cache_tensors=[], kv_cache_groups=groups)  # one is null
    return KVCacheManager(config, 4096, BLOCK, BLOCK, enable_caching=True)


def of_its_own(name, tokens):
    hasher = get_request_block_hasher(BLOCK, sha256)
    sampling = SamplingParams(max_tokens=1)
    return Request(f"r{name}", [name] * tokens, sampling, pooling_params=None, block_hasher=hasher)


@pytest.mark.parametrize("seed", range(20))
def test_as_much_is_left_of_whoever_comes_back_as_in_vllms_pool(seed):
    rng, kv, free = Random(seed), vllms_memory(), FreeBlocks(POOL)
    asked = [of_its_own(number, rng.randrange(21, 300, 2)) for number in range(12)]
    running, seen = {}, 0
    for _ in range(300):
        request = rng.choice(asked)
        if (held := running.pop(request.request_id, None)) is not None:
            kv.free(request)
            free.come_back(request.request_id, held, request.num_computed_tokens // BLOCK)
            request.num_computed_tokens = 0
            continue
        blocks = -(-request.num_tokens // BLOCK)
        if blocks > free.count:
            continue
        hits, tokens, *_ = kv.get_computed_blocks(request)
        assert free.give_again(request.request_id) == tokens // BLOCK
        assert kv.allocate_slots(request, request.num_tokens - tokens, tokens, hits) is not None
        free.give(blocks - tokens // BLOCK)
        request.num_computed_tokens = request.num_tokens
        running[request.request_id] = blocks
        assert free.count == kv.block_pool.get_num_free_blocks()
        seen += 0 < tokens < request.num_tokens - BLOCK
    assert seen, "nobody has come back to a part of what it had"
