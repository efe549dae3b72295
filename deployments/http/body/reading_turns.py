"""When a request body is read: that holds the event loop which all streams of an ingress share.

Owns in which order bodies are read, how much may wait for that, and when the others have the loop. What is
made of a body is `reading`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, TypeVar

from decode_node.fair_places import FairPlaces
from deployments.http import errors as http_errors
from slo.admission.parts import HARD_LIMIT, excess
from slo.request import Party

AT_ONCE_S: Final = 0.005
"""Bodies that together take less are read without a pause, as most are."""
_EACH_BYTES: Final = 64 * 1024
"""What a body counts for in turns beside its bytes: a hundred of them may hold the loop for 50 ms."""
_Read = TypeVar("_Read")


class ReadingTurns:
    """Bodies of an ingress are read one at a time, those of one tenant after those of another.

    A tenant's own are in turn by the tiers that their headers name; which one a body names is not known yet.

    Once that has held the loop for a while, others have it for as long: reading has half of it at most.

    Args:
        most_bytes: Bodies that may wait; more, up to `HARD_LIMIT` times as much, may those of whom has less
            than their part.
        at_once_s: For how long the loop may be held without a pause.
    """

    def __init__(self, most_bytes: int, at_once_s: float = AT_ONCE_S) -> None:
        self._most_bytes = most_bytes
        self._at_once_s = at_once_s
        self._held_s = 0.0
        """Since the last pause."""
        self._waiting_bytes = Counter[str]()
        self._places = FairPlaces(1)

    async def read(self, party: Party, size: int, read: Callable[[], _Read]) -> _Read:
        """What `read` makes of somebody's body of so many bytes, once it is its turn.

        Raises:
            HTTPError: 503 when too much waits.
        """
        tenant = party.tenant
        if excess(self._waiting_bytes, tenant, self._most_bytes, HARD_LIMIT * self._most_bytes) > 0:
            raise http_errors.too_much_in_flight(self._most_bytes)
        self._waiting_bytes[tenant] += size
        told = self._places.join(party, _EACH_BYTES + size)
        try:
            if not told.done():
                await asyncio.wait([told])
            return self.counted(read)
        finally:
            self._waiting_bytes -= Counter({tenant: size})
            self._leave(party, told)

    def counted(self, read: Callable[[], _Read]) -> _Read:
        """What `read` makes of a body, at once; its time counts as that of reading."""
        began_s = time.monotonic()
        try:
            return read()
        finally:
            self._held_s += time.monotonic() - began_s

    def _leave(self, party: Party, told: asyncio.Future[None]) -> None:
        """Let the next have its turn, after a pause if one is due."""
        if self._held_s < self._at_once_s:
            self._places.leave(party, told)
        else:  # as long as all that is `counted` until whoever has read the body waits for something
            asyncio.get_running_loop().call_soon(self._pause, party, told)

    def _pause(self, party: Party, told: asyncio.Future[None]) -> None:
        asyncio.get_running_loop().call_later(self._held_s, self._places.leave, party, told)
        self._held_s = 0.0
