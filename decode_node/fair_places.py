"""Places that are taken in turn: so many have one at once, and whose turn is next is `slo.queue.turns`'s."""

from __future__ import annotations

import asyncio

from slo.queue.turns import FairTurns, TierTurns
from slo.request import Party
from slo.tiers import TierSet


class FairPlaces:
    """Places of one event loop.

    Args:
        at_once: How many there are.
        tiers: Which go before each other; None where the tiers of a tenant share what is the tenant's.
    """

    def __init__(self, at_once: int, tiers: TierSet | None = None) -> None:
        self._free = at_once
        self._turns: FairTurns[asyncio.Future[None]] | TierTurns[asyncio.Future[None]]
        self._turns = FairTurns() if tiers is None else TierTurns(tiers)

    def join(self, party: Party, work: float, weight: float = 1.0) -> asyncio.Future[None]:
        """Wait for a place; what is returned is done once there is one, and is to be left in any case.

        Args:
            party: Who waits.
            work: What the turn takes, in any unit.
            weight: The tenant's part, relative to others'.
        """
        told = asyncio.get_running_loop().create_future()
        self._turns.add(party, told, work, weight)
        self._call_next()
        return told

    def leave(self, party: Party, told: asyncio.Future[None]) -> None:
        """Give up a place, or waiting for one; once only."""
        if told.done():
            self._free += 1
            self._call_next()
        else:
            self._turns.remove(party, told)

    def _call_next(self) -> None:
        while self._free and len(self._turns):
            self._free -= 1
            self._turns.pop().set_result(None)
