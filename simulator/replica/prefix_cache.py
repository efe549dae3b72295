"""Which prompt prefixes a replica's KV memory still holds."""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile

from simulator.workload.arrivals import Arrival


class PrefixCache:
    """Blocks by hash, the least recently used evicted first."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def held_tokens(self, arrival: Arrival) -> int:
        """How much of a prompt is there; at least one token always remains to be computed."""
        return self._tokens(arrival, self._held_blocks(arrival))

    def hit_tokens(self, arrival: Arrival) -> int:
        """The same, and it is used."""
        count = self._held_blocks(arrival)
        for block in arrival.blocks[:count]:
            self._blocks.move_to_end(block)
        return self._tokens(arrival, count)

    def put(self, arrival: Arrival) -> None:
        """A prompt has been prefilled."""
        for block in arrival.blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity_tokens // arrival.block_tokens:
            self._blocks.popitem(last=False)

    def _held_blocks(self, arrival: Arrival) -> int:
        return sum(1 for _ in takewhile(self._blocks.__contains__, arrival.blocks))

    @staticmethod
    def _tokens(arrival: Arrival, blocks: int) -> int:
        return min(blocks * arrival.block_tokens, arrival.tokens - 1)
