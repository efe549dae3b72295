"""Which replicas have which blocks of prompts, for looking up a whole prompt at once.

A replica is a bit, and those that have a block are one number: a long prompt that many have takes one
operation for each block. Which blocks a replica has is its caller's to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import and_

from slo.request import ReplicaId


class BlockHolders:
    """Replicas by block."""

    def __init__(self) -> None:
        self._by_block: dict[int, int] = {}
        self._bits: dict[ReplicaId, int] = {}
        self._replicas: list[ReplicaId] = []
        self._free: list[int] = []

    def add(self, replica_id: ReplicaId, block: int) -> None:
        """A replica has a block."""
        bit = self._bits.get(replica_id) or self._new_bit(replica_id)
        self._by_block[block] = self._by_block.get(block, 0) | bit

    def remove(self, replica_id: ReplicaId, block: int) -> None:
        """A replica has a block no more."""
        if rest := self._by_block[block] & ~self._bits[replica_id]:
            self._by_block[block] = rest
        else:
            del self._by_block[block]

    def forget(self, replica_id: ReplicaId) -> None:
        """A replica that has no blocks any more is gone."""
        if (bit := self._bits.pop(replica_id, 0)) != 0:
            self._free.append(bit)

    def leading(self, hashes: Sequence[int]) -> dict[ReplicaId, int]:
        """How many leading blocks of a prompt each replica has; those with none are left out."""
        found: dict[ReplicaId, int] = {}
        if not hashes or not (holders := self._by_block.get(hashes[0], 0)):
            return found
        # Those that have all blocks so far only become fewer.
        for count, have_all in enumerate(accumulate(map(self._by_block.get, hashes, repeat(0)), and_)):
            if have_all != holders:
                self._note(found, holders & ~have_all, count)
                holders = have_all
                if not holders:
                    return found
        self._note(found, holders, len(hashes))
        return found

    def _note(self, found: dict[ReplicaId, int], holders: int, count: int) -> None:
        while holders:
            last = holders.bit_length() - 1
            found[self._replicas[last]] = count
            holders ^= 1 << last

    def _new_bit(self, replica_id: ReplicaId) -> int:
        if self._free:
            bit = self._free.pop()
            self._replicas[bit.bit_length() - 1] = replica_id
        else:
            bit = 1 << len(self._replicas)
            self._replicas.append(replica_id)
        self._bits[replica_id] = bit
        return bit
