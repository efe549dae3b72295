"""What the choice of the next step has to know of a replica's KV memory, beside how much of it is free.

Pure: no engine. Whose memory is taken is `prefill_node.engine.stepping.step_choice`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from prefill_node.board.messages import Queued
from prefill_node.engine.stepping.suspension import Suspended

Holder: TypeAlias = Queued | Suspended
"""A prompt between two chunks, or a suspended step."""


def nothing_shared(_item: Queued) -> int:
    """Where no prefixes are shared."""
    return 0


def all_freed(holders: Sequence[Holder]) -> list[int]:
    """The same of what each of these frees."""
    return [holder.held_blocks for holder in holders]


@dataclass(frozen=True, slots=True)
class Memory:
    """The KV memory of a replica.

    Attributes:
        used_blocks: All that are not free. Those that nobody holds who waits are of prefills that have ended:
            they get free when decode has pulled them.
        shared_blocks: How many of the blocks that one is missing others hold with the same prefix; 0 where
            it fits without.
        freed_blocks: How many blocks become free as each of these, one after the other, loses what it holds:
            those that nobody else holds.
    """

    used_blocks: int = 0
    shared_blocks: Callable[[Queued], int] = nothing_shared
    freed_blocks: Callable[[Sequence[Holder]], list[int]] = all_freed


NOTHING_ELSE: Final = Memory()
"""None is in use but by those that wait, and nothing is shared."""
