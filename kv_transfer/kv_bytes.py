"""How many bytes of KV cache a token takes, by an engine's own configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def kv_bytes_per_token(config: VllmConfig) -> int:
    """Bytes of one token's KV on all ranks together: a key and a value per layer and KV head.

    Latent attention (MLA) keeps one vector per layer instead.
    """
    model = config.model_config
    dtype = kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, model)
    heads = 1 if model.use_mla else 2 * model.get_total_num_kv_heads()
    return int(model.get_total_num_hidden_layers() * heads * model.get_head_size() * dtype.itemsize)
