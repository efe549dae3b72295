"""Prompts that the decode engine computes itself, among the tokens of its streams.

Each one is computed in chunks, which bounds by how much one step of the engine is longer. Owns how many are
computed at once, which bounds it for all of them; the others wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any


class LocalPrefills:
    """Those of one replica.

    Args:
        at_once: How many of those that wait their turn are computed at once.

    Attributes:
        computing: How many are computed now, whoever asked for them; without short ones, which make no step
            of the engine much longer.
        outstanding: How many wait their turn or have it.
    """

    def __init__(self, at_once: int) -> None:
        self.computing = 0
        self.outstanding = 0
        self._places = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def turn(self, *, is_short: bool = False) -> AsyncIterator[Callable[[], None]]:
        """Wait until one more may be computed; what is yielded says that it has been."""
        is_out = False
        counted = not is_short

        def computed() -> None:
            nonlocal is_out
            if not is_out:
                is_out = True
                self.computing -= counted
                self.outstanding -= 1
                self._places.release()

        self.outstanding += 1
        try:
            await self._places.acquire()
        except BaseException:
            self.outstanding -= 1
            raise
        self.computing += counted
        try:
            yield computed
        finally:
            computed()

    async def pieces(
        self, pieces: AsyncGenerator[Any, None], *, are_several: bool = False
    ) -> AsyncGenerator[Any, None]:
        """The pieces of an answer whose prompt is computed at once, until the first of them comes.

        Of several prompts the first piece is that of the shortest: they count until the last piece has come.
        """
        async with self.counted() as computed, aclosing(pieces):
            async for piece in pieces:
                if not are_several:
                    computed()
                yield piece

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[Callable[[], None]]:
        """Count one that is computed at once; what is yielded says that it has been."""
        is_computing = True

        def computed() -> None:
            nonlocal is_computing
            self.computing -= is_computing
            is_computing = False

        self.computing += 1
        try:
            yield computed
        finally:
            computed()
