"""KV blocks enter the prefix cache when their step is complete, not when they are allocated.

vLLM registers the hashes of a step's blocks before its forward pass has run. That is sound while every step
that is issued also runs to its end; a step that is stopped in the middle would leave blocks in the cache that
hold nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_manager import KVCacheManager

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks


class CommitOnCompletion(KVCacheManager):  # type: ignore[misc] # vLLM ships no types for it
    """vLLM's manager, with `cache_blocks` left to the scheduler once a step is complete."""

    def allocate_slots(self, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        """Allocate as vLLM does, without registering hashes."""
        kwargs["delay_cache_blocks"] = True
        return super().allocate_slots(*args, **kwargs)

    @staticmethod
    def adopt(manager: KVCacheManager) -> None:
        """Turn the manager that vLLM's scheduler has made into one of these."""
        if type(manager) is not KVCacheManager:
            msg = f"expected vLLM's KVCacheManager, found {type(manager).__name__}"
            raise TypeError(msg)
        manager.__class__ = CommitOnCompletion
