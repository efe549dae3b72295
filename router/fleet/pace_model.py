"""How long a decode replica takes per output token with so many requests, learned from its reports."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Final

_LEARNING_RATE: Final = 0.1
_NO_SPREAD: Final = 1e-6
_TELLING: Final = 0.5
"""Numbers of requests that differ by so much of their mean say how much time is theirs."""


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
