"""Which tier keeps its promise, what is left of the error budgets, and what the policy does for them."""

from __future__ import annotations

from typing import Final

from observability.boards.queries import in_window, now, per_second
from observability.burn_rates import BUDGET_LEFT, MISSES_ALLOWED, missed
from observability.grafana import Dashboard, Panel, PanelRow, Query, Unit, View
from observability.promql import grown
from telemetry.catalogue import (
    POLICY_CHANGES,
    POLICY_MARGIN,
    POLICY_VERSION,
    REJECTIONS,
    REQUESTS,
    RESERVED,
    ROUTED,
    SHED_LEVEL,
    SLO_ATTAINMENT,
    SLO_BURN,
    SLO_BURN_IN_REACH,
    SLO_GOODPUT,
    SLO_HEADROOM,
    SLO_JUDGED,
    SLO_REQUESTS,
    SLO_SERIES_ATTAINMENT,
    SLO_TARGET,
)

_THESE: Final = '{model=~"$model",tier=~"$tier"}'


def _burn(window: str) -> Query:
    return Query(
        f"{missed(window)}{_THESE} / on (model, tier) {MISSES_ALLOWED}",
        f"{{{{model}}}} {{{{tier}}}} {window}",
    )


BOARD: Final = Dashboard(
    name="slo_overview",
    title="SLO overview",
    marks=(Query(f"{grown(POLICY_CHANGES, '2m', 'reason')} > 0", "{{reason}}"),),
    rows=(
        PanelRow(
            "Objectives",
            (
                Panel(
                    "Attainment and target",
                    Unit.RATIO,
                    (
                        Query(f"1 - {missed('5m')}{_THESE}", "{{model}} {{tier}}"),
                        now(SLO_TARGET, "{{model}} {{tier}} target"),
                    ),
                    meaning="The fraction of the requests of the last five minutes that met all objectives.",
                ),
                Panel(
                    "Error budget left, of 30 days",
                    Unit.RATIO,
                    (Query(f"{BUDGET_LEFT}{_THESE}", "{{model}} {{tier}}"),),
                    meaning="1 is untouched, 0 is used up, below 0 the target of the month is missed.",
                ),
                Panel(
                    "Burn rate by window",
                    Unit.COUNT,
                    tuple(_burn(window) for window in ("5m", "1h", "6h", "3d")),
                    meaning="1 uses the budget up in exactly 30 days; alerts begin at 14.4, 6, 3 and 1.",
                ),
                Panel(
                    "Attainment now",
                    Unit.RATIO,
                    (now(SLO_ATTAINMENT, "{{model}} {{tier}}", window="long"),),
                    view=View.NUMBERS,
                    meaning="Over the monitor's own long window.",
                ),
                Panel(
                    "Burn rate now",
                    Unit.COUNT,
                    (now(SLO_BURN, "{{model}} {{tier}} {{window}}"),),
                    meaning="Of all objectives, over the monitor's own windows.",
                ),
                Panel(
                    "Burn rate that the policy acts on",
                    Unit.COUNT,
                    (now(SLO_BURN_IN_REACH, "{{model}} {{tier}} {{window}}"),),
                    meaning=(
                        "Without objectives that nothing would keep, and without requests that failed. Where "
                        "it is below the burn rate now, requests ask for what the idle fleet cannot do, or "
                        "fail, and nothing is shed for them."
                    ),
                ),
                Panel(
                    "Headroom",
                    Unit.RATIO,
                    (now(SLO_HEADROOM, "{{model}} {{tier}}", window="long"),),
                    meaning="What is left of the budgets at the target's quantile; below 0 it is missed.",
                ),
                Panel(
                    "Missed, by objective",
                    Unit.PER_SECOND,
                    (per_second(SLO_JUDGED, "tier", "objective", met="no"),),
                ),
            ),
        ),
        PanelRow(
            "Requests",
            (
                Panel("Goodput", Unit.PER_SECOND, (now(SLO_GOODPUT, "{{model}} {{tier}}", window="short"),)),
                Panel("Requests by outcome", Unit.COUNT, (in_window(REQUESTS, "outcome"),)),
                Panel("Refusals by reason", Unit.COUNT, (in_window(REJECTIONS, "tier", "reason"),)),
                Panel("Decisions of the router", Unit.PER_SECOND, (per_second(ROUTED, "tier", "decision"),)),
                Panel(
                    "Requests by tenant", Unit.COUNT, (now(SLO_REQUESTS, "{{model}} {{tenant}} {{tier}}"),)
                ),
                Panel(
                    "Attainment by tenant",
                    Unit.RATIO,
                    (now(SLO_SERIES_ATTAINMENT, "{{model}} {{tenant}} {{tier}}"),),
                ),
            ),
        ),
        PanelRow(
            "Policy",
            (
                Panel("Shed", Unit.RATIO, (now(SHED_LEVEL, "{{model}} {{tier}}"),)),
                Panel(
                    "Reserved for the top tier, and the margin of preemption",
                    Unit.COUNT,
                    (now(RESERVED, "{{model}} reserved"), now(POLICY_MARGIN, "{{model}} margin")),
                ),
                Panel(
                    "Version, and changes by reason",
                    Unit.COUNT,
                    (now(POLICY_VERSION, "{{model}} version"), in_window(POLICY_CHANGES, "reason")),
                ),
            ),
        ),
    ),
)
