"""Turns the catalogue's metrics into Ray Serve instruments, which add deployment and replica labels."""

from __future__ import annotations

from ray.serve import metrics as ray_metrics

from telemetry.catalogue import Metric, MetricKind


class Instruments:
    """Records measurements of the given metrics in this process; recording any other is a `KeyError`."""

    def __init__(self, *metrics: Metric) -> None:
        self._instruments = {metric.name: _instrument(metric) for metric in metrics}

    def count(self, metric: Metric, value: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        instrument = self._instruments[metric.name]
        assert isinstance(instrument, ray_metrics.Counter)
        if value > 0:
            instrument.inc(value, tags=labels)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Record one value of a histogram; a signed one gets its `sign` label here."""
        instrument = self._instruments[metric.name]
        assert isinstance(instrument, ray_metrics.Histogram)
        if "sign" in metric.labels:
            labels["sign"] = "negative" if value < 0 else "positive"
        instrument.observe(abs(value), tags=labels)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge."""
        instrument = self._instruments[metric.name]
        assert isinstance(instrument, ray_metrics.Gauge)
        instrument.set(value, tags=labels)


def _instrument(metric: Metric) -> ray_metrics.Counter | ray_metrics.Gauge | ray_metrics.Histogram:
    if metric.kind is MetricKind.HISTOGRAM:
        return ray_metrics.Histogram(metric.name, metric.meaning, metric.buckets, metric.labels)
    kind = ray_metrics.Counter if metric.kind is MetricKind.COUNTER else ray_metrics.Gauge
    return kind(metric.name, metric.meaning, metric.labels)
