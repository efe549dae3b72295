"""A search that may block, as Ray's for an actor does for a minute while its head does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Search:
    """Looks for something in a thread of its own, of which there is one at most.

    Args:
        look: Returns what is looked for, or raises.
    """

    def __init__(self, look: Callable[[], Any]) -> None:
        self._look = look
        self._looking: asyncio.Future[Any] | None = None

    async def found(self) -> Any:
        """What is looked for; whoever is cancelled leaves the search under way to the next caller.

        Raises:
            Exception: whatever `look` raises.
        """
        if self._looking is None:
            self._looking = asyncio.ensure_future(asyncio.to_thread(self._look))
        looking = self._looking
        try:
            return await asyncio.shield(looking)
        finally:
            if looking.done():
                self._looking = None
