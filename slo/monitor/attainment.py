"""How well objectives are met: rolling attainment, latencies, goodput, headroom and burn rates.

Owns the windows. Which request counts as met is `slo.outcomes`'; nothing is decided by it here (see
`slo.monitor.shedding`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, NamedTuple, assert_never

from slo.monitor.latency_sketch import LatencySketch, Spread
from slo.outcomes import Outcome, RequestEnded
from slo.tiers import Tier

LONG_PER_SHORT: Final = 12
"""The short window is a twelfth of the long one (Site Reliability Workbook, chapter 5, alert 6)."""
MAX_SERIES: Final = 128
"""Combinations of model, tier and tenant; tenants beyond are counted together as `OTHER_TENANTS`."""
OTHER_TENANTS: Final = "other"
_SLICES_PER_SHORT: Final = 2


@dataclass(frozen=True, slots=True)
class Attainment:
    """How the requests of a window met what they were promised.

    Attributes:
        requests: Requests that ended.
        judged: Of them, those that met or missed what they were promised.
        met: Of them, those that met it.
        goodput_per_s: Requests per second that finished and missed nothing.
        headroom: What is left of the budgets at the target's quantile, as a fraction; negative when they are
            exceeded, None when nothing was timed.
    """

    requests: int
    judged: int
    met: int
    goodput_per_s: float
    headroom: float | None
    ttft: Spread | None
    tpot: Spread | None
    e2e: Spread | None

    @property
    def ratio(self) -> float | None:
        """Met over judged; None when none was judged."""
        return self.met / self.judged if self.judged else None


class Burn(NamedTuple):
    """How fast a tier uses up the misses that its target allows: 1 is as fast as allowed.

    Attributes:
        rate: The fraction missed over the fraction allowed; 0 without requests.
        missed: How many missed.
        judged: How many met or missed.
    """

    rate: float
    missed: int
    judged: int


class Counted(enum.Enum):
    """Which promises a burn rate counts."""

    ALL = enum.auto()
    """What people see, and alerts go by."""
    IN_REACH = enum.auto()
    """Those that an idle fleet would keep, of requests that did not fail: the fleet is steered by them."""
    PREFILL = enum.auto()
    """Those of a first token that prefill could have had in time; those of one that failed before it, too."""


class Series(NamedTuple):
    """The key by which requests are counted together."""

    model: str
    tier: Tier
    tenant: str


@dataclass(slots=True)
class _Tally:
    """Counts of the requests of one series that ended in one slice of time."""

    requests: int = 0
    judged: int = 0
    met: int = 0
    good: int = 0
    in_reach: int = 0
    in_reach_met: int = 0
    prefilled: int = 0
    prefilled_met: int = 0
    ttft: LatencySketch = field(default_factory=LatencySketch)
    tpot: LatencySketch = field(default_factory=LatencySketch)
    e2e: LatencySketch = field(default_factory=LatencySketch)
    budget_used: LatencySketch = field(default_factory=LatencySketch)

    def add(self, ended: RequestEnded) -> None:
        attained, in_reach, in_time = ended.attained, ended.attained_in_reach, ended.prefilled_in_time
        self.requests += 1
        self.in_reach += in_reach is not None
        self.in_reach_met += in_reach is True
        self.prefilled += in_time is not None
        self.prefilled_met += in_time is True
        self.judged += attained is not None
        self.met += attained is True
        self.good += ended.outcome is Outcome.FINISHED and attained is not False
        self.ttft.add(ended.ttft_s)
        self.tpot.add(ended.tpot_s)
        self.budget_used.add(ended.budget_used)
        if ended.outcome is Outcome.FINISHED:
            self.e2e.add(ended.e2e_s)

    def judgements(self, counted: Counted) -> tuple[int, int]:
        """How many were judged, and how many of them missed."""
        match counted:
            case Counted.ALL:
                return self.judged, self.judged - self.met
            case Counted.IN_REACH:
                return self.in_reach, self.in_reach - self.in_reach_met
            case Counted.PREFILL:
                return self.prefilled, self.prefilled - self.prefilled_met
            case _:
                assert_never(counted)


@dataclass(slots=True)
class RollingAttainment:
    """Counts the requests that ended, by model, tier and tenant, and forgets them after the long window.

    Time passes in slices; a window is the slice that is under way and as many whole ones as make up its
    length.

    Attributes:
        long_s: Length of the long window.
    """

    long_s: float = 300.0
    _slices: dict[int, dict[Series, _Tally]] = field(default_factory=dict)
    _known: set[Series] = field(default_factory=set)
    _since_s: float | None = None

    @property
    def short_s(self) -> float:
        """Length of the short window."""
        return self.long_s / LONG_PER_SHORT

    @property
    def _slice_s(self) -> float:
        return self.short_s / _SLICES_PER_SHORT

    def add(self, ended: RequestEnded, now_s: float, age_s: float = 0.0) -> None:
        """A request has ended, so long ago; one that no window reaches back to is left out."""
        at_s = now_s - age_s
        if self._index(at_s) < self._index(now_s - self.long_s):
            return
        self._since_s = at_s if self._since_s is None else min(self._since_s, at_s)
        series = Series(ended.model, ended.tier, ended.tenant)
        if series not in self._known and len(self._known) >= MAX_SERIES:
            series = series._replace(tenant=OTHER_TENANTS)
        self._known.add(series)
        its_slice = self._slices.setdefault(self._index(at_s), {})
        its_slice.setdefault(series, _Tally()).add(ended)
        self._forget(now_s)

    def series(self, now_s: float, targets: Mapping[Tier, float]) -> dict[Series, Attainment]:
        """The attainment of each series of the long window whose tier has a target, in the order of the keys.

        Merges the sketches of all tenants, which takes milliseconds.
        """
        grouped: dict[Series, list[_Tally]] = {}
        for series, tally in self._window(self.long_s, now_s):
            if series.tier in targets:
                grouped.setdefault(series, []).append(tally)
        return {
            series: self._summed(tallies, self.long_s, now_s, targets[series.tier])
            for series, tallies in sorted(grouped.items(), key=itemgetter(0))
        }

    def burn(
        self, tier: Tier, target: float, window_s: float, now_s: float, counted: Counted = Counted.ALL
    ) -> Burn:
        """How fast a tier uses up the misses that `target`, a fraction below 1, allows."""
        judged = missed = 0
        for series, tally in self._window(window_s, now_s):
            if series.tier == tier:
                of_slice, missed_in_slice = tally.judgements(counted)
                judged, missed = judged + of_slice, missed + missed_in_slice
        return Burn(missed / judged / (1.0 - target) if judged else 0.0, missed, judged)

    def over(
        self,
        window_s: float,
        now_s: float,
        target: float,
        *,
        tier: Tier | None = None,
    ) -> Attainment:
        """The attainment of a window's requests, of one tier or of all.

        Args:
            window_s: `long_s` or less.
            now_s: The time.
            target: The fraction that shall meet their objectives; its quantile is that of the headroom.
            tier: Count only its requests.
        """
        tallies = [
            tally for series, tally in self._window(window_s, now_s) if tier is None or tier == series.tier
        ]
        return self._summed(tallies, window_s, now_s, target)

    def _summed(self, tallies: Sequence[_Tally], window_s: float, now_s: float, target: float) -> Attainment:
        used = LatencySketch.merged(tally.budget_used for tally in tallies).quantile(target)
        since_s = now_s if self._since_s is None else self._since_s
        counted_s = max(now_s - max(since_s, self._index(now_s - window_s) * self._slice_s), self._slice_s)
        return Attainment(
            requests=sum(tally.requests for tally in tallies),
            judged=sum(tally.judged for tally in tallies),
            met=sum(tally.met for tally in tallies),
            goodput_per_s=sum(tally.good for tally in tallies) / counted_s,
            headroom=None if used is None else 1.0 - used,
            ttft=LatencySketch.merged(tally.ttft for tally in tallies).spread(),
            tpot=LatencySketch.merged(tally.tpot for tally in tallies).spread(),
            e2e=LatencySketch.merged(tally.e2e for tally in tallies).spread(),
        )

    def _window(self, window_s: float, now_s: float) -> Iterator[tuple[Series, _Tally]]:
        first = self._index(now_s - window_s)
        for index, tallies in self._slices.items():
            if index >= first:
                yield from tallies.items()

    def _index(self, at_s: float) -> int:
        return int(at_s // self._slice_s)

    def _forget(self, now_s: float) -> None:
        oldest = self._index(now_s - self.long_s)
        if min(self._slices, default=oldest) >= oldest:
            return
        for index in [index for index in self._slices if index < oldest]:
            del self._slices[index]
        self._known = {series for tallies in self._slices.values() for series in tallies}
