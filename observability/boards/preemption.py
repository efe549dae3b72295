"""Who was stopped for whom, how fast, and what it cost."""

from __future__ import annotations

from typing import Final

from observability.boards.queries import in_window, now, quantiles
from observability.grafana import Dashboard, Panel, PanelRow, Unit
from telemetry.catalogue import (
    DIRECTED,
    DIRECTIVES,
    GOVERNOR_DECISION,
    PREEMPTION_ARRIVAL_TO_STOP,
    PREEMPTION_AVAILABLE,
    PREEMPTION_ORDER_TO_STOP,
    PREEMPTION_REFUSALS,
    PREEMPTION_RESUME_OVERHEAD,
    PREEMPTION_STOP_TO_SERVICE,
    PREEMPTIONS,
    SUSPENDED_BYTES,
    SUSPENDED_SECONDS,
    SUSPENDED_STEPS,
    VOTES,
    WORK_WASTED,
)

BOARD: Final = Dashboard(
    name="preemption",
    title="Preemption",
    rows=(
        PanelRow(
            "Stops",
            (
                Panel(
                    "Running prefills that were stopped",
                    Unit.COUNT,
                    (in_window(PREEMPTIONS, "outcome", "reason"),),
                    meaning="In each interval that is drawn; `kept` loses no work.",
                ),
                Panel("Left running, by the rule", Unit.COUNT, (in_window(PREEMPTION_REFUSALS, "reason"),)),
                Panel(
                    "Work that was wasted",
                    Unit.SECONDS,
                    (in_window(WORK_WASTED, "replica", "reason"),),
                    meaning="Of prefill, in each interval that is drawn.",
                ),
            ),
        ),
        PanelRow(
            "How fast",
            (
                Panel("From order to stop", Unit.SECONDS, quantiles(PREEMPTION_ORDER_TO_STOP)),
                Panel("From arrival to stop", Unit.SECONDS, quantiles(PREEMPTION_ARRIVAL_TO_STOP)),
                Panel("From stop to service", Unit.SECONDS, quantiles(PREEMPTION_STOP_TO_SERVICE)),
                Panel("What resuming adds", Unit.SECONDS, quantiles(PREEMPTION_RESUME_OVERHEAD)),
                Panel("The governor's decision", Unit.SECONDS, quantiles(GOVERNOR_DECISION)),
                Panel("Votes", Unit.COUNT, (in_window(VOTES, "replica"),)),
            ),
        ),
        PanelRow(
            "Suspended",
            (
                Panel("Steps", Unit.COUNT, (now(SUSPENDED_STEPS, "{{replica}}"),)),
                Panel("Checkpoints", Unit.BYTES, (now(SUSPENDED_BYTES, "{{replica}}"),)),
                Panel("How long, each time", Unit.SECONDS, quantiles(SUSPENDED_SECONDS)),
            ),
        ),
        PanelRow(
            "Availability and directives",
            (
                Panel("Can be stopped", Unit.COUNT, (now(PREEMPTION_AVAILABLE, "{{replica}}"),)),
                Panel("Ordered by the monitor", Unit.COUNT, (in_window(DIRECTED, "reason"),)),
                Panel("What replicas made of it", Unit.COUNT, (in_window(DIRECTIVES, "outcome"),)),
            ),
        ),
    ),
)
