"""Free blocks in the order in which they are given out, and whose sequence they still have the KV of.

As in vLLM 0.29's pool: a block that has no KV worth keeping is given out first, the others in the order in
which they came back, those of a sequence from its end (`vllm.v1.core.block_pool.BlockPool.free_blocks`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class FreeBlocks:
    """The blocks of a pool that nobody holds.

    Args:
        blocks: As many as that at first, with nothing in them.

    Attributes:
        count: As many as there are.
    """

    def __init__(self, blocks: int) -> None:
        self.count = blocks
        self._empty = blocks
        self._kept: OrderedDict[Hashable, int] = OrderedDict()
        """Leading blocks of each sequence, that whose came back first."""

    def give(self, blocks: int) -> None:
        """Give out so many."""
        self.count -= blocks
        taken = min(blocks, self._empty)
        self._empty -= taken
        blocks -= taken
        while blocks > 0:
            owner, kept = next(iter(self._kept.items()))
            taken = min(blocks, kept)
            blocks -= taken
            if taken == kept:
                del self._kept[owner]
            else:
                self._kept[owner] = kept - taken

    def come_back(self, owner: Hashable, blocks: int, whole: int) -> None:
        """Take back all blocks of a sequence, of which so many are `whole`; none of them may be here."""
        assert owner not in self._kept
        self.count += blocks
        self._empty += blocks - whole
        if whole:
            self._kept[owner] = whole

    def give_again(self, owner: Hashable) -> int:
        """Give out what is still here of a sequence, to itself; how many blocks from its start these are."""
        blocks = self._kept.pop(owner, 0)
        self.count -= blocks
        return blocks
