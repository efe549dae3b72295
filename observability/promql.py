"""Expressions of Prometheus' query language over the metrics of the catalogue.

Owns the names under which Prometheus sees a metric. Every function refuses labels that the metric does not
have, so that an expression cannot name what is not exported.
"""

from __future__ import annotations

from typing import Final

from telemetry.catalogue import MONITOR, Metric, MetricKind

_OF_RAY: Final = frozenset({"replica", "deployment", "application"})
"""Labels that Ray Serve adds to what the processes record."""
_SEEN: Final = "1h"
"""A series is as old as what was seen in so long before a window."""
_WATCHED: Final = "count(up offset 5m)[50m:5m]"
"""Whether anything was scraped in that time, but for its last minutes: by then every target was, once.

Shorter than an hour by the offset and by how long Prometheus holds on to a sample.
"""
_REACHED: Final = "(up offset 5m)[50m:5m]"
"""In the same time, whether each target could be scraped; nothing of one that is new."""


def exported(metric: Metric) -> str:
    """The name of a metric as Prometheus sees it; of a histogram, without the suffix of its parts."""
    prefix = "" if metric in MONITOR else "ray_"
    return f"{prefix}{metric.name}" + ("_total" if metric.kind is MetricKind.COUNTER else "")


def select(metric: Metric, *, part: str = "", **matchers: str) -> str:
    """The series of a metric.

    Args:
        metric: Which one.
        part: Of a histogram, `bucket` or `count`.
        matchers: By label, a value, or `~` and a regular expression.
    """
    _check_labels(metric, matchers)
    name = f"{exported(metric)}_{part}" if part else exported(metric)
    tests = ",".join(
        f'{label}=~"{value[1:]}"' if value.startswith("~") else f'{label}="{value}"'
        for label, value in matchers.items()
    )
    return f"{name}{{{tests}}}" if tests else name


def rate(metric: Metric, window: str, *by: str, part: str = "", **matchers: str) -> str:
    """How much a counter grows in a second, summed by labels."""
    return _summed(metric, f"rate({select(metric, part=part, **matchers)}[{window}])", by)


def grown(metric: Metric, window: str, *by: str, **matchers: str) -> str:
    """How much a counter has grown in a window, from nothing too, summed by labels."""
    return _summed(metric, growth(select(metric, **matchers), window), by)


def growth(series: str, window: str) -> str:
    """How much each series of a counter has grown in a window, from nothing too.

    Ray exports a counter only once it has counted, and `increase` does not see what a series begins with. A
    series begins when it was not seen for an hour in which others were: a scrape that failed is no beginning,
    nor is a Prometheus that was away, or a target that could not be reached.
    """
    begun = f"(max_over_time({series}[{window}]) unless max_over_time({series}[{_SEEN}] offset {window}))"
    begun = f"{begun} and on () count_over_time({_WATCHED} offset {window})"
    away = f"max_over_time({_REACHED} offset {window}) == 0"
    begun = f"({begun} unless on (instance, job) ({away}))"
    return f"{begun} or increase({series}[{window}])"


def served(metric: Metric, of: str, *by: str, **matchers: str) -> str:
    """The sum by the model that is served, under the label `model`, and by other labels.

    Series from before there was the label `served` are of the model that they call `model`.

    Args:
        metric: One with the label `served`.
        of: What is summed; `{}` stands for the series.
        by: The other labels.
        matchers: By label, as of `select`.
    """
    named = named_served(metric, of, *by, **matchers)
    others = _summed(metric, of.format(select(metric, **matchers, served="")), ("model", *by))
    return _summed(metric, f"{named} or {others}", ("model", *by))


def named_served(metric: Metric, of: str, *by: str, **matchers: str) -> str:
    """The same of series with the label `served` alone, which they keep."""
    sums = _summed(metric, of.format(select(metric, **matchers, served="~.+")), ("served", *by))
    return f'label_replace({sums}, "model", "$1", "served", "(.*)")'


def quantile(q: float, metric: Metric, window: str, *by: str, **matchers: str) -> str:
    """A quantile of a histogram, by labels."""
    if metric.kind is not MetricKind.HISTOGRAM or ("sign" in metric.labels and "sign" not in matchers):
        msg = f"{metric.name} has quantiles only as a histogram, and only of one sign"
        raise ValueError(msg)
    return f"histogram_quantile({q:g}, {rate(metric, window, *by, 'le', part='bucket', **matchers)})"


def _summed(metric: Metric, expression: str, by: tuple[str, ...]) -> str:
    _check_labels(metric, by)
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum({expression})"


def _check_labels(metric: Metric, labels: object) -> None:
    known = set(metric.labels) | (_OF_RAY if metric not in MONITOR else set())
    known |= {"le"} if metric.kind is MetricKind.HISTOGRAM else set()
    if unknown := set(labels) - known:  # type: ignore[call-overload] # a mapping's keys, or a tuple
        msg = f"{metric.name} has no label {min(unknown)!r}; it has {', '.join(sorted(known)) or 'none'}"
        raise ValueError(msg)
