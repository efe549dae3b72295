"""vLLM's manager of KV blocks where a step may be stopped.

Owns when a block's hash is registered, and what is asked of the pool's blocks before a step is chosen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_manager import KVCacheManager

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class CommitOnCompletion(KVCacheManager):  # type: ignore[misc] # vLLM ships no types for it
    """vLLM's manager, with `cache_blocks` left to the scheduler once a step is complete.

    vLLM registers the hashes of a step's blocks before its forward pass has run. That is sound while every
    step that is issued also runs to its end; a step that is stopped in the middle would leave blocks in the
    prefix cache that hold nothing.

    Attributes:
        delays: Whether steps can be stopped here.
    """

    delays: bool

    def allocate_slots(self, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        """Allocate as vLLM does, without registering hashes."""
        kwargs["delay_cache_blocks"] = self.delays or kwargs.get("delay_cache_blocks", False)
        return super().allocate_slots(*args, **kwargs)

    def blocks_of(self, request: Request) -> tuple[int, int]:
        """(held, missing) KV blocks for a whole prompt, prefix cache hits not foreseen.

        Of layers that attend to a window only, no more are missing than they hold at a time: that is how vLLM
        itself admits a request.
        """
        blocks = self.get_blocks(request.request_id).blocks
        held = sum([not block.is_null for group in blocks for block in group])
        return held, self._missing(request, self.empty_kv_cache_blocks.blocks, 0)

    def shared_blocks_of(self, request: Request, missing: int) -> int:
        """How many of those that a request is missing others hold, if it does not fit without them.

        What only the prefix cache holds is free, and taken as any other. At least one is computed.
        """
        if missing <= self.block_pool.get_num_free_blocks() or request.num_computed_tokens:
            return 0
        if not self.prefix_cache_lookup_enabled(request):
            return 0
        hits, cached, _ = self.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        return missing - max(1, self._missing(request, hits, cached))

    def freed_blocks_of(self, in_turn: Iterable[Iterable[Request]]) -> Iterator[int]:
        """How many blocks each of these groups makes free when they lose theirs one after the other.

        A block that several hold is free when the last of them has lost it.
        """
        lost: Counter[int] = Counter()
        for requests in in_turn:
            freed = 0
            for request in requests:
                for block in chain.from_iterable(self.get_blocks(request.request_id).blocks):
                    if not block.is_null:
                        lost[block.block_id] += 1
                        freed += lost[block.block_id] == block.ref_cnt
            yield freed

    def tokens_with_room(self, started: Iterable[Request], tokens: int) -> int:
        """How many of so many tokens a step can take of these, one after the other; at least one.

        Of a window that has moved on nothing is missing, which holds for chunks as long as the last one. For
        a longer one vLLM may find no room, and take all that the request holds.
        """
        taken_blocks, left = 0, tokens
        for request in started:
            behind = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
            self.coordinator.remove_skipped_blocks(
                request.request_id, behind, num_prompt_tokens=request.num_prompt_tokens
            )
            needs = partial(self._missing, request, self.empty_kv_cache_blocks.blocks, 0)
            asked = min(left, request.num_tokens - request.num_computed_tokens)
            free_blocks = self.block_pool.get_num_free_blocks() - taken_blocks
            if needs(asked) > free_blocks:
                return max(1, tokens - left + bisect_right(range(1, asked), free_blocks, key=needs))
            left -= asked
            taken_blocks += needs(asked)
        return tokens

    def _missing(
        self,
        request: Request,
        hits: Sequence[Sequence[KVCacheBlock]],
        cached: int,
        next_tokens: int | None = None,
    ) -> int:
        """Blocks for a whole prompt, or for so many of its next tokens alone."""
        is_whole = next_tokens is None
        tokens = request.num_tokens if is_whole else request.num_computed_tokens + next_tokens
        return int(
            self.coordinator.get_num_blocks_to_allocate(
                request.request_id,
                tokens,
                hits,
                num_encoder_tokens=0,
                total_computed_tokens=request.num_computed_tokens + cached,
                num_local_computed_tokens=cached,
                num_tokens_main_model=tokens,
                apply_admission_cap=is_whole,
            )
        )

    @staticmethod
    def adopt(manager: KVCacheManager, *, delays: bool = True) -> None:
        """Turn the manager that vLLM's scheduler has made into one of these."""
        if type(manager) is not KVCacheManager:
            raise TypeError(f"expected vLLM's KVCacheManager, found {type(manager).__name__}")
        manager.__class__ = CommitOnCompletion
        manager.delays = delays
