"""How well objectives are met: rolling attainment, latencies, goodput, headroom and burn rates.

Owns what counts as met, and the windows. Does not decide anything by it (see `slo.monitor.shedding`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from ddsketch import DDSketch

from slo.outcomes import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from slo.tiers import Tier

RELATIVE_ACCURACY: Final = 0.01
"""Of the quantiles."""
LONG_PER_SHORT: Final = 12
"""The short window is a twelfth of the long one (Site Reliability Workbook, chapter 5, alert 6)."""
MOST_SERIES: Final = 128
"""Of model, tier and tenant; tenants beyond are counted together as `OTHER_TENANTS`."""
OTHER_TENANTS: Final = "other"
_SLICES_PER_SHORT: Final = 2


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request as its ingress saw it end.

    Attributes:
        e2e_s: From arrival to end.
        streamed: Whether its tokens could be timed.
        ttft_s: Time to its first token; None when there was none to time.
        ttft_budget_s: What it was promised; None for nothing.
        predicted_ttft_s: What the router said when it placed it; None when it was not asked.
        tpot_s: Its mean time per output token after the first; None when there were too few to time.
        tpot_budget_s: What it was promised; None for nothing.
    """

    model: str
    tier: Tier
    tenant: str
    outcome: Outcome
    e2e_s: float
    streamed: bool = True
    ttft_s: float | None = None
    ttft_budget_s: float | None = None
    predicted_ttft_s: float | None = None
    tpot_s: float | None = None
    tpot_budget_s: float | None = None

    @property
    def attained(self) -> bool | None:
        """Whether it met what it was promised; None when that was nothing or cannot be told.

        A request that was refused for want of capacity, or failed, has missed it. One that was malformed
        says nothing, and neither does one whose client left before anything was due.
        """
        if self.outcome is Outcome.REJECTED or (self.ttft_budget_s is None and self.tpot_budget_s is None):
            return None
        if self.outcome in {Outcome.SHED, Outcome.FAILED, Outcome.EVICTED}:
            return False
        spent = self.spent
        if spent is not None and spent > 1.0:
            return False
        if self.outcome is Outcome.CANCELLED:
            overdue = self.ttft_budget_s is not None and self.e2e_s > self.ttft_budget_s
            return False if overdue and self.streamed and self.ttft_s is None else None
        return None if spent is None else True

    @property
    def spent(self) -> float | None:
        """The part of its budgets that it took, the worse of the two; None when neither was timed."""
        pairs = ((self.ttft_s, self.ttft_budget_s), (self.tpot_s, self.tpot_budget_s))
        return max(
            (took_s / budget_s for took_s, budget_s in pairs if took_s is not None and budget_s), default=None
        )


class Spread(NamedTuple):
    """Quantiles of a latency, seconds."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Attainment:
    """What came of the requests of a window.

    Attributes:
        requests: That ended.
        judged: Of them, those of which it can be told whether they met what they were promised.
        met: Of those, how many did.
        goodput_per_s: Requests per second that were finished without missing anything.
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
        """The fraction that met what they were promised; None without any."""
        return self.met / self.judged if self.judged else None


class Burn(NamedTuple):
    """How fast a tier uses up the misses that its target allows: 1 is as fast as allowed.

    Attributes:
        rate: The fraction missed over the fraction allowed; 0 without requests.
        missed: How many missed.
        judged: How many could have.
    """

    rate: float
    missed: int
    judged: int


class Series(NamedTuple):
    """Whose requests are counted together."""

    model: str
    tier: Tier
    tenant: str


@dataclass(slots=True)
class _Tally:
    """What ended in one slice of time."""

    requests: int = 0
    judged: int = 0
    met: int = 0
    good: int = 0
    ttft: DDSketch | None = None
    tpot: DDSketch | None = None
    e2e: DDSketch | None = None
    spent: DDSketch | None = None

    def add(self, ended: RequestEnded) -> None:
        attained = ended.attained
        self.requests += 1
        self.judged += attained is not None
        self.met += attained is True
        self.good += ended.outcome is Outcome.FINISHED and attained is not False
        self.ttft = _with(self.ttft, ended.ttft_s)
        self.tpot = _with(self.tpot, ended.tpot_s)
        self.spent = _with(self.spent, ended.spent)
        if ended.outcome is Outcome.FINISHED:
            self.e2e = _with(self.e2e, ended.e2e_s)


