"""vLLM's real scheduler and KV cache manager, without a model."""

from __future__ import annotations

from functools import cache

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16


@cache
def _config(model):
    return EngineArgs(
        model=str(model),
        dtype="float32",
        max_model_len=2048,
        max_num_batched_tokens=2048,
        block_size=BLOCK,
        enforce_eager=True,
        async_scheduling=False,
    ).create_engine_config()


def build(scheduler_cls, model, blocks, *, max_num_seqs=64, chunk=64, additional=None, window=0):
    """A scheduler of this class with so many usable blocks of 16 tokens; those of one test share a config.

    With a window its second layer attends to so many tokens only.
    """
    config = _config(model)
    config.scheduler_config.max_num_seqs = max_num_seqs
    config.scheduler_config.long_prefill_token_threshold = chunk
    config.additional_config = additional or {}
    config.cache_config.num_gpu_blocks = blocks + 1
    sizes = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["layer.0"], FullAttentionSpec(**sizes))]
    if window:
        groups.append(KVCacheGroupSpec(["layer.1"], SlidingWindowSpec(**sizes, sliding_window=window)))
    kv = KVCacheConfig(num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups)
    return scheduler_cls(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )
