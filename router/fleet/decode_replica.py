"""Which decode replica takes a request, and what the way of its KV cache there costs.

Owns the view of the decode tier and the choice among its replicas. Order and memory on a decode replica are
decided there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Final

from slo.decode.headroom import DecodeLoad
from slo.decode.predicted_peak import Holding, predicted_peak
from slo.reports import DecodeReported
from slo.request import JobId, Party, ReplicaId
from slo.tiers import Tier

MAX_KV_USAGE: Final = 0.95
"""A decode replica whose KV use would exceed this has no headroom: requests that outgrow it are
recomputed."""
_KV_STEP: Final = 0.05
"""KV use is compared in steps of this fraction: requests that are equal but for noise share the replicas."""
_SENT_S: Final = 60.0
"""A request that has not reached its decode engine after so long is not reckoned with there."""
_LEARNING_RATE: Final = 0.1
_NO_SPREAD: Final = 1e-6
_TELLING: Final = 0.5
"""Numbers of requests that differ by so much of their mean say how much time is theirs."""


@dataclass(frozen=True, slots=True)
class KvLink:
    """What KV cache moves over from prefill to decode.

    Attributes:
        latency_s: Of a transfer, however small.
    """

    bytes_per_token: int
    bytes_ps: float
    latency_s: float = 0.0

    def transfer_s(self, tokens: int) -> float:
        """Seconds until the KV of a prompt has arrived, if nothing else is on its way."""
        return self.latency_s + tokens * self.bytes_per_token / self.bytes_ps


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A request that wants to decode.

    Attributes:
        tokens: Of its prompt.
        answers: How many it asks for, of all its prompts.
        most_output: The most that all its answers may have; 0 leaves that open.
        is_top: Whether it is of the top tier.
        rank: Of its tier.
    """

    job_id: JobId
    tier: Tier
    tokens: int
    answers: int = 1
    most_output: int = 0
    is_top: bool = False
    rank: int = 0


@dataclass(slots=True)
class PaceModel:
    """Time per output token as a straight line of the requests that decode together, learned from reports."""

    _weight: float = 0.0
    _running: float = 0.0
    _tpot_s: float = 0.0
    _running_squared: float = 0.0
    _product: float = 0.0

    def observe(self, running: int, tpot_s: float) -> None:
        """Learn from one report; the recent ones count most."""
        keep = 1 - _LEARNING_RATE
        self._weight = keep * self._weight + 1
        self._running = keep * self._running + running
        self._tpot_s = keep * self._tpot_s + tpot_s
        self._running_squared = keep * self._running_squared + running * running
        self._product = keep * self._product + running * tpot_s

    def tpot_s(self, running: int) -> float | None:
        """Predicted time per output token with so many requests; None before the first report."""
        if self._weight == 0:
            return None
        mean_running, mean_s, spread, common = self._moments()
        guess = self._guess(mean_running, mean_s)
        slope = guess if spread < _NO_SPREAD else max(0.0, common / spread)
        return max(0.0, mean_s + slope * (running - mean_running))

    @classmethod
    def of_all(cls, models: Iterable[PaceModel]) -> PaceModel:
        """What many replicas have learned that are alike, as one."""
        known = list(models)
        return cls(*(math.fsum(getattr(model, part.name) for model in known) for part in fields(cls)))

    def most(self, tpot_s: float) -> float:
        """How many requests may decode together at that time per output token; infinite when nobody knows.

        Where those seen differ little in number, half of the time is taken to be theirs, rather than what the
        little says.
        """
        if self._weight == 0:
            return math.inf
        mean_running, mean_s, spread, _ = moments = self._moments()
        doubt, slope = self._doubted(*moments)
        if slope <= 0:
            return math.inf if mean_s <= tpot_s else 0.0
        found = max(0.0, mean_running + (tpot_s - mean_s) / slope)
        if spread < doubt and mean_running > 1 and mean_s > tpot_s:  # a guess does not say that none may
            return max(found, mean_running * tpot_s / mean_s)
        return found

    @property
    def alone_s(self) -> float:
        """The least time per output token that one request alone may have; 0 when nobody knows.

        `most` is below one for whatever is shorter. Where those seen differ little in number, all of the time
        may be theirs.
        """
        if self._weight == 0:
            return 0.0
        mean_running, mean_s, spread, _ = moments = self._moments()
        doubt, slope = self._doubted(*moments)
        found = max(0.0, mean_s - max(0.0, slope) * (mean_running - 1))
        return min(found, mean_s / mean_running) if spread < doubt and mean_running > 1 else found

    def _doubted(
        self, mean_running: float, mean_s: float, spread: float, common: float
    ) -> tuple[float, float]:
        """Up to which variance of the number of requests what is seen is doubted, and the slope with that."""
        doubt = max(_NO_SPREAD, (_TELLING * mean_running) ** 2)
        return doubt, (common + doubt * self._guess(mean_running, mean_s)) / (spread + doubt)

    def _moments(self) -> tuple[float, float, float, float]:
        """The means of requests and time, the variance of the one, and the covariance of both."""
        mean_running, mean_s = self._running / self._weight, self._tpot_s / self._weight
        spread = self._running_squared / self._weight - mean_running**2
        return mean_running, mean_s, spread, self._product / self._weight - mean_running * mean_s

    @staticmethod
    def _guess(mean_running: float, mean_s: float) -> float:
        """How much longer it takes with one more, if half of the time is theirs."""
        return mean_s / max(1.0, mean_running) / 2


