"""When a tier of replicas grows and shrinks.

Pure: reads no clock. It grows at once where many more are needed than there are, and by one where more have
been needed for minutes, on the average. It shrinks to the most that were needed at any time within the last
minutes, on the average of as long as a replica takes to start, so that it follows neither waves nor noise. It
does not shrink while replicas start or are replaced.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from slo.autoscaling.need import Need, ScaleReason

PREFILL_BUSY: Final = 1.0
"""`ScalingRules.busy` of prefill: who is urgent waits for nobody who is not, whatever all of them take."""
DECODE_BUSY: Final = 0.8
"""Of decode, where all streams bear it when it is full."""
_FULL: Final = 9 / 8
"""Replicas are too few now where more than so many times as many are needed."""
_GRAIN_S: Final = 0.5
"""Of what means are taken of: it is asked more often than what is needed changes."""
_GIVEN_UP: Final = 10
"""A replica that is not there after so many times as long as one takes to start is not waited for."""


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """The bounds of a tier, and how it is scaled.

    Attributes:
        start_s: How long a replica takes from its order until it serves.
        keep_s: Replicas are kept that were needed within this time.
        busy: Part of their time, or memory, that replicas are planned to be in use.

    Raises:
        ValueError: when they contradict each other.
    """

    min_replicas: int
    max_replicas: int
    start_s: float = 60.0
    keep_s: float = 300.0
    busy: float = DECODE_BUSY

    def __post_init__(self) -> None:  # noqa: D105 - see Raises
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError(f"1 <= {self.min_replicas} <= {self.max_replicas} does not hold")
        if not 0 < self.busy <= 1:
            raise ValueError(f"0 < {self.busy} <= 1 does not hold")


@dataclass(frozen=True, slots=True)
class Scaled:
    """How many replicas there shall be, and why.

    Attributes:
        is_overdue: Whether some that there shall be are not there, and none has come or gone for twice as
            long as one takes to start.
    """

    target: int
    reason: ScaleReason
    is_overdue: bool = False


class Scaler:
    """Decides for one tier of replicas; to be asked every second or so.

    It shrinks nothing until it has watched for `ScalingRules.keep_s`.

    Attributes:
        bounds: The fewest and the most that there may be from now on; at first those of the rules.
    """

    def __init__(self, rules: ScalingRules) -> None:
        self.rules = rules
        self.bounds = rules.min_replicas, rules.max_replicas
        self._short_since_s: float | None = None
        """Since when fewer run than there shall be; an order begins it anew."""
        self._sizes = 0, 0
        self._sizes_since_s = -math.inf
        self._first_s: float | None = None
        self._sufficed: deque[tuple[float, int]] = deque()
        self._steady: deque[tuple[float, float]] = deque()
        """(when, replicas that would have been busy all the time), of the last minutes."""

    def decide(self, need: Callable[[float], Need] | None, running: int, target: int, now_s: float) -> Scaled:
        """How many replicas there shall be from now on.

        Args:
            need: What is needed, by the seconds until another replica is up; None when nobody knows.
            running: Replicas that serve.
            target: How many there shall be until now.
            now_s: The time; never goes back.
        """
        rules = self.rules
        missing_s = self._missing_s(running, target, now_s)
        is_overdue = running < target and now_s - self._sizes_since_s >= 2 * rules.start_s
        if need is None:
            self._steady.clear()
            self._sufficed.clear()  # whoever shrinks has seen all of the last minutes
            self._first_s = None
            return Scaled(self._bounded(target), ScaleReason.UNKNOWN, is_overdue)
        is_starting = 0 < missing_s < 2 * rules.start_s
        found = need(max(0.0, rules.start_s - missing_s) if is_starting else rules.start_s)
        usual = found.steady / rules.busy
        wanted = max(usual, found.at_least)
        enough = self._bounded(math.ceil(wanted) if wanted > _FULL * target else 0)
        reason = found.usual if usual >= found.at_least else found.reason
        self._see(found.steady, now_s)
        if enough <= target and self._has_watched(now_s) and self._mean(rules.keep_s) > rules.busy * target:
            enough, reason = self._bounded(target + 1), found.usual
        if found.wants_more and running >= target and enough <= target:
            enough, reason = self._bounded(target + 1), ScaleReason.AT_RISK
        most = self._most(found, enough, target, now_s)
        if enough > target:
            self._short_since_s = now_s
            return Scaled(enough, reason, is_overdue)
        if most < target and not self._is_coming(running, target, now_s):
            return Scaled(self._bounded(most), ScaleReason.FEWER_SUFFICE)
        return Scaled(self._bounded(target), ScaleReason.NOTHING_TO_DO, is_overdue)

    def _is_coming(self, running: int, target: int, now_s: float) -> bool:
        """Whether replicas start that there shall be, or are replaced.

        Those of a wave would otherwise be withdrawn before they have served. And in a rolling update Serve
        takes those of the former version first, which may be all that serve.
        """
        given_up_s = max(_GIVEN_UP * self.rules.start_s, self.rules.keep_s)
        return running < target and now_s - self._sizes_since_s < given_up_s

    def _missing_s(self, running: int, target: int, now_s: float) -> float:
        """For how long fewer run than there shall be, counted from the last order; 0 when all are there."""
        if (running, target) != self._sizes:
            self._sizes, self._sizes_since_s = (running, target), now_s
        if running >= target:
            self._short_since_s = None
        elif self._short_since_s is None:
            self._short_since_s = now_s
        return 0.0 if self._short_since_s is None else now_s - self._short_since_s

    def _most(self, found: Need, enough: int, target: int, now_s: float) -> int:
        """The most replicas that were needed within the time that they are kept."""
        rules = self.rules
        mean = self._mean(rules.start_s)
        suffices = math.ceil(max(mean / rules.busy, mean + found.at_least - found.steady))
        if found.wants_more:
            suffices = max(suffices, target)
        if enough > target:  # what is ordered is kept
            suffices = max(suffices, enough)
        while self._sufficed and self._sufficed[-1][1] <= suffices:
            self._sufficed.pop()
        self._sufficed.append((now_s, suffices))
        while self._sufficed[0][0] < now_s - rules.keep_s:
            self._sufficed.popleft()
        return self._sufficed[0][1] if self._has_watched(now_s) else target

    def _see(self, steady: float, now_s: float) -> None:
        self._first_s = now_s if self._first_s is None else self._first_s
        if self._steady and now_s - self._steady[-1][0] < _GRAIN_S:
            return
        self._steady.append((now_s, steady))
        while self._steady[0][0] < now_s - max(self.rules.start_s, self.rules.keep_s):
            self._steady.popleft()

    def _has_watched(self, now_s: float) -> bool:
        """Whether it has known what is needed for as long as replicas are kept."""
        return self._first_s is not None and now_s - self._first_s >= self.rules.keep_s

    def _mean(self, over_s: float) -> float:
        """How many replicas would have been busy, on the average of so long."""
        since_s = self._steady[-1][0] - over_s
        lately = [steady for at_s, steady in self._steady if at_s >= since_s]
        return math.fsum(lately) / len(lately)

    def _bounded(self, replicas: int) -> int:
        fewest, most = self.bounds
        return min(max(replicas, fewest), most)
