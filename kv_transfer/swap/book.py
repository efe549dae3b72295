"""Which requests have their KV blocks in host memory: the scheduler's side of swapping.

Owns the slots of the host's pool and what the next step moves. Nothing here touches a tensor, see
`kv_transfer.swap.host_blocks`; who is swapped is decided in `slo.decode`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_GIB = 1 << 30
MOST_BYTES = 8 * _GIB
_MOST_PART = 4


class Move(NamedTuple):
    """One block of the engine's, and the slot of the host's pool that it goes to or comes from."""

    block: int
    slot: int


@dataclass(frozen=True, slots=True)
class SwapStep:
    """What a worker moves before it computes a step: all that goes out, then all that comes back."""

    out: tuple[Move, ...]
    back: tuple[Move, ...]


class _Held(NamedTuple):
    tokens: int
    slots: tuple[int, ...]


@dataclass(slots=True)
class SwapFigures:
    """What was moved since the figures before these, in blocks."""

    out: int = 0
    back: int = 0


def pool_blocks(given_bytes: int | None, block_bytes: int, blocks: int, ranks: int) -> int:
    """Blocks of the host's pool of each worker.

    Args:
        given_bytes: Host memory for all workers of the replica together; None for as much as a quarter of its
            KV cache, and 8 GiB at most.
        block_bytes: Of one block at one worker, all layers.
        blocks: That the engine has.
        ranks: Workers of the replica.
    """
    if given_bytes is None:
        return min(MOST_BYTES // ranks // block_bytes, blocks // _MOST_PART)
    return given_bytes // ranks // block_bytes


class SwapBook:
    """Slots of the host's pool, and whose they are.

    A slot that is free again is used from the next step on, so that within a step nothing that goes out
    overwrites what is to come back.

    Args:
        slots: Of the host's pool, each for one block.
        block_tokens: Of a block.

    Attributes:
        block_s: Seconds to move a block one way; None until the workers have said it.
        figures: What has been moved; whoever reads it replaces it.
    """

    def __init__(self, slots: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._slots = slots
        self._free = list(range(slots))
        self._freed: list[int] = []
        self._held: dict[str, _Held] = {}
        self._out: list[Move] = []
        self._back: list[Move] = []
        self.block_s: float | None = None
        self.figures = SwapFigures()

    @property
    def slots(self) -> int:
        """All of them."""
        return self._slots

    @property
    def free_slots(self) -> int:
        """Those that can be used in this step."""
        return len(self._free)

    @property
    def used(self) -> float:
        """Part of the pool that holds something."""
        return sum(len(held.slots) for held in self._held.values()) / self._slots if self._slots else 0.0

    def blocks_of(self, tokens: int) -> int:
        """Blocks that so many tokens take, the last one in part."""
        return -(-tokens // self._block_tokens)

    def tokens_of(self, name: str) -> int:
        """Of a request's tokens, the first ones whose KV is in host memory; 0 for none."""
        held = self._held.get(name)
        return 0 if held is None else held.tokens

    def take(self, name: str, blocks: Sequence[int], tokens: int) -> bool:
        """Move the KV of a request's first tokens out with the next step; whether there is room for it.

        Args:
            name: The request.
            blocks: Its blocks, in their order.
            tokens: Whose KV has been computed.
        """
        needed = self.blocks_of(tokens)
        if not 0 < needed <= min(len(self._free), len(blocks)) or name in self._held:
            return False
        slots = tuple(heapq.heappop(self._free) for _ in range(needed))
        self._held[name] = _Held(tokens, slots)
        self._out += map(Move, blocks, slots)
        self.figures.out += needed
        return True

    def give(self, name: str, blocks: Sequence[int], missing_tokens: int) -> None:
        """Move a request's KV back with the next step; its slots are free after it.

        Args:
            name: The request.
            blocks: Its new blocks, in their order.
            missing_tokens: Of its tokens in host memory, the last ones, whose KV is to come from there; that
                of whole blocks before them is in the engine already.

        Raises:
            ValueError: when the blocks are not those of its tokens; what is computed with them would be
                wrong.
        """
        held = self._held[name]
        if missing_tokens == 0:
            self.forget(name)
            return
        first, rest = divmod(held.tokens - missing_tokens, self._block_tokens)
        if rest or missing_tokens > held.tokens or len(blocks) < len(held.slots):
            raise ValueError(
                f"{name}: {missing_tokens} of {held.tokens} tokens do not fit {len(blocks)} blocks of "
                f"{self._block_tokens}"
            )
        moves = [*map(Move, blocks, held.slots)][first:]
        self._back += moves
        self.figures.back += len(moves)
        self.forget(name)

    def forget(self, name: str) -> None:
        """A request needs no host memory any more, if it had any."""
        if (held := self._held.pop(name, None)) is not None:
            self._freed += held.slots

    def forget_all(self) -> None:
        """What is in host memory is of no use any more."""
        for name in [*self._held]:
            self.forget(name)

    def step(self) -> SwapStep | None:
        """What the next step moves; None for nothing."""
        moves = SwapStep(tuple(self._out), tuple(self._back))
        self._out, self._back = [], []
        self._release()
        return moves if moves.out or moves.back else None

    def _release(self) -> None:
        for slot in self._freed:
            heapq.heappush(self._free, slot)
        self._freed.clear()


def runs(moves: Iterable[Move]) -> list[tuple[int, int]]:
    """(first slot, number) of each stretch of slots that follow each other, in the order of the moves."""
    found: list[tuple[int, int]] = []
    for _, slot in moves:
        if found and slot == sum(found[-1]):
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((slot, 1))
    return found
