"""Comments that keep the connection of a stream open while there is nothing to send.

Between a client and the server may be proxies that close a connection over which nothing comes for a while.
Clients of server-sent events skip comments. Owns when one is sent, as vLLM's server does with
`--sse-keep-alive-interval`, and that the wait for the first piece of an answer goes on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

COMMENT: Final = ": keep-alive\n\n"
NOTHING_YET: Final = object()
"""Comes before the first piece of an answer that takes long."""
_END: Final = object()


async def or_nothing_yet(pieces: AsyncGenerator[Any, None], within_s: float) -> AsyncGenerator[Any, None]:
    """An answer's pieces, with `NOTHING_YET` before the first if that is not there within so long.

    Whoever has asked for the first one leaves the answer by closing or forgetting this.
    """
    coming = asyncio.ensure_future(anext(pieces, _END))
    try:
        if not (await asyncio.wait({coming}, timeout=within_s))[0]:
            yield NOTHING_YET
        if (first := await coming) is _END:
            return
        yield first
        async for piece in pieces:
            yield piece
    finally:
        await _given_up(coming)
        await pieces.aclose()


async def kept_alive(
    stream: AsyncGenerator[str, None], interval_s: float, *, is_due: bool
) -> AsyncGenerator[str, None]:
    """A stream's server-sent events, and a comment whenever none has come for so long.

    Args:
        stream: Of events.
        interval_s: How long.
        is_due: Whether nothing has come for so long already.
    """
    try:
        if is_due:
            yield COMMENT
        while True:
            coming = asyncio.ensure_future(anext(stream, None))
            try:
                while not (await asyncio.wait({coming}, timeout=interval_s))[0]:
                    yield COMMENT
            finally:
                await _given_up(coming)
            if (event := coming.result()) is None:
                return
            yield event
    finally:
        await stream.aclose()


async def _given_up(coming: asyncio.Future[Any]) -> None:
    """End a wait that goes on, and let what was waited for end itself."""
    if not coming.done():
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
