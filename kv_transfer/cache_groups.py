"""Models whose KV cache is in several groups, or of layers that attend to a window of tokens only.

Owns which of them decode takes, whether requests give back blocks before they end, and that both tiers keep
what the last token of a prompt attends to. Which blocks a window has passed, and which of the others are
pulled, is vLLM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vllm.v1.core.single_type_kv_cache_manager import RSWAManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

NULL_BLOCK: Final = 0
"""VLLM's, which stands in all requests' tables for blocks that a sliding window has passed."""
_TAKEN: Final = frozenset({FullAttentionSpec, SlidingWindowSpec})
"""Kinds that vLLM derives from these, as of latent attention, are others."""


class SeveralCacheGroupsError(RuntimeError):
    """A model's KV cache is in several groups that decode does not take; `kinds` are vLLM's names of them."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__(
            f"this model's KV cache is in {len(kinds)} groups ({', '.join(kinds)}), which decode refuses: "
            "after a failed transfer vLLM 0.29 could answer with another prompt's text (vLLM issue 52234), "
            "and only with full and sliding-window attention, in blocks of one shape, decode ends such a "
            "request; for a model whose groups are all of attention, set "
            "disable_hybrid_kv_cache_manager: true in prefill.engine_kwargs and decode.engine_kwargs, "
            "otherwise serve another model"
        )
        self.kinds = kinds


def refuse_several_groups(kv_cache: KVCacheConfig) -> None:
    """Refuse to decode several groups of KV caches, unless they are of full and sliding-window attention.

    Of a failed pull vLLM's scheduler finds no request that has several groups. Decode's does
    (`decode_node.scheduler`), which is tested with these two kinds.

    Raises:
        SeveralCacheGroupsError: It is.
    """
    specs = [group.kv_cache_spec for group in kv_cache.transfer_groups]
    if len(specs) > 1 and not _are_taken(specs):
        raise SeveralCacheGroupsError([type(spec).__name__ for spec in specs])


def _are_taken(specs: Sequence[KVCacheSpec]) -> bool:
    if not {type(spec) for spec in specs} <= _TAKEN:
        return False
    return len({(spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype) for spec in specs}) == 1


def keeps_all(memory: KVCacheManager, tokens: int) -> bool:
    """Whether no request of so many tokens gives back a block before it ends, of whichever group.

    Args:
        memory: Of an engine, once it keeps what `keep_for_last_token` says.
        tokens: That a request has at most.
    """
    return not any(_gives_back(manager, tokens) for manager in memory.coordinator.single_type_managers)


def _gives_back(manager: SingleTypeKVCacheManager, tokens: int) -> bool:
    # With RSWA what lies between the prompt and the window is given back, and the method does not tell.
    passed: int = manager.get_num_skipped_tokens(tokens)
    return isinstance(manager, RSWAManager) or passed >= manager.block_size


def keep_for_last_token(memory: KVCacheManager) -> None:
    """Have windows keep one token more than the next one attends to.

    A decode engine that samples the first token of a prompt computes the prompt's last token again, once it
    has pulled them all. By then vLLM's windows have moved on to the next one, and where a block ends just
    there, the last token would attend to the null block. What vLLM reserves for a request has room for it.
    """
    for manager in memory.coordinator.single_type_managers:
        if isinstance(manager, SlidingWindowManager):
            manager.extra_retained_tokens += 1
