"""Quantiles of latencies in little memory, which can be merged over windows, tiers and tenants (DDSketch)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ddsketch import DDSketch

RELATIVE_ACCURACY: Final = 0.01
"""Of the quantiles."""


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
        """The value that a fraction `quantile` of all does not exceed; None without any."""
        value = self._values.get_quantile_value(quantile)
        return None if value is None else float(value)

    def spread(self) -> Spread | None:
        """The usual quantiles; None without any value."""
        p50, p95, p99 = (self.quantile(quantile) for quantile in (0.5, 0.95, 0.99))
        return None if p50 is None or p95 is None or p99 is None else Spread(p50, p95, p99)
