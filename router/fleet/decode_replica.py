"""Which decode replica takes a request, and what the way of its KV cache there costs.

Owns the view of the decode tier and the choice among its replicas. Order and memory on a decode replica are
decided there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from router.fleet.pace_model import PaceModel
from router.fleet.sent_requests import SentRequests, Ticket
from slo.decode.headroom import DecodeLoad
from slo.decode.outlook import Outlook
from slo.decode.predicted_peak import Holding, predicted_peak
from slo.model_digest import UNTOLD, ModelDigest
from slo.reports import PACE_HOLDS_S, AwaitedKv, DecodeReported
from slo.request import JobId, Party, ReplicaId
from slo.tiers import Tier

MAX_KV_USAGE: Final = 0.95
"""A decode replica whose KV use would exceed this has no headroom: requests that outgrow it are
recomputed."""
_KV_STEP: Final = 0.05
"""KV use is compared in steps of this fraction: requests that are equal but for noise share the replicas."""
IN_TRANSIT_S: Final = 5.0
"""A request that its replica has not named within this time is not reckoned with there."""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A request that wants to decode.

    Attributes:
        tokens: Of its prompt, and of what is prefilled of its answer with it.
        answers: How many it asks for, of all its prompts.
        most_output: The most that all its answers may have beside what is among `tokens`; 0 leaves that open.
        is_top: Whether it is of the top tier.
        rank: Of its tier.
        held_tokens: Of its tokens, those whose KV requests of each decode replica hold.
    """

    job_id: JobId
    tier: Tier
    tokens: int
    answers: int = 1
    most_output: int = 0
    is_top: bool = False
    rank: int = 0
    held_tokens: Mapping[ReplicaId, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class DecodeView:
    """One decode replica: how full it is and how fast.

    A request takes no memory while its prefill waits and runs, so that no use of memory shows it. It has a
    ticket from its placement until the replica does not name it any more among those whose KV it waits for.

    Attributes:
        kv_usage: Fraction of its KV blocks in use, as last reported.
        running: Requests that it has, those whose prefill still runs included.
        decoding: Those of them that decode.
        kv_tokens: Tokens that its KV memory holds; 0 when it has not said.
        placed_since_report: Requests sent to it that its report does not show yet.
        draining: Whether it is being shut down; nothing is placed there any more.
        caches_prefixes: Whether requests there share the KV of prompts that begin alike.
        local_prefills: How many prompts it is to compute itself, by whose they are; those sent there since
            its report are among them.
        local_prompt_s: Recent seconds from the end of one of them to the end of the next.
        load: What its streams hold and will hold; None when it does not say.
        load_since_s: When that was heard first.
        sent: Requests whose KV it is to get.
        digest: Of the model that it serves.
        waiting: Requests for which its engine had no memory, or no place, when it reported.
    """

    replica_id: ReplicaId
    kv_usage: float = 0.0
    running: int = 0
    decoding: int = 0
    reported_at_s: float = -math.inf
    kv_tokens: int = 0
    placed_since_report: int = 0
    draining: bool = False
    caches_prefixes: bool = True
    local_prefills: Counter[Party] = field(default_factory=Counter)
    local_prompt_s: float = 1.0
    load: DecodeLoad | None = None
    load_since_s: float = -math.inf
    sent: SentRequests = field(default_factory=SentRequests)
    pace: PaceModel = field(default_factory=PaceModel)
    digest: ModelDigest = UNTOLD
    waiting: int = 0
    _told: DecodeLoad | None = None
    """`load`, its streams as they came."""
    _paced_at_s: float = -math.inf
    _peak_tokens: int = 0
    _outlooks: dict[int, Outlook] = field(default_factory=dict)
    """By rank, with those on their way."""

    def reported(self, event: DecodeReported, now_s: float, ranks: Mapping[Tier, int] | None = None) -> None:
        """Take its word; `ranks` are those of the tiers."""
        self.kv_usage, self.running, self.kv_tokens = event.kv_usage, event.running, event.kv_tokens
        decoded, self.decoding = self.decoding, max(0, event.running - len(event.awaited))
        self.draining, self.caches_prefixes, self.digest = event.draining, event.caches_prefixes, event.digest
        self.local_prefills, self.local_prompt_s = Counter(event.local_prefills), event.local_prompt_s
        self.waiting = event.waiting
        self.reported_at_s = now_s
        self.placed_since_report = 0
        if event.load != self._told:  # the engine tells less often than the replica reports
            load = event.load
            self.load = None if load is None else replace(load, streams=dict(load.streams))
            self._told, self.load_since_s = load, now_s
            self._peak_tokens = 0 if self.load is None else predicted_peak(self.load.streams.values())
            self._outlooks.clear()
        named = {one.job_id: self._named(one, now_s, ranks or {}) for one in event.awaited}
        unseen = {
            job_id: ticket
            for job_id, ticket in self.sent.tickets.items()
            if job_id not in named and self._is_in_transit(job_id, ticket, now_s)
        }
        before = list(self.sent.on_way)
        self.sent.restate(named | unseen, {} if self.load is None else self.load.streams)
        if list(self.sent.on_way) != before:
            self._forget_outlooks()
        self._told_pace(event.tpot_s, decoded, now_s)

    def _told_pace(self, tpot_s: float | None, decoded: int, now_s: float) -> None:
        """Learn of its pace; `decoded` is how many decoded when it reported before.

        What has decoded and ended since then counts only where nothing else is known: how many these were,
        nobody says.
        """
        has_pace = self.has_pace(now_s)
        if tpot_s is None or (has_pace and self.decoding == 0):
            return
        if not has_pace:
            self.pace = PaceModel()
        self.pace.observe(self.decoding or decoded or 1, tpot_s)
        self._paced_at_s = now_s

    def has_pace(self, now_s: float) -> bool:
        """Whether its pace was seen lately."""
        return now_s - self._paced_at_s < PACE_HOLDS_S

    def tpot_s(self, streams: int, now_s: float) -> float | None:
        """Predicted time per output token with so many requests; None where nobody knows.

        Of one that has nothing to do and was slow before, nothing but what is sent there shows that it is not
        any more.
        """
        return self.pace.tpot_s(streams) if self._pace_counts(now_s) else None

    def alone_s(self, now_s: float) -> float:
        """The least time per output token that one request alone may have; 0 where nobody knows."""
        return self.pace.alone_s if self._pace_counts(now_s) else 0.0

    def _pace_counts(self, now_s: float) -> bool:
        return self.streams_with(0) > 0 or self.has_pace(now_s)

    def placed(self, newcomer: Newcomer, now_s: float) -> None:
        """A request was sent here, or is to be prefilled once more for this replica."""
        self.placed_since_report += 1
        shared_tokens = self._shared_with(newcomer)
        holding = None if self.load is None else self._awaited(self.load, newcomer)
        tokens, rank = newcomer.tokens - shared_tokens, newcomer.rank
        ticket = Ticket(now_s, tokens, shared_tokens, holding, rank=rank)
        if not self.sent.add(newcomer.job_id, ticket):
            self._forget_outlooks()
        elif holding is not None:
            for outlook in self._outlooks.values():
                outlook.joined(holding)

    def job_ended(self, job_id: JobId) -> None:
        """A request has ended, or does not come."""
        if self.sent.remove(job_id):
            self._forget_outlooks()

    def wait_s(self, newcomer: Newcomer, now_s: float) -> float:
        """Seconds until there is memory for a request; 0 when there is, or the replica does not say."""
        if self.load is None:
            return 0.0
        return self._outlook(self.load, newcomer.rank).wait_s(
            self._holding(self.load, newcomer),
            is_top=newcomer.is_top,
            age_s=max(0.0, now_s - self.load_since_s),
            prefix_tokens=self._prefix_tokens(newcomer),
        )

    def has_room(self, newcomer: Newcomer) -> bool:
        """Whether there is memory for a request: by the predicted peak, else by what is used."""
        if self.load is None:
            return self.usage_with(newcomer) <= MAX_KV_USAGE
        holding, prefix_tokens = self._holding(self.load, newcomer), self._prefix_tokens(newcomer)
        # One more raises the peak by what it takes at most: where that fits, nothing need be sorted.
        most = self._peak_tokens + self.sent.most_tokens + holding.tokens + holding.remaining
        outlook = self._outlook(self.load, newcomer.rank)
        if most <= outlook.limit_tokens(is_top=newcomer.is_top, prefix_tokens=prefix_tokens):
            return True
        return outlook.fits(holding, is_top=newcomer.is_top, prefix_tokens=prefix_tokens)

    def usage_with(self, newcomer: Newcomer) -> float:
        """KV use once all that were sent here and a request have their KV here."""
        if self.kv_tokens == 0:
            return self.kv_usage
        tokens = self.sent.tokens + newcomer.tokens - self._shared_with(newcomer)
        return self.kv_usage + tokens / self.kv_tokens

    @property
    def streams_soon(self) -> int:
        """Requests that decode, and those sent here since its report; as with `usage_soon`."""
        return self.decoding + self.placed_since_report

    def streams_with(self, rank: int) -> int:
        """Requests that will decode beside a newcomer of a tier.

        Of those whose prefill waits, the ones of its tier and above: those below it may wait for long.
        """
        return self.streams_soon + self.sent.named(rank)

    @property
    def usage_soon(self) -> float:
        """KV use with what was sent here since its report.

        What it has named waits for the prefill tier, and comes no faster than that computes it.
        """
        if self.kv_tokens == 0:
            return self.kv_usage
        return self.kv_usage + self.sent.unseen_tokens / self.kv_tokens

    def usage_asked(self, to_prefill: Collection[JobId]) -> float:
        """The same with what waits in its engine for memory, up to as much as it has.

        Those that are not `to_prefill` any more are pulled by its engine, and some of them have memory: which
        ones, nobody says.
        """
        if self.waiting == 0 or self.kv_tokens == 0:
            return self.usage_soon
        tickets = self.sent.tickets.items()
        tokens = [one.tokens for job_id, one in tickets if one.is_known and job_id not in to_prefill]
        waiting = sum(tokens) * min(1.0, self.waiting / max(1, len(tokens)))
        return self.usage_soon + min(1.0, waiting / self.kv_tokens)

    def _named(self, awaited: AwaitedKv, now_s: float, ranks: Mapping[Tier, int]) -> Ticket:
        """The ticket of a request that the replica says it has; it knows the prompt's length."""
        known = self.sent.tickets.get(awaited.job_id)
        if known is None:  # another router has placed it, or this one before it was started anew
            tokens, rank, holding = awaited.tokens, ranks.get(awaited.tier, 0), None
            if self.load is not None:
                holding = self.load.newcomer(awaited.tier, rank, tokens, 1, 0)._replace(waits=True)
            return Ticket(now_s, tokens, 0, holding, is_known=True, rank=rank)
        if not awaited.tokens:
            return known._replace(is_known=True)
        holding = None if known.holding is None else known.holding._replace(tokens=awaited.tokens)
        tokens = max(0, awaited.tokens - known.shared_tokens)
        return known._replace(tokens=tokens, holding=holding, is_known=True)

    def _is_in_transit(self, job_id: JobId, ticket: Ticket, now_s: float) -> bool:
        """Whether a request that the replica does not name may be on its way there."""
        if ticket.is_known or now_s - ticket.at_s >= IN_TRANSIT_S:
            return False
        # A stream that has left its engine is in what that told before.
        is_there = self.load is not None and job_id in self.load.streams
        return not (is_there and self.load_since_s > ticket.at_s)

    def _forget_outlooks(self) -> None:
        """Others are on their way than those that the outlooks know."""
        for outlook in self._outlooks.values():
            outlook.left()

    def _outlook(self, load: DecodeLoad, rank: int) -> Outlook:
        if (outlook := self._outlooks.get(rank)) is None:
            outlook = self._outlooks[rank] = Outlook(load, rank, self.sent.on_way)
        return outlook

    def _shared_with(self, newcomer: Newcomer) -> int:
        """Of a request's tokens, those whose KV others hold here."""
        return newcomer.held_tokens.get(self.replica_id, 0) if self.caches_prefixes else 0

    def _prefix_tokens(self, newcomer: Newcomer) -> int:
        """What a request, and those of its tier and above without memory yet, share with others."""
        return self.sent.shared_tokens(newcomer.rank) + self._shared_with(newcomer)

    def _awaited(self, load: DecodeLoad, newcomer: Newcomer) -> Holding:
        """What a request will hold that is prefilled.

        Who has one prefilled once more does not say how much is still to come: that is as known from before.
        """
        holding = self._holding(load, newcomer)._replace(waits=True)
        ticket = self.sent.tickets.get(newcomer.job_id)
        known = load.streams.get(newcomer.job_id) if ticket is None else ticket.holding
        if newcomer.most_output or known is None:
            return holding
        return holding._replace(remaining=known.remaining)

    @staticmethod
    def _holding(load: DecodeLoad, newcomer: Newcomer) -> Holding:
        return load.newcomer(
            newcomer.tier, newcomer.rank, newcomer.tokens, newcomer.answers, newcomer.most_output
        )


def choose_decode(
    replicas: Sequence[DecodeView], newcomer: Newcomer, tpot_s: float | None, now_s: float
) -> DecodeView | None:
    """The replica that takes a request, None of none.

    In order: one with memory for it; one that is predicted to keep the pace; the emptiest, in steps; the
    fewest requests.
    """

    def key(replica: DecodeView) -> tuple[bool, int, int, float]:
        usage = replica.usage_with(newcomer)
        streams = replica.streams_with(newcomer.rank) + 1
        predicted_s = None if tpot_s is None else replica.tpot_s(streams, now_s)
        too_slow = tpot_s is not None and predicted_s is not None and predicted_s > tpot_s
        requests = replica.streams_with(0)  # all of them will decode there one day
        return too_slow, int(usage / _KV_STEP), requests, usage

    # Where memory is short, to find whether there is some takes longer than all else.
    ordered = sorted(replicas, key=key)
    return next((one for one in ordered if one.has_room(newcomer)), ordered[0] if ordered else None)
