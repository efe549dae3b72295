"""What was sent to a decode replica and has not its KV cache there yet, with what it comes to.

Owns the sums, which follow each request: they are asked for at every placement, and thousands may wait for
their prefill. Which requests these are is `router.fleet.decode_replica`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from slo.decode.predicted_peak import Holding
from slo.request import JobId


class Ticket(NamedTuple):
    """A request that was sent to a decode replica, whose KV cache is not there yet.

    Attributes:
        at_s: When it was sent, or heard of.
        tokens: That its KV takes beside what others there hold of it.
        shared_tokens: Of its prompt, what they hold.
        holding: What it will hold, its prompt whole; None where the replica says nothing of its memory.
        is_known: Whether the replica has said that it has it.
        rank: Of its tier.
    """

    at_s: float
    tokens: int
    shared_tokens: int = 0
    holding: Holding | None = None
    is_known: bool = False
    rank: int = 0


class SentRequests:
    """The tickets of one replica, in the order in which they will be let in.

    Attributes:
        tickets: All of them; they are changed by the methods alone.
        tokens: What their KV will take.
        unseen_tokens: What that of those will take that the replica has not named.
        most_tokens: What those on the way to its engine will come to at most.
    """

    def __init__(self) -> None:
        self.tickets: dict[JobId, Ticket] = {}
        self.tokens = self.unseen_tokens = self.most_tokens = 0
        self._streams: Mapping[JobId, Holding] = {}
        self._on_way: dict[JobId, Holding] = {}
        self._named: Counter[int] = Counter()
        self._shared: Counter[int] = Counter()

    def __len__(self) -> int:
        """How many there are."""
        return len(self.tickets)

    @property
    def on_way(self) -> Collection[Holding]:
        """What those will hold that its engine does not have; a view of them."""
        return self._on_way.values()

    def restate(self, tickets: Mapping[JobId, Ticket], streams: Mapping[JobId, Holding]) -> None:
        """These are all; `streams` are those that the engine has."""
        for each in (self.tickets, self._on_way, self._named, self._shared):
            each.clear()
        self.tokens = self.unseen_tokens = self.most_tokens = 0
        self._streams = streams
        for job_id, ticket in tickets.items():
            self._add(job_id, ticket)

    def add(self, job_id: JobId, ticket: Ticket) -> bool:
        """One more was sent; one that was sent before keeps its place.

        Returns:
            Whether it is on its way behind all others.
        """
        if job_id in self.tickets:
            self.restate({**self.tickets, job_id: ticket}, self._streams)
            return False
        self._add(job_id, ticket)
        return job_id in self._on_way

    def remove(self, job_id: JobId) -> bool:
        """One does not come any more, or is not known; returns whether it was on its way."""
        if (ticket := self.tickets.pop(job_id, None)) is None:
            return False
        self._count(job_id, ticket, -1)
        return self._on_way.pop(job_id, None) is not None

    def named(self, rank: int) -> int:
        """How many of a tier and those above it the replica has named."""
        return sum([many for of, many in self._named.items() if of >= rank])

    def shared_tokens(self, rank: int) -> int:
        """Of the prompts of a tier and those above it, what others hold; of those without memory yet."""
        return sum([tokens for of, tokens in self._shared.items() if of >= rank])

    def _add(self, job_id: JobId, ticket: Ticket) -> None:
        self.tickets[job_id] = ticket
        if ticket.holding is not None and job_id not in self._streams:
            self._on_way[job_id] = ticket.holding
        self._count(job_id, ticket, 1)

    def _count(self, job_id: JobId, ticket: Ticket, sign: int) -> None:
        holding, stream = ticket.holding, self._streams.get(job_id)
        if ticket.is_known:
            self._named[ticket.rank] += sign
        else:
            self.unseen_tokens += sign * ticket.tokens
        if stream is None or stream.waits:
            self.tokens += sign * ticket.tokens
            if holding is not None and ticket.shared_tokens:
                self._shared[ticket.rank] += sign * ticket.shared_tokens
        if holding is not None and stream is None:
            self.most_tokens += sign * (holding.tokens + holding.remaining)
