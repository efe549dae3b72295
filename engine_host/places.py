"""The places of a replica, which has so many requests at once; the others wait before it.

Owns who has a place. Whose turn it is when one is free is decided in `slo.queue.entrance`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from slo.queue.entrance import Entrance
from slo.tiers import Tier, TierSet


class Places:
    """The places of one replica.

    Args:
        many: How many there are.
        tiers: Rank of each tier.
        clock: Says what time it is, in seconds.
    """

    def __init__(self, many: int, tiers: TierSet, clock: Callable[[], float] = time.monotonic) -> None:
        self._free = many
        self._door = Entrance[asyncio.Future[None]](tiers)
        self._clock = clock

    @asynccontextmanager
    async def one(self, tier: Tier) -> AsyncIterator[None]:
        """Wait for a place, and have it."""
        if self._free > 0:  # then nobody waits: who leaves gives its place to one that does
            self._free -= 1
        else:
            await self._given(tier)
        try:
            yield
        finally:
            self._leave()

    async def _given(self, tier: Tier) -> None:
        given = asyncio.get_running_loop().create_future()
        self._door.add(tier, given, self._clock())
        try:
            await given
        except asyncio.CancelledError:
            self._door.remove(tier, given)
            if not given.cancelled():  # it was given a place as it left
                self._leave()
            raise

    def _leave(self) -> None:
        now_s = self._clock()
        while (given := self._door.pop(now_s)) is not None:
            if not given.cancelled():  # otherwise it is about to leave
                given.set_result(None)
                return
        self._free += 1
