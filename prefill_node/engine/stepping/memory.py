"""Who fits into a replica's KV memory and its model runner, and who loses what it holds for another.

Pure: no engine. Who waits instead, and who runs, is `prefill_node.engine.stepping.step_choice`. A choice may
have to look at thousands that do not fit, each in a few microseconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeAlias

from prefill_node.board.messages import Queued
from prefill_node.engine.stepping.suspension import Suspended
from slo.queue.prefill import Prefill
from slo.request import JobId

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
    """The KV memory of a replica, and the places for requests in its model runner.

    Attributes:
        used_blocks: All that are not free. Those that nobody holds who waits are of prefills that have ended:
            they get free when decode has pulled them.
        shared_blocks: How many of the blocks that one is missing others hold with the same prefix; 0 where
            it fits without.
        freed_blocks: How many blocks become free as each of these, one after the other, loses what it holds:
            those that nobody else holds.
        free_places: So many may start; infinite where one that has started takes no place between its chunks.
        lost_often: Requests that have lost their memory again and again, in a fixed order. Of two of them the
            first takes what the second holds, and never the other way, whatever they are worth: they would
            take it from each other for ever.
        is_kept: Whether what is free is kept for one that starves and does not fit.
    """

    used_blocks: int = 0
    shared_blocks: Callable[[Queued], int] = nothing_shared
    freed_blocks: Callable[[Sequence[Holder]], list[int]] = all_freed
    free_places: float = math.inf
    lost_often: Sequence[str] = ()
    is_kept: bool = True


NOTHING_ELSE: Final = Memory()
"""None is in use but by those that wait, and nothing is shared."""

_LOOKED_UP_BLOCKS: Final = 8192
"""Of those that do not fit, one after the other is asked what it shares until so many blocks are looked up.

That takes a microsecond for each. Behind them only who fits without may start: who starts takes free blocks
from those before it."""


class FreeRoom:
    """The free blocks and places at one choice."""

    def __init__(self, free_blocks: int, memory: Memory) -> None:
        self.free_blocks = free_blocks
        self.free_places = memory.free_places
        self.is_kept = memory.is_kept
        self._memory = memory
        self._shared: dict[str, int] = {}
        self._looked_up = 0

    def new_blocks(self, item: Queued, *, always_looks: bool = False) -> int:
        """Free blocks that one needs while the others hold what it shares with them."""
        missing = item.missing_blocks
        if missing <= self.free_blocks:
            return missing
        shared = self._shared.get(item.request)
        if shared is None:
            if self._looked_up >= _LOOKED_UP_BLOCKS and not always_looks:
                return missing
            self._looked_up += missing
            shared = self._shared[item.request] = self._memory.shared_blocks(item)
        return missing - shared

    def fits(self, item: Queued, *, always_looks: bool = False) -> bool:
        """Whether the model runner knows one, or can, and there are the blocks that it needs."""
        has_place = item.has_started or self.free_places > 0
        return has_place and self.new_blocks(item, always_looks=always_looks) <= self.free_blocks


class Holders:
    """Those that hold memory at one choice, in the order in which they lose it.

    That is by worth, the smallest first, then who is due last, then who has the most work left.

    Args:
        worth: What each counts for; who waits and holds nothing counts for its weight.

    Attributes:
        ended_blocks: Those of prefills that have ended, which decode is about to pull.
        ends_first: Whoever can have ended, and freed its memory, first; None if none can go on. A prompt
            between two chunks can once decode has pulled what has ended: two that would lack memory even then
            would wait for each other.
        awaiting: Those that have the time to wait for that.
    """

    def __init__(
        self,
        queue: Sequence[Queued],
        suspended: Sequence[Suspended],
        free_blocks: int,
        memory: Memory,
        worth: Callable[[Prefill], float],
    ) -> None:
        self._memory = memory
        self._worth = worth
        self._chunked = [item for item in queue if item.held_blocks]
        self._holders: list[Holder] = [*suspended, *self._chunked]
        self._holders.sort(
            key=lambda one: (worth(one.prefill), -one.prefill.deadline_s, -one.prefill.remaining_s)
        )
        self._worths = [worth(one.prefill) for one in self._holders]
        self._held_blocks = [*accumulate([one.held_blocks for one in self._holders], initial=0)]
        self.ended_blocks = max(0, memory.used_blocks - self._held_blocks[-1])
        self._ranks = {request: rank for rank, request in enumerate(memory.lost_often)}
        most_blocks = free_blocks + self.ended_blocks
        going_on: list[Holder] = [item for item in suspended if not item.blocked]
        going_on += [one for one in self._chunked if one.missing_blocks <= most_blocks]
        self.ends_first = min(going_on, key=lambda one: one.prefill.remaining_s, default=None)
        self.awaiting: set[JobId] = set()
        self._ahead: set[JobId] = set()
        self._found: dict[tuple[int, int, int, str], tuple[list[Holder], list[int]]] = {}

    def passed(self, item: Queued) -> None:
        """Those that are asked from now on would run after this one."""
        if item.held_blocks:
            self._ahead.add(item.prefill.job_id)

    def may_take(self, item: Queued) -> float:
        """Up to what worth one takes the memory of others."""
        return self._worth(item.prefill) if item.held_blocks else item.prefill.weight

    def hold(self, worth: float, blocks: int) -> bool:
        """Whether those worth up to this hold so many, which need not all become free."""
        return self._held_blocks[bisect_right(self._worths, worth)] >= blocks

    def give_up(self, first: Queued, may_take: float, short_blocks: int) -> Sequence[Holder] | None:
        """Those worth up to `may_take` that free so many blocks for `first`; None if they do not.

        At least one does, and with its memory its place. Of those that would run before it only who is worth
        less gives up anything.
        """
        rank = self._ranks.get(first.request, math.inf)
        if rank == math.inf and not self.hold(may_take, short_blocks):
            return None
        lighter, most = bisect_left(self._worths, may_take), bisect_right(self._worths, may_take)
        name = first.request if first.held_blocks or rank < math.inf else ""
        key = lighter, most, len(self._ahead), name
        if key not in self._found:
            holders = [one for one in self._giving(lighter, most, rank) if one is not first]
            is_enough = sum([one.held_blocks for one in holders]) >= short_blocks
            self._found[key] = holders, [*accumulate(self._memory.freed_blocks(holders) if is_enough else ())]
        holders, freed = self._found[key]
        count = bisect_left(freed, short_blocks) + 1
        return holders[:count] if count <= len(freed) else None

    def _giving(self, lighter: int, most: int, rank: float) -> list[Holder]:
        """Those worth less, and of those worth as much whoever would run later; see `Memory.lost_often`."""
        equal = [one for one in self._holders[lighter:most] if one.prefill.job_id not in self._ahead]
        giving = [*self._holders[:lighter], *equal]
        if rank == math.inf:
            return giving
        known = {id(one) for one in giving}
        heavier = [one for one in self._holders if id(one) not in known and self._rank(one) < math.inf]
        return [one for one in (*giving, *heavier) if rank < self._rank(one)]

    def _rank(self, holder: Holder) -> float:
        names = holder.step.members if isinstance(holder, Suspended) else (holder.request,)
        return min([self._ranks.get(name, math.inf) for name in names])
