"""Which models decode takes, and what windows keep."""

import pytest
import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kv_transfer.cache_groups import (
    SeveralCacheGroupsError,
    keep_for_last_token,
    keeps_all,
    refuse_several_groups,
)

BLOCK = 16
SIZES = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**SIZES)
MAMBA = MambaSpec(block_size=BLOCK, shapes=((2, 512),), dtypes=(torch.float32,))
CHUNKED = ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=64)
LATENT = MLAAttentionSpec(**SIZES)


def windowed(window=64, **other):
    return SlidingWindowSpec(**SIZES | other, sliding_window=window)


def cache_of(*specs):
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize(
    "specs",
    [
        [FULL],
        [MAMBA],
        [CHUNKED],
        [LATENT],
        [FULL, windowed()],
        [windowed(), FULL, windowed()],
        [windowed(64), windowed(128)],
    ],
)
def test_decode_takes_one_group_and_several_of_full_and_windowed_attention(specs):
    refuse_several_groups(cache_of(*specs))


@pytest.mark.parametrize(
    "specs",
    [
        [FULL, MAMBA],
        [FULL, CHUNKED],
        [FULL, windowed(), CHUNKED],
        [FULL, windowed(block_size=2 * BLOCK)],
        [FULL, windowed(num_kv_heads=2, head_size=4)],
        [FULL, windowed(dtype=torch.bfloat16)],
        [LATENT, windowed()],
        [LATENT, SlidingWindowMLASpec(**SIZES, sliding_window=64)],
    ],
)
def test_other_kinds_together_are_refused_with_a_remedy(specs):
    remedy = r"52234.*disable_hybrid_kv_cache_manager: true"
    with pytest.raises(SeveralCacheGroupsError, match=remedy) as refused:
        refuse_several_groups(cache_of(*specs))
    assert refused.value.kinds == [type(spec).__name__ for spec in specs]


@pytest.mark.parametrize("in_flight", [1, 17, 64])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 40, 64])
def test_what_the_last_token_attends_to_stays_and_vllm_has_reserved_that_much(window, in_flight):
    memory = KVCacheManager(cache_of(windowed(window)), 4096, BLOCK, BLOCK, in_flight, enable_caching=False)
    (manager,) = memory.coordinator.single_type_managers
    keep_for_last_token(memory)
    most = 0
    for computed in range(6 * BLOCK):
        first = manager.get_num_skipped_tokens(computed) // BLOCK * BLOCK
        assert first <= max(0, computed - window), "the last token that was computed attends to this one"
        most = max(most, -(-(computed + in_flight) // BLOCK) - first // BLOCK)
    assert most <= manager._max_admission_blocks_per_request


def test_full_attention_is_left_alone():
    memory = KVCacheManager(cache_of(FULL), 4096, BLOCK, BLOCK, enable_caching=False)
    keep_for_last_token(memory)
    (manager,) = memory.coordinator.single_type_managers
    assert manager.get_num_skipped_tokens(4096) == 0


@pytest.mark.parametrize(
    ("specs", "tokens", "keeps"),
    [
        ([FULL], 4096, True),
        ([LATENT], 4096, True),
        ([windowed(64)], 64, True),
        ([windowed(64)], 96, False),
        ([windowed(64)], 4096, False),
        ([FULL, windowed(64)], 4096, False),
        ([CHUNKED], 4096, False),
        ([RSWASpec(**SIZES, rswa_window=64)], 4096, False),
    ],
)
def test_whether_requests_keep_their_blocks_to_their_end(specs, tokens, keeps):
    memory = KVCacheManager(cache_of(*specs), 4096, BLOCK, BLOCK, enable_caching=False)
    keep_for_last_token(memory)
    assert keeps_all(memory, tokens) == keeps
