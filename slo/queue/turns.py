"""Whose turn is next: fair by weighted work between tenants, and by work between the tiers of one.

Where tiers go before tenants, so it is within each tier. Owns the rules and the account of what each has had.
What a turn is for is its caller's.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable
from typing import Final, Generic, NamedTuple, TypeVar

from slo.request import Party
from slo.tiers import Tier, TierSet

_MOST_PASSED: Final = 7
"""So often higher tiers go before one that waits; then it has a turn."""

_Key = TypeVar("_Key", bound=Hashable)
_Item = TypeVar("_Item")


class _Account(Generic[_Key]):
    """Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996); the work is over the weight.

    Who has just come is as far as the one that was served last: nobody saves turns up.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._at: dict[_Key, float] = {}

    def joins(self, who: _Key) -> None:
        """Somebody waits who did not."""
        self._at = {name: at for name, at in self._at.items() if at > self._now}
        self._at.setdefault(who, self._now)

    def next_of(self, waiting: Iterable[_Key]) -> _Key:
        """Who has had least of those that wait, the first of equals."""
        return min(waiting, key=lambda name: self._at.get(name, self._now))

    def served(self, who: _Key, work: float) -> None:
        """The one that was next gets its turn."""
        self._now = self._at.get(who, self._now)
        self._at[who] = self._now + work


class _Line(NamedTuple, Generic[_Item]):
    """What one tenant has waiting."""

    account: _Account[Tier]
    tiers: dict[Tier, deque[tuple[_Item, float, float]]]


class FairTurns(Generic[_Item]):
    """Those that wait for a turn; of one party the first that came goes first."""

    def __init__(self) -> None:
        self._account = _Account[str]()
        self._lines: dict[str, _Line[_Item]] = {}

    def __len__(self) -> int:
        """How many wait."""
        return sum(len(queue) for line in self._lines.values() for queue in line.tiers.values())

    def add(self, party: Party, item: _Item, work: float, weight: float = 1.0) -> None:
        """Something waits, whose turn takes so much work, in any unit; `weight` is its tenant's."""
        if (line := self._lines.get(party.tenant)) is None:
            line = self._lines[party.tenant] = _Line(_Account(), {})
            self._account.joins(party.tenant)
        if (queue := line.tiers.get(party.tier)) is None:
            queue = line.tiers[party.tier] = deque()
            line.account.joins(party.tier)
        queue.append((item, work, weight))

    def pop(self) -> _Item:
        """Whose turn it is.

        Raises:
            IndexError: when nobody waits.
        """
        if not self._lines:
            raise IndexError("nobody waits")
        tenant = self._account.next_of(self._lines)
        line = self._lines[tenant]
        tier = line.account.next_of(line.tiers)
        item, work, weight = line.tiers[tier].popleft()
        self._account.served(tenant, work / weight)
        line.account.served(tier, work)
        self._tidy(Party(tenant, tier))
        return item

    def remove(self, party: Party, item: _Item) -> None:
        """Something waits no more; what is not there is ignored."""
        queue = self._lines[party.tenant].tiers.get(party.tier) if party.tenant in self._lines else None
        for place, (waiting, *_) in enumerate(queue or ()):
            if waiting is item:
                assert queue is not None
                del queue[place]
                self._tidy(party)
                return

    def _tidy(self, party: Party) -> None:
        """Forget who has nothing waiting; what a tenant's tiers have had is forgotten with its last one."""
        line = self._lines[party.tenant]
        if not line.tiers[party.tier]:
            del line.tiers[party.tier]
        if not line.tiers:
            del self._lines[party.tenant]


class TierTurns(Generic[_Item]):
    """Those that wait for a turn; of the highest tier first, and within a tier fair between tenants.

    No tier waits without end: one that has been passed seven times is next.
    """

    def __init__(self, tiers: TierSet) -> None:
        self._rank = tiers.rank
        self._turns = defaultdict[int, FairTurns[_Item]](FairTurns)
        self._passed = Counter[int]()

    def __len__(self) -> int:
        """How many wait."""
        return sum(map(len, self._turns.values()))

    def add(self, party: Party, item: _Item, work: float, weight: float = 1.0) -> None:
        """As `FairTurns.add`."""
        self._turns[self._rank(party.tier)].add(party, item, work, weight)

    def pop(self) -> _Item:
        """Whose turn it is.

        Raises:
            IndexError: when nobody waits.
        """
        waiting = [rank for rank, turns in self._turns.items() if len(turns)]
        if not waiting:
            raise IndexError("nobody waits")
        chosen = max([rank for rank in waiting if self._passed[rank] >= _MOST_PASSED] or waiting)
        self._passed = Counter(
            {rank: self._passed[rank] + (rank < chosen) for rank in waiting if rank != chosen}
        )
        return self._turns[chosen].pop()

    def remove(self, party: Party, item: _Item) -> None:
        """As `FairTurns.remove`."""
        self._turns[self._rank(party.tier)].remove(party, item)
