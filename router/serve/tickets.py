"""What has become of held requests, for those who wait for it.

Owns the futures. What becomes of a request is decided by `router.core`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from router.messages import Held

if TYPE_CHECKING:
    from router.messages import Outcome
    from slo.request import JobId

UNCLAIMED_S: Final = 60.0
"""An outcome that nobody has asked for by then is dropped: who held the ticket is gone."""


class Tickets:
    """One future for each held request."""

    def __init__(self) -> None:
        self._futures: dict[JobId, asyncio.Future[Outcome]] = {}

    def __len__(self) -> int:  # noqa: D105 - how many have not been claimed
        return len(self._futures)

    def issue(self, ticket: JobId) -> None:
        """A request is held."""
        self._futures[ticket] = asyncio.get_running_loop().create_future()

    def settle(self, ticket: JobId, outcome: Outcome) -> None:
        """A held request is placed or evicted; nothing happens if its client has left."""
        future = self._futures.get(ticket)
        if future is not None and not future.done():
            future.set_result(outcome)
            asyncio.get_running_loop().call_later(UNCLAIMED_S, self._futures.pop, ticket, None)

    def drop(self, ticket: JobId) -> None:
        """A request's client has left."""
        future = self._futures.pop(ticket, None)
        if future is not None:
            future.cancel()

    async def outcome(self, ticket: JobId, wait_s: float) -> Outcome | Held | None:
        """What has become of a request; itself again if nothing has by `wait_s`, None if it is not known."""
        future = self._futures.get(ticket)
        if future is None:
            return None
        done, _ = await asyncio.wait([future], timeout=wait_s)
        if not done:
            return Held(ticket)
        self._futures.pop(ticket, None)
        return None if future.cancelled() else future.result()
