"""Which prompt prefixes a replica's KV memory still holds."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class PrefixCache:
    """Blocks by hash, the least recently used evicted first.

    Args:
        capacity_blocks: Blocks of the workload's size that fit; 0 switches the cache off.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def held_blocks(self, hashes: Sequence[int]) -> int:
        """How many leading blocks are there."""
        count = 0
        for block in hashes:
            if block not in self._blocks:
                break
            count += 1
        return count

    def hit_blocks(self, hashes: Sequence[int]) -> int:
        """The same, and they are used."""
        count = self.held_blocks(hashes)
        for block in hashes[:count]:
            self._blocks.move_to_end(block)
        return count

    def put(self, hashes: Sequence[int]) -> None:
        """A prompt has been prefilled."""
        if self._capacity == 0:
            return
        for block in hashes:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
