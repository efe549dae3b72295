"""Work that is done one piece at a time, for tenants in turn.

Whoever has much to do waits for itself: another's piece waits for the one that is being done, and for one of
each other tenant that waits. Owns the order alone.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TurnsOfTenants:
    """The turns; of a tenant's own pieces the first that came is the first done."""

    def __init__(self) -> None:
        self._whose: str | None = None
        """Whose turn it is; None while nobody has one."""
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By tenant, those first whose turn is next; none is empty, and who has left may still be in one."""

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn, and have it."""
        if self._whose is not None:
            await self._called(tenant)
        self._whose = tenant
        try:
            yield
        finally:
            self._call_next()

    async def _called(self, tenant: str) -> None:
        called = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(called)
        try:
            await called
        except asyncio.CancelledError:
            if not called.cancelled():  # it was called as it left
                self._call_next()
            raise

    def _call_next(self) -> None:
        while self._waiting:
            tenant = next((one for one in self._waiting if one != self._whose), next(iter(self._waiting)))
            queue = self._waiting[tenant]
            called = queue.popleft()
            if not queue:
                del self._waiting[tenant]
            if not called.cancelled():  # otherwise it has left, and its tenant still has its turn
                if queue:
                    self._waiting.move_to_end(tenant)
                self._whose = tenant
                called.set_result(None)
                return
        self._whose = None
