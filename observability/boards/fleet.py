"""How full the fleet is, how well it is predicted, and what of it has failed."""

from __future__ import annotations

from typing import Final

from observability.boards.queries import both_signs, in_window, now, quantiles, worst
from observability.causes import DECODE_PREEMPTIONS
from observability.grafana import RATE, Dashboard, Panel, PanelRow, Query, Unit
from telemetry.catalogue import (
    API_KEYS_UNREAD,
    BYTES_PER_TOKEN,
    CONTINUATIONS,
    CORRECTION,
    DECODE_PEAK,
    DECODE_RESERVE,
    DROPPED_EVENTS,
    ENGINES_ENDED,
    FIRST_TOKEN_ERROR,
    FLEET_BACKLOG,
    FLEET_LOAD,
    KV_USAGE,
    MONITOR_LOST,
    POLICY_APPLIED,
    PREDICTION_ERROR,
    PROMPT_LENGTH_ERROR,
    REPLACEMENTS,
    REPLICAS_USED,
    REPORTS_DROPPED,
    STREAM_RECOMPUTED,
    STREAM_RESTORE,
    STREAM_SKIPS,
    STREAMS_PREEMPTED,
    SUBSCRIBERS,
    SUBSCRIBERS_BEHIND,
    SWAP_USED,
    SWAPPED_BLOCKS,
    TTFT_PREDICTION_ERROR,
    TTFT_PREDICTION_RATIO,
)

_OFF: Final = {"positive": "too long", "negative": "too short"}

BOARD: Final = Dashboard(
    name="fleet",
    title="Fleet",
    rows=(
        PanelRow(
            "Load",
            (
                Panel(
                    "Load",
                    Unit.RATIO,
                    (worst(FLEET_LOAD, "model"),),
                    meaning="Prefill work that arrives, over what the fleet can do.",
                ),
                Panel("Backlog", Unit.SECONDS, (worst(FLEET_BACKLOG, "model", "tier"),)),
                Panel("KV blocks in use", Unit.RATIO, (now(KV_USAGE, "{{role}} {{replica}}"),)),
                Panel(
                    "KV memory taken from running requests by vLLM",
                    Unit.PER_MINUTE,
                    (
                        Query(
                            "60 * sum by (ReplicaId) "
                            f'(rate({DECODE_PREEMPTIONS}{{ReplicaId=~"$replica"}}[{RATE}]))',
                            "{{ReplicaId}}",
                        ),
                    ),
                ),
            ),
        ),
        PanelRow(
            "Decode under pressure",
            (
                Panel(
                    "Predicted peak of KV memory, and what is kept for the top tier",
                    Unit.RATIO,
                    (
                        now(DECODE_PEAK, "peak {{replica}}"),
                        now(DECODE_RESERVE, "kept {{replica}}"),
                    ),
                    meaning="Above 1 somebody will lose its memory.",
                ),
                Panel(
                    "Streams that lost their memory",
                    Unit.COUNT,
                    (in_window(STREAMS_PREEMPTED, "tier", "reason", "by"),),
                ),
                Panel("Until they had it again", Unit.SECONDS, quantiles(STREAM_RESTORE, "tier")),
                Panel(
                    "Tokens computed again, and left out of steps",
                    Unit.COUNT,
                    (in_window(STREAM_RECOMPUTED), in_window(STREAM_SKIPS)),
                ),
                Panel(
                    "KV blocks to host memory and back",
                    Unit.COUNT,
                    (in_window(SWAPPED_BLOCKS, "direction"),),
                ),
                Panel("Host memory for KV blocks in use", Unit.RATIO, (now(SWAP_USED, "{{replica}}"),)),
            ),
        ),
        PanelRow(
            "Replicas",
            (
                Panel(
                    "Processes that report, and replicas that the router uses",
                    Unit.COUNT,
                    (now(SUBSCRIBERS, "{{model}} {{role}}"), now(REPLICAS_USED, "{{model}} {{role}} used")),
                ),
                Panel("Prefills placed again", Unit.COUNT, (in_window(REPLACEMENTS, "cause", "outcome"),)),
                Panel(
                    "Answers that lost their decode replica",
                    Unit.COUNT,
                    (in_window(CONTINUATIONS, "cause", "outcome"),),
                ),
                Panel("Engines that ended", Unit.COUNT, (in_window(ENGINES_ENDED, "role", "cause"),)),
                Panel(
                    "Ingresses that cannot use the file of API keys",
                    Unit.COUNT,
                    (worst(API_KEYS_UNREAD, "replica"),),
                ),
                Panel(
                    "Out of the monitor's reach, or behind its policy",
                    Unit.COUNT,
                    (worst(MONITOR_LOST, "deployment"), now(SUBSCRIBERS_BEHIND, "{{model}} behind")),
                ),
                Panel("Policy that is followed", Unit.COUNT, (worst(POLICY_APPLIED, "deployment", "model"),)),
                Panel(
                    "Events that were lost on the way to metrics",
                    Unit.COUNT,
                    (in_window(DROPPED_EVENTS, "replica"), in_window(REPORTS_DROPPED)),
                ),
            ),
        ),
        PanelRow(
            "Predictions",
            (
                Panel(
                    "Prefill time, error", Unit.RATIO, (now(PREDICTION_ERROR, "{{replica}} {{statistic}}"),)
                ),
                Panel("Prefill time, correction", Unit.COUNT, (now(CORRECTION, "{{replica}}"),)),
                Panel(
                    "Time to first token, error",
                    Unit.RATIO,
                    (now(FIRST_TOKEN_ERROR, "{{model}} {{statistic}}"),),
                ),
                Panel(
                    "Time to first token, error, p95 of either side",
                    Unit.SECONDS,
                    both_signs(TTFT_PREDICTION_ERROR, "tier", names=_OFF),
                ),
                Panel(
                    "The same over what was measured",
                    Unit.RATIO,
                    both_signs(TTFT_PREDICTION_RATIO, "tier", names=_OFF),
                ),
                Panel(
                    "Length of prompts, error, p95 of either side",
                    Unit.RATIO,
                    both_signs(PROMPT_LENGTH_ERROR, names=_OFF),
                ),
                Panel("Bytes of a token", Unit.COUNT, (now(BYTES_PER_TOKEN, "{{model}}"),)),
            ),
        ),
    ),
)
