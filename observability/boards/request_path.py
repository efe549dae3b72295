"""Where the time of a request goes: placement, queue, prefill, transfer, decode."""

from __future__ import annotations

from typing import Final

from observability.boards.queries import (
    both_signs,
    fraction_below_zero,
    heat,
    in_window,
    now,
    per_second,
    quantiles,
    worst,
)
from observability.grafana import Dashboard, Panel, PanelRow, Query, Unit, View
from telemetry.catalogue import (
    DECISION,
    FIRST_TOKENS_RESAMPLED,
    FLEET_BACKLOG,
    KV_BYTES,
    KV_SECONDS,
    KV_TRANSFERS,
    LOCAL_PREFILLS,
    PLACEMENTS,
    PREFILL,
    PREFILL_OUTSTANDING,
    ROUTER_FALLBACKS,
    SLACK_AT_DISPATCH,
    SLACK_AT_FIRST_TOKEN,
    SLO_LATENCY,
    TPOT,
    TTFT,
)

_LEFT: Final = {"positive": "to spare", "negative": "late by"}

BOARD: Final = Dashboard(
    name="request_path",
    title="Request path",
    rows=(
        PanelRow(
            "What clients see, of streaming requests",
            (
                Panel("Time to first token", Unit.SECONDS, (heat(TTFT),), view=View.HEATMAP, width=12),
                Panel("Time per output token", Unit.SECONDS, (heat(TPOT),), view=View.HEATMAP, width=12),
                Panel("Time to first token", Unit.SECONDS, quantiles(TTFT, "tier")),
                Panel("Time per output token", Unit.SECONDS, quantiles(TPOT, "tier")),
                Panel(
                    "From arrival to end, by tenant",
                    Unit.SECONDS,
                    (now(SLO_LATENCY, "{{model}} {{tenant}} {{tier}} p{{quantile}}", latency="e2e"),),
                ),
            ),
        ),
        PanelRow(
            "Slack",
            (
                Panel(
                    "Slack when placed, p95 of either side",
                    Unit.SECONDS,
                    both_signs(SLACK_AT_DISPATCH, "tier", names=_LEFT),
                    meaning="Budget minus predicted time to first token.",
                ),
                Panel(
                    "Slack at the first token, p95 of either side",
                    Unit.SECONDS,
                    both_signs(SLACK_AT_FIRST_TOKEN, "tier", names=_LEFT),
                ),
                Panel(
                    "First tokens that were late",
                    Unit.RATIO,
                    (fraction_below_zero(SLACK_AT_FIRST_TOKEN, "tier"),),
                ),
            ),
        ),
        PanelRow(
            "Placement",
            (
                Panel("Why the replica was chosen", Unit.PER_SECOND, (per_second(PLACEMENTS, "reason"),)),
                Panel("Time to decide", Unit.SECONDS, quantiles(DECISION)),
                Panel("Placed without the router", Unit.COUNT, (in_window(ROUTER_FALLBACKS, "cause"),)),
            ),
        ),
        PanelRow(
            "Queue and prefill",
            (
                Panel("Backlog", Unit.SECONDS, (worst(FLEET_BACKLOG, "tier"),)),
                Panel("Prefills outstanding", Unit.COUNT, (worst(PREFILL_OUTSTANDING, "replica"),)),
                Panel("Prefill, queueing included", Unit.SECONDS, quantiles(PREFILL, "tier")),
                Panel("Prefilled by decode itself", Unit.COUNT, (in_window(LOCAL_PREFILLS, "reason"),)),
            ),
        ),
        PanelRow(
            "KV transfer",
            (
                Panel("One transfer", Unit.SECONDS, quantiles(KV_SECONDS)),
                Panel("Moved", Unit.BYTES_PER_SECOND, (per_second(KV_BYTES, "replica"),)),
                Panel("Transfers by result", Unit.COUNT, (in_window(KV_TRANSFERS, "result"),)),
                Panel(
                    "First tokens sampled again", Unit.COUNT, (in_window(FIRST_TOKENS_RESAMPLED, "reason"),)
                ),
            ),
        ),
        PanelRow(
            "Engines",
            (
                Panel(
                    "Requests that run",
                    Unit.COUNT,
                    (Query('ray_vllm_num_requests_running{ReplicaId=~"$replica"}', "{{ReplicaId}}"),),
                ),
                Panel(
                    "Requests that wait in the engine",
                    Unit.COUNT,
                    (Query('ray_vllm_num_requests_waiting{ReplicaId=~"$replica"}', "{{ReplicaId}}"),),
                ),
            ),
        ),
    ),
)
