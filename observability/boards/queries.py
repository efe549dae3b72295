"""Queries that several dashboards ask, filtered by the dashboards' variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from observability.grafana import RATE, Query
from observability.promql import grown, quantile, rate, select
from telemetry import catalogue
from telemetry.catalogue import ALL, Metric

QUANTILES: Final = (0.5, 0.95, 0.99)

_OF_REPLICAS: Final = frozenset(ALL) - {
    catalogue.REQUESTS,
    catalogue.REJECTIONS,
    catalogue.TTFT,
    catalogue.TPOT,
    catalogue.SLACK_AT_DISPATCH,
    catalogue.SLACK_AT_FIRST_TOKEN,
    catalogue.TTFT_PREDICTION_ERROR,
    catalogue.TTFT_PREDICTION_RATIO,
    catalogue.ROUTER_FALLBACKS,
    catalogue.CONTINUATIONS,
    catalogue.PLACEMENTS,
    catalogue.DECISION,
    catalogue.FLEET_LOAD,
    catalogue.FLEET_BACKLOG,
    catalogue.PROMPT_LENGTH_ERROR,
    catalogue.BYTES_PER_TOKEN,
    catalogue.ENGINES_ENDED,
    catalogue.API_KEYS_UNREAD,
    catalogue.MONITOR_LOST,
    catalogue.POLICY_APPLIED,
}
"""What prefill and decode replicas record, rather than an ingress, the router or all."""


def filters(metric: Metric, **matchers: str) -> dict[str, str]:
    """The dashboards' variables that a metric has labels for, and `matchers`; models are those served."""
    labels = set(metric.labels) | ({"replica"} if metric in _OF_REPLICAS else set())
    model = "served" if "served" in labels else "model"
    variables = {model: "~$model", "tier": "~$tier", "replica": "~$replica"}
    return {label: value for label, value in variables.items() if label in labels} | matchers


def now(metric: Metric, legend: str, **matchers: str) -> Query:
    """A gauge as it is."""
    return Query(select(metric, **filters(metric, **matchers)), legend)


def per_second(metric: Metric, *by: str, **matchers: str) -> Query:
    """How fast a counter grows, by labels."""
    return Query(rate(metric, RATE, *by, **filters(metric, **matchers)), legend_of(by))


def in_window(metric: Metric, *by: str, **matchers: str) -> Query:
    """How often something rare has happened in the interval that is drawn, by labels."""
    return Query(grown(metric, RATE, *by, **filters(metric, **matchers)), legend_of(by))


def quantiles(
    metric: Metric, *by: str, of: tuple[float, ...] = QUANTILES, legend: str = "", **matchers: str
) -> list[Query]:
    """Quantiles of a histogram, by labels."""
    return [
        Query(
            quantile(q, metric, RATE, *by, **filters(metric, **matchers)),
            f"p{q * 100:g} {legend or legend_of(by)}".strip(),
        )
        for q in of
    ]


def both_signs(metric: Metric, *by: str, names: Mapping[str, str]) -> list[Query]:
    """The 95th percentiles of a signed quantity on either side of zero; `names` by sign."""
    return [
        query
        for sign, name in names.items()
        for query in quantiles(metric, *by, of=(0.95,), legend=f"{name} {legend_of(by)}".strip(), sign=sign)
    ]


def fraction_below_zero(metric: Metric, *by: str) -> Query:
    """How much of a signed quantity is negative, by labels.

    Ray exports the series of a sign only once there was one of it.
    """
    some = filters(metric)
    negative = rate(metric, RATE, *by, part="count", **some, sign="negative")
    every = rate(metric, RATE, *by, part="count", **some)
    return Query(f"({negative} or 0 * {every})\n/ {every}", legend_of(by))


def heat(metric: Metric) -> Query:
    """A histogram's buckets over time."""
    buckets = select(metric, part="bucket", **filters(metric))
    return Query(f"sum by (le) (increase({buckets}[{RATE}]))", "{{le}}")


def worst(metric: Metric, *by: str, **matchers: str) -> Query:
    """The highest value of a gauge, by labels."""
    series = select(metric, **filters(metric, **matchers))
    return Query(f"max by ({', '.join(by)}) ({series})" if by else f"max({series})", legend_of(by))


def legend_of(labels: tuple[str, ...]) -> str:
    """The labels' values in a row; the name of nothing for none."""
    return " ".join(f"{{{{{label}}}}}" for label in labels)
