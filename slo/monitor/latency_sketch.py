"""Quantiles of latencies in little memory, which can be merged over windows, tiers and tenants (DDSketch)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ddsketch import DDSketch

RELATIVE_ACCURACY: Final = 0.01
"""Of the quantiles."""
_DECIMALS: Final = 6
"""To which a fraction of a count is rounded: 0.55 of 100 are 55, though floats make it a little more."""


class Spread(NamedTuple):
    """Quantiles of a latency, seconds."""

    p50: float
    p95: float
    p99: float


@dataclass(slots=True)
class LatencySketch:
    """A distribution of latencies, or of other values."""

    _values: DDSketch = field(default_factory=lambda: DDSketch(RELATIVE_ACCURACY))

    def add(self, value: float | None) -> None:
        """Count a value; None stands for one that was not measured and is not counted."""
        if value is not None:
            self._values.add(value)

    @staticmethod
    def merged(sketches: Iterable[LatencySketch]) -> LatencySketch:
        """The values of all of them together."""
        merged = LatencySketch()
        for sketch in sketches:
            merged._values.merge(sketch._values)  # noqa: SLF001 - of the same class
        return merged

    def quantile(self, quantile: float) -> float | None:
        """The least value that a fraction `quantile` does not exceed, by nearest rank; None without any."""
        count = self._values.count
        rank = max(0, math.ceil(round(quantile * count, _DECIMALS)) - 1)
        # The sketch takes the rank below a fraction of the last one: half a rank more, no rounding tells.
        value = self._values.get_quantile_value(min(1.0, (rank + 0.5) / max(1, count - 1)))
        return None if value is None else float(value)

    def spread(self) -> Spread | None:
        """The usual quantiles; None without any value."""
        p50, p95, p99 = (self.quantile(quantile) for quantile in (0.5, 0.95, 0.99))
        return None if p50 is None or p95 is None or p99 is None else Spread(p50, p95, p99)