@dataclass(slots=True)
class RollingAttainment:
    """Counts what ended, by model, tier and tenant, and forgets it after the long window.

    Time passes in slices; a window is the slice that is under way and as many whole ones as make up its
    length.

    Attributes:
        long_s: Length of the long window.
    """

    long_s: float = 300.0
    _slices: OrderedDict[int, dict[Series, _Tally]] = field(default_factory=OrderedDict)
    _known: set[Series] = field(default_factory=set)
    _since_s: float | None = None

    @property
    def short_s(self) -> float:
        """Length of the short window."""
        return self.long_s / LONG_PER_SHORT

    @property
    def _slice_s(self) -> float:
        return self.short_s / _SLICES_PER_SHORT

    def add(self, ended: RequestEnded, now_s: float) -> None:
        """A request has ended."""
        self._since_s = now_s if self._since_s is None else self._since_s
        series = Series(ended.model, ended.tier, ended.tenant)
        if series not in self._known and len(self._known) >= MOST_SERIES:
            series = series._replace(tenant=OTHER_TENANTS)
        self._known.add(series)
        newest = self._slices.setdefault(self._index(now_s), {})
        newest.setdefault(series, _Tally()).add(ended)
        self._forget(now_s)

    def series(self, now_s: float) -> list[Series]:
        """Everything that is counted apart in the long window."""
        return sorted({series for _, series, _ in self._window(self.long_s, now_s)})

    def burn(self, tier: Tier, target: float, window_s: float, now_s: float) -> Burn:
        """How fast a tier uses up the misses that `target`, a fraction below 1, allows."""
        tallies = [tally for _, series, tally in self._window(window_s, now_s) if series.tier == tier]
        judged = sum(tally.judged for tally in tallies)
        missed = judged - sum(tally.met for tally in tallies)
        return Burn(missed / judged / (1.0 - target) if judged else 0.0, missed, judged)

    def over(
        self,
        window_s: float,
        now_s: float,
        target: float,
        *,
        tier: Tier | None = None,
        series: Series | None = None,
    ) -> Attainment:
        """What came of a window's requests, of one tier, of one series or of all.

        Args:
            window_s: `long_s` or less.
            now_s: The time.
            target: The fraction that shall meet their objectives; its quantile is that of the headroom.
            tier: Count only its requests.
            series: Count only its requests.
        """
        tallies = [
            tally
            for _, each, tally in self._window(window_s, now_s)
            if (tier is None or tier == each.tier) and (series is None or series == each)
        ]
        spent = _merged(tally.spent for tally in tallies)
        since_s = now_s if self._since_s is None else self._since_s
        counted_s = max(now_s - max(since_s, self._index(now_s - window_s) * self._slice_s), self._slice_s)
        return Attainment(
            requests=sum(tally.requests for tally in tallies),
            judged=sum(tally.judged for tally in tallies),
            met=sum(tally.met for tally in tallies),
            goodput_per_s=sum(tally.good for tally in tallies) / counted_s,
            headroom=None if spent is None else 1.0 - _quantile(spent, target),
            ttft=_spread(tally.ttft for tally in tallies),
            tpot=_spread(tally.tpot for tally in tallies),
            e2e=_spread(tally.e2e for tally in tallies),
        )

    def _window(self, window_s: float, now_s: float) -> Iterator[tuple[int, Series, _Tally]]:
        first = self._index(now_s - window_s)
        for index, tallies in self._slices.items():
            if index >= first:
                for series, tally in tallies.items():
                    yield index, series, tally

    def _index(self, at_s: float) -> int:
        return int(at_s // self._slice_s)

    def _forget(self, now_s: float) -> None:
        oldest = self._index(now_s - self.long_s)
        if next(iter(self._slices), oldest) >= oldest:
            return
        for index in [index for index in self._slices if index < oldest]:
            del self._slices[index]
        self._known = {series for tallies in self._slices.values() for series in tallies}


def _with(sketch: DDSketch | None, value: float | None) -> DDSketch | None:
    if value is None:
        return sketch
    sketch = DDSketch(RELATIVE_ACCURACY) if sketch is None else sketch
    sketch.add(value)
    return sketch


def _merged(sketches: Iterable[DDSketch | None]) -> DDSketch | None:
    merged: DDSketch | None = None
    for sketch in sketches:
        if sketch is not None:
            merged = DDSketch(RELATIVE_ACCURACY) if merged is None else merged
            merged.merge(sketch)
    return merged


def _spread(sketches: Iterable[DDSketch | None]) -> Spread | None:
    merged = _merged(sketches)
    return None if merged is None else Spread(*(_quantile(merged, q) for q in (0.5, 0.95, 0.99)))


def _quantile(sketch: DDSketch, quantile: float) -> float:
    value = sketch.get_quantile_value(quantile)
    assert value is not None
    return float(value)
