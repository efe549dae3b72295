"""Recording rules and alerts on error budgets, from the targets of a deployment's tiers.

The windows and factors are those of the Site Reliability Workbook, chapter 5, "Multiwindow, Multi-Burn-Rate
Alerts": the long window says that it matters, the short one that it goes on.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from observability.promql import exported, served
from observability.rule_groups import Alert, RecordingRule, RuleGroup, Severity
from slo.tiers import Tier, TierSet
from telemetry.catalogue import SLO_JUDGED, SLO_TARGET

BUDGET_WINDOW: Final = "30d"
MIN_MISSES: Final = 5
"""An alert needs as much traffic in its long window as makes its threshold this many misses."""
_SHORT: Final = ("5m", "30m", "1h", "2h", "6h")
_LONG: Final = ("1d", "3d", BUDGET_WINDOW)


@dataclass(frozen=True, slots=True)
class BurnAlert:
    """An alert on how fast a tier uses up the misses that its target allows; 1 is as fast as allowed."""

    name: str
    severity: Severity
    factor: float
    long: str
    short: str

    def threshold(self, target: float) -> float:
        """The fraction of misses above which it fires."""
        return self.factor * (1.0 - target)


BURN_ALERTS: Final = (
    BurnAlert("SlackServeBudgetBurn1h", Severity.PAGE, 14.4, "1h", "5m"),
    BurnAlert("SlackServeBudgetBurn6h", Severity.PAGE, 6.0, "6h", "30m"),
    BurnAlert("SlackServeBudgetBurn1d", Severity.TICKET, 3.0, "1d", "2h"),
    BurnAlert("SlackServeBudgetBurn3d", Severity.TICKET, 1.0, "3d", "6h"),
)


class CannotFireError(ValueError):
    """An alert on a fraction of misses above which there is none."""


def missed(window: str) -> str:
    """The name of the recorded fraction of requests that missed an objective, by served model and tier."""
    return f"slackserve:slo_missed:ratio_rate{window}"


def judged(window: str) -> str:
    """The name of the recorded number of requests that were judged, by served model and tier."""
    return f"slackserve:slo_judged:increase{window}"


MISSES_ALLOWED: Final = f"(1 - max by (model, tier) ({exported(SLO_TARGET)}))"
"""The fraction of requests that may miss an objective, by served model and tier."""
BUDGET_LEFT: Final = f"slackserve:slo_budget_left:ratio{BUDGET_WINDOW}"


def recordings() -> Iterator[RuleGroup]:
    """The rules that the alerts and dashboards build on."""
    yield RuleGroup("slackserve-slo-windows", "30s", tuple(_windows(_SHORT)))
    yield RuleGroup("slackserve-slo-long-windows", "2m", (*_windows(_LONG), _BUDGET))


def burn_alert(alert: BurnAlert, tier: Tier, target: float, models: Sequence[str] = ()) -> Alert:
    """The alert for one tier.

    Args:
        alert: Which one.
        tier: The tier.
        target: Its target.
        models: Names of the models that it holds for; all without any.

    Raises:
        CannotFireError: when its threshold is no fraction below 1.
    """
    threshold = alert.threshold(target)
    if threshold >= 1.0:
        msg = (
            f"{alert.name} is left out for {tier}: with a target of {target:g}, {alert.factor:g} times the "
            f"allowed misses are {threshold:.0%} of its requests"
        )
        raise CannotFireError(msg)
    traffic = math.ceil(MIN_MISSES / threshold - 1e-9)
    these = _these(tier, models)
    expr = (
        f"{missed(alert.long)}{these} > {threshold:.6g}\n"
        f"and {missed(alert.short)}{these} > {threshold:.6g}\n"
        f"and {judged(alert.long)}{these} >= {traffic}"
    )
    summary = (
        f"{tier} of {{{{ $labels.model }}}} misses more than {alert.factor:g} times as many objectives as "
        f"its target of {target:g} allows, for {alert.long}: {{{{ $value | humanizePercentage }}}}."
    )
    return Alert(alert.name, expr, alert.severity, summary, tier=tier)


def burn_alerts(tiers: TierSet, models: Sequence[str] = ()) -> tuple[RuleGroup, list[str]]:
    """The alerts of all tiers of these models, or of all, and why some are left out."""
    alerts, left_out = [], []
    for tier in tiers.names:
        for alert in BURN_ALERTS:
            try:
                alerts.append(burn_alert(alert, tier, tiers[tier].target, models))
            except CannotFireError as error:
                left_out.append(str(error))
    return RuleGroup("slackserve-slo-alerts", "30s", (*alerts, _top_tier(tiers, models))), left_out


def _these(tier: Tier, models: Sequence[str]) -> str:
    """The matchers of a tier of these models, or of all."""
    if not models:
        return f'{{tier="{tier}"}}'
    return f'{{model=~{json.dumps("|".join(map(re.escape, models)))},tier="{tier}"}}'


def _top_tier(tiers: TierSet, models: Sequence[str]) -> Alert:
    """The top tier is not shed for anybody, so that it is looked after before its budget is used up."""
    half = (1.0 - tiers[tiers.top].target) / 2.0
    floor = math.ceil(MIN_MISSES / half - 1e-9)
    these = _these(tiers.top, models)
    return Alert(
        "SlackServeTopTierLow",
        f"{missed('1h')}{these} > {half:.6g}\nand {judged('1h')}{these} >= {floor}",
        Severity.TICKET,
        f"Less than {1.0 - half:.4g} of {tiers.top}'s requests to {{{{ $labels.model }}}} have met their "
        "objectives for an hour.",
        for_="10m",
        tier=tiers.top,
    )


def _windows(windows: tuple[str, ...]) -> Iterator[RecordingRule]:
    for window in windows:
        no = _judged(f"rate({{}}[{window}])", objective="all", met="no")
        every = _judged(f"rate({{}}[{window}])", objective="all")
        yield RecordingRule(missed(window), f"{no}\n/ {every}")
        yield RecordingRule(judged(window), _judged(f"increase({{}}[{window}])", objective="all"))


def _judged(of: str, **matchers: str) -> str:
    """Adapters share the budget of their model: one alone may have too little traffic to tell."""
    return served(SLO_JUDGED, of, "tier", **matchers)


_BUDGET: Final = RecordingRule(
    BUDGET_LEFT,
    f"1 - {missed(BUDGET_WINDOW)}\n/ on (model, tier) {MISSES_ALLOWED}",
)