@dataclass(slots=True, eq=False)
class DecodeView:
    """One decode replica: how full it is and how fast.

    Attributes:
        kv_usage: Fraction of its KV blocks in use, as last reported.
        running: Requests that it has, those whose prefill still runs included.
        kv_tokens: Tokens that its KV memory holds; 0 when it has not said.
        link_bytes_ps: Of the link into it, when it has one of its own.
        placed_since_report: Requests sent to it that its report does not show yet.
        placed_tokens: Their prompt tokens.
        draining: Whether it is being shut down; nothing is placed there any more.
        local_prefills: How many prompts it is to compute itself, by whose they are; those sent there since
            its report are among them.
        local_prompt_s: Recent seconds from the end of one of them to the end of the next.
        load: What its streams hold and will hold; None when it does not say.
        load_since_s: When that was heard first.
        sent: What those will hold that were sent there and are not in its engine, with the time of sending.
    """

    replica_id: ReplicaId
    kv_usage: float = 0.0
    running: int = 0
    reported_at_s: float = -math.inf
    kv_tokens: int = 0
    link_bytes_ps: float | None = None
    placed_since_report: int = 0
    placed_tokens: int = 0
    draining: bool = False
    local_prefills: Counter[Party] = field(default_factory=Counter)
    local_prompt_s: float = 1.0
    load: DecodeLoad | None = None
    load_since_s: float = -math.inf
    sent: dict[JobId, tuple[float, Holding]] = field(default_factory=dict)
    pace: PaceModel = field(default_factory=PaceModel)
    _peak_tokens: int = 0

    def reported(self, event: DecodeReported, now_s: float) -> None:
        """Take its word."""
        self.kv_usage, self.running, self.kv_tokens = event.kv_usage, event.running, event.kv_tokens
        self.link_bytes_ps, self.draining = event.link_bytes_ps, event.draining
        self.local_prefills, self.local_prompt_s = Counter(event.local_prefills), event.local_prompt_s
        self.reported_at_s = now_s
        self.placed_since_report = self.placed_tokens = 0
        if event.load != self.load:  # the engine tells less often than the replica reports
            self.load, self.load_since_s = event.load, now_s
        self._peak_tokens = 0 if event.load is None else predicted_peak(event.load.streams.values())
        there = () if event.load is None else event.load.streams
        self.sent = {
            job_id: sent
            for job_id, sent in self.sent.items()
            if job_id not in there and now_s - sent[0] < _SENT_S
        }
        if event.tpot_s is not None and event.running > 0:  # what was before says nothing of none
            self.pace.observe(event.running, event.tpot_s)

    def placed(self, tokens: int, newcomer: Newcomer | None = None, now_s: float = 0.0) -> None:
        """A request was sent here."""
        self.placed_since_report += 1
        self.placed_tokens += tokens
        if self.load is not None and newcomer is not None:
            holding = self._holding(self.load, newcomer)
            self.sent[newcomer.job_id] = now_s, holding._replace(waits=True)

    def job_ended(self, job_id: JobId) -> None:
        """A request has ended, or does not come."""
        self.sent.pop(job_id, None)

    def wait_s(self, newcomer: Newcomer, now_s: float) -> float:
        """Seconds until there is memory for a request; 0 when there is, or the replica does not say."""
        if self.load is None:
            return 0.0
        holding, age_s = self._holding(self.load, newcomer), max(0.0, now_s - self.load_since_s)
        return self.load.wait_s(holding, self._sent(), is_top=newcomer.is_top, age_s=age_s)

    def has_room(self, newcomer: Newcomer) -> bool:
        """Whether there is memory for a request: by the predicted peak, else by what is used."""
        if self.load is None:
            return self.usage_with(newcomer.tokens) <= MAX_KV_USAGE
        holding, sent = self._holding(self.load, newcomer), self._sent()
        # One more raises the peak by what it takes at most: where that fits, nothing need be sorted.
        most = self._peak_tokens + sum([one.tokens + one.remaining for one in (*sent, holding)])
        if most <= self.load.limit_tokens(newcomer.rank, is_top=newcomer.is_top):
            return True
        return self.load.fits(holding, sent, is_top=newcomer.is_top)

    def _sent(self) -> list[Holding]:
        return [holding for _, holding in self.sent.values()]

    @staticmethod
    def _holding(load: DecodeLoad, newcomer: Newcomer) -> Holding:
        return load.newcomer(
            newcomer.tier, newcomer.rank, newcomer.tokens, newcomer.answers, newcomer.most_output
        )

    def usage_with(self, tokens: int) -> float:
        """KV use once what was sent here and `tokens` more have arrived."""
        if self.kv_tokens == 0:
            return self.kv_usage
        return self.kv_usage + (self.placed_tokens + tokens) / self.kv_tokens


