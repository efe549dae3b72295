"""Whether requests are answered, for all who watch over gRPC: one look for all of them at a time.

Nobody needs a key to watch, and a look is a request of its own. Owns how often is looked, and for how long
one is told. What is looked at is its caller's.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Final

from grpc_health.v1.health_pb2 import HealthCheckResponse

from telemetry import logs
from telemetry.reporting.answering import is_cancelled

_LOOK_S: Final = 1.0
_WATCH_S: Final = 10.0
"""How long a watcher is told of changes before it asks anew: a replica that ends waits for it."""


class WatchedHealth:
    """What all watchers of an ingress see; it is looked at while there are any.

    Args:
        look: Looks once.
        look_s: Between two looks, seconds.
        watch_s: How long one is told of changes, seconds.
    """

    def __init__(
        self,
        look: Callable[[], Coroutine[Any, Any, HealthCheckResponse]],
        look_s: float = _LOOK_S,
        watch_s: float = _WATCH_S,
    ) -> None:
        self._look = look
        self._look_s = look_s
        self._watch_s = watch_s
        self._watchers = 0
        self._looking: asyncio.Task[None] | None = None
        self._seen: HealthCheckResponse | None = None
        self._change: asyncio.Future[None]

    async def changes(self) -> AsyncGenerator[HealthCheckResponse, None]:
        """What was seen last, and for a while whatever else is seen from then on."""
        until_s = time.monotonic() + self._watch_s
        told: HealthCheckResponse | None = None
        self._join()
        try:
            while (left_s := until_s - time.monotonic()) > 0:
                if self._seen is None or self._seen == told:
                    await asyncio.wait([self._change], timeout=left_s)
                else:
                    told = self._seen
                    yield told
        finally:
            self._leave()

    def _join(self) -> None:
        self._watchers += 1
        if self._looking is None or self._looking.done():
            loop = asyncio.get_running_loop()
            self._seen, self._change = None, loop.create_future()
            # Not in the context of who happens to watch first: Serve would cancel it with that one.
            self._looking = loop.create_task(self._look_on(), context=contextvars.Context())

    def _leave(self) -> None:
        self._watchers -= 1
        if self._looking is not None and not self._watchers:
            self._looking.cancel()
            self._looking = None

    async def _look_on(self) -> None:
        while True:
            try:
                now = await self._look()
            except (Exception, asyncio.CancelledError) as error:
                if is_cancelled():
                    raise
                # A client gets no traceback, and there is a next look.
                logs.event("health_not_seen", level=logging.ERROR, error=repr(error)[:2000])
                now = HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING)
            if now != self._seen:
                self._seen = now
                self._change.set_result(None)
                self._change = asyncio.get_running_loop().create_future()
            await asyncio.sleep(self._look_s)