def choose_decode(
    replicas: Sequence[DecodeView], newcomer: Newcomer, tpot_s: float | None, link: KvLink | None
) -> DecodeView | None:
    """The replica that takes a request, None of none.

    In order: one with memory for it; one that is predicted to keep the pace; the one over whose link the KV
    comes soonest, in steps of a tenth of a second; the emptiest, in steps; the fewest requests. `link` is
    what KV moves over, for replicas without a link of their own; None leaves transfers out.
    """

    def key(replica: DecodeView) -> tuple[bool, bool, int, int, int, float]:
        usage, tokens = replica.usage_with(newcomer.tokens), newcomer.tokens
        running = replica.running + replica.placed_since_report
        predicted_s = None if tpot_s is None else replica.pace.tpot_s(running + 1)
        too_slow = tpot_s is not None and predicted_s is not None and predicted_s > tpot_s
        way = 0 if link is None else round(10 * link_to(replica, link).transfer_s(tokens))
        return not replica.has_room(newcomer), too_slow, way, int(usage / _KV_STEP), running, usage

    return min(replicas, key=key, default=None)


def link_to(replica: DecodeView, link: KvLink) -> KvLink:
    """The link into a replica: its own, or that of all."""
    if replica.link_bytes_ps is None:
        return link
    return KvLink(link.bytes_per_token, replica.link_bytes_ps, link.latency_s)
