"""Every metric that SlackServe exports: name, unit, labels, meaning.

The one place where a metric is defined; `docs/metrics.md` is checked against it. Ray prefixes the names
with `ray_` on export and adds its own labels (replica, node). Labels are bounded: no request ids, no
model-chosen strings.

Ray's histograms take positive values only, so a quantity that can be negative is recorded as its magnitude
with the label `sign`, "positive" or "negative".
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class MetricKind(enum.StrEnum):
    """What sort of instrument a metric is."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported metric.

    `buckets` are the upper bounds of a histogram; one with the label `sign` takes negative values, which are
    recorded by magnitude.
    """

    name: str
    kind: MetricKind
    unit: str
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()


_LATENCY_S: Final = (
    0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 0.8, 1.2, 2.0, 3.0, 5.0, 8.0, 15.0,
    30.0, 60.0, 120.0, 300.0, 900.0, 3600.0, 14400.0,
)  # fmt: skip
_DECISION_S: Final = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)
_RATIO: Final = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)


def _counter(name: str, unit: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.COUNTER, unit, labels, meaning)


def _gauge(name: str, unit: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.GAUGE, unit, labels, meaning)


def _histogram(
    name: str, meaning: str, *labels: str, unit: str = "seconds", buckets: tuple[float, ...] = _LATENCY_S
) -> Metric:
    return Metric(name, MetricKind.HISTOGRAM, unit, labels, meaning, buckets)


REQUESTS: Final = _counter(
    "slackserve_requests", "requests", "Requests by how they ended.", "model", "tier", "outcome"
)
REJECTIONS: Final = _counter(
    "slackserve_rejections", "requests",
    "Requests refused before they were queued, by the `code` of the error answer.",
    "model", "tier", "reason",
)  # fmt: skip
TTFT: Final = _histogram(
    "slackserve_ttft_seconds",
    "From the arrival of a streaming request at the ingress to its first chunk.", "model", "tier",
)  # fmt: skip
TPOT: Final = _histogram(
    "slackserve_tpot_seconds",
    "Mean time between the tokens after the first, per streaming request.",
    "model",
    "tier",
)
SLACK_AT_DISPATCH: Final = _histogram(
    "slackserve_slack_at_dispatch_seconds",
    "Budget minus predicted TTFT when a request was placed.", "model", "tier", "sign",
)  # fmt: skip
SLACK_AT_FIRST_TOKEN: Final = _histogram(
    "slackserve_slack_at_first_token_seconds", "Budget minus measured TTFT.", "model", "tier", "sign"
)
TTFT_PREDICTION_ERROR: Final = _histogram(
    "slackserve_ttft_prediction_error_seconds", "Predicted minus measured TTFT.", "model", "tier", "sign"
)
TTFT_PREDICTION_RATIO: Final = _histogram(
    "slackserve_ttft_prediction_error_ratio",
    "Predicted minus measured TTFT, over the measured.", "model", "tier", "sign",
    unit="ratio", buckets=_RATIO,
)  # fmt: skip
ROUTER_FALLBACKS: Final = _counter(
    "slackserve_router_fallbacks", "requests",
    "Requests that the ingress placed without the router, by cause.", "cause",
)  # fmt: skip
PLACEMENTS: Final = _counter(
    "slackserve_placements", "requests",
    "Placements by the router, by why the prefill replica was chosen.", "model", "tier", "reason",
)  # fmt: skip
DECISION: Final = _histogram(
    "slackserve_router_decision_seconds",
    "Time that the router takes to decide on one request.", buckets=_DECISION_S,
)  # fmt: skip
FLEET_LOAD: Final = _gauge(
    "slackserve_fleet_load_ratio", "ratio",
    "Prefill work that arrives per second, over what the fleet can do in a second.", "model",
)  # fmt: skip
FLEET_BACKLOG: Final = _gauge(
    "slackserve_fleet_backlog_seconds", "seconds",
    "Predicted prefill work that was admitted and is not done.", "model", "tier",
)  # fmt: skip
PROMPT_LENGTH_ERROR: Final = _histogram(
    "slackserve_prompt_length_error_ratio",
    "Estimated minus actual prompt tokens, over the actual.", "model", "sign", unit="ratio", buckets=_RATIO,
)  # fmt: skip
BYTES_PER_TOKEN: Final = _gauge(
    "slackserve_prompt_bytes_per_token", "bytes", "Bytes of text for each token of prompts.", "model"
)
PREFILL: Final = _histogram(
    "slackserve_prefill_seconds",
    "From the arrival of a request at a prefill replica to the end of its prefill, queueing included.",
    "tier",
)  # fmt: skip
PREFILL_OUTSTANDING: Final = _gauge(
    "slackserve_prefill_outstanding", "requests", "Prefills accepted and not ended, by replica."
)
LOCAL_PREFILLS: Final = _counter(
    "slackserve_local_prefills", "requests",
    "Requests that the decode tier prefilled itself, by what kept them off the prefill tier.", "reason",
)  # fmt: skip
FIRST_TOKENS_RESAMPLED: Final = _counter(
    "slackserve_first_tokens_resampled", "requests",
    "Requests whose first token decode sampled again, by what kept prefill's from being carried.", "reason",
)  # fmt: skip
ENGINES_ENDED: Final = _counter(
    "slackserve_engines_ended", "engines",
    "Engines that ended while they served: failed, hung and killed for it, or because a rank stayed away "
    "from a vote. The router counts them, as a replica's own counts end with it.", "model", "role", "cause",
)  # fmt: skip
REPLACEMENTS: Final = _counter(
    "slackserve_replacements", "requests",
    "Prefills that failed before their KV was pulled, by cause, and where they were placed again or why not.",
    "cause", "outcome",
)  # fmt: skip
CONTINUATIONS: Final = _counter(
    "slackserve_continuations", "requests",
    "Requests whose decode replica failed, by cause, and how they went on elsewhere or why not.",
    "cause", "outcome",
)  # fmt: skip
KV_BYTES: Final = _counter(
    "slackserve_kv_transfer_bytes", "bytes", "KV cache pulled over NIXL, counted by the connector."
)
KV_TRANSFERS: Final = _counter(
    "slackserve_kv_transfers", "transfers",
    "NIXL transfers by result; those of a replica's ranks for one request are one.", "result",
)  # fmt: skip
KV_SECONDS: Final = _histogram("slackserve_kv_transfer_seconds", "Duration of one NIXL transfer.")
KV_USAGE: Final = _gauge(
    "slackserve_kv_usage_ratio", "ratio", "Fraction of a replica's KV blocks in use.", "role"
)
STREAMS_PREEMPTED: Final = _counter(
    "slackserve_decode_preemptions", "requests",
    "Streams whose KV memory a decode replica under pressure took, or that it dropped, by why they could be "
    "chosen and what became of their KV.",
    "tier", "reason", "by",
)  # fmt: skip
STREAM_RESTORE: Final = _histogram(
    "slackserve_decode_restore_seconds",
    "From the loss of its KV memory until a stream has its KV again.", "tier",
)  # fmt: skip
STREAM_RECOMPUTED: Final = _counter(
    "slackserve_decode_recomputed_tokens", "tokens",
    "Tokens that a decode replica computed again for streams whose KV memory it had taken.",
)  # fmt: skip
SWAPPED_BLOCKS: Final = _counter(
    "slackserve_decode_swapped_blocks", "blocks",
    "KV blocks that a decode replica under pressure moved to host memory, and back.",
    "direction",
)  # fmt: skip
SWAP_USED: Final = _gauge(
    "slackserve_decode_swap_ratio", "ratio",
    "Part of a decode replica's host memory for KV blocks that is in use.",
)  # fmt: skip
STREAM_SKIPS: Final = _counter(
    "slackserve_decode_skipped_tokens", "tokens",
    "Tokens that steps left out, so that streams in danger of missing their TPOT objective keep it.",
)  # fmt: skip
DECODE_PEAK: Final = _gauge(
    "slackserve_decode_predicted_peak_ratio", "ratio",
    "The most KV memory that a decode replica's streams are predicted to take, over what it has.",
)  # fmt: skip
DECODE_RESERVE: Final = _gauge(
    "slackserve_decode_reserve_ratio", "ratio",
    "Part of a decode replica's KV memory that is kept for the top tier.",
)  # fmt: skip
PREEMPTIONS: Final = _counter(
    "slackserve_preemptions", "steps",
    "Running prefill steps that were stopped, by what happens to their work and why they were stopped.",
    "outcome", "reason",
)  # fmt: skip
PREEMPTION_REFUSALS: Final = _counter(
    "slackserve_preemption_refusals", "decisions",
    "Decisions of the governor to let the running step go on, by the rule that decided.", "reason",
)  # fmt: skip
PREEMPTION_ARRIVAL_TO_STOP: Final = _histogram(
    "slackserve_preemption_arrival_to_stop_seconds",
    "From the arrival of a request at a prefill replica to the stop of the step that it preempts.",
)  # fmt: skip
PREEMPTION_ORDER_TO_STOP: Final = _histogram(
    "slackserve_preemption_order_to_stop_seconds", "From the governor's order to the stop of the step."
)
PREEMPTION_STOP_TO_SERVICE: Final = _histogram(
    "slackserve_preemption_stop_to_service_seconds",
    "From the stop of a step to the first operator of the request that preempted it.",
)  # fmt: skip
PREEMPTION_RESUME_OVERHEAD: Final = _histogram(
    "slackserve_preemption_resume_overhead_seconds",
    "From the issue of a resumed step to its first operator: the work that each suspension adds.",
)  # fmt: skip
PREEMPTION_AVAILABLE: Final = _gauge(
    "slackserve_preemption_available", "ratio",
    "1 when running prefills of a replica can be stopped, 0 when it serves without preemption.",
)  # fmt: skip
SUSPENDED_SECONDS: Final = _histogram(
    "slackserve_prefill_suspended_seconds", "How long a step was suspended, each time."
)
SUSPENDED_STEPS: Final = _gauge("slackserve_prefill_suspended_steps", "steps", "Steps that are suspended.")
SUSPENDED_BYTES: Final = _gauge(
    "slackserve_prefill_suspended_bytes", "bytes",
    "Memory that the checkpoints of suspended steps take beside KV blocks, on each rank.",
)  # fmt: skip
WORK_WASTED: Final = _counter(
    "slackserve_prefill_work_wasted_seconds", "seconds",
    "Predicted seconds of prefill that were done and will not be used.", "reason",
)  # fmt: skip
VOTES: Final = _counter(
    "slackserve_votes", "votes", "Votes of a replica's ranks on whether to stop, one at each boundary."
)
DROPPED_EVENTS: Final = _counter(
    "slackserve_dropped_events", "events",
    "Events of the engine's scheduler that the replica was too slow to read; what they say is not counted.",
)  # fmt: skip
GOVERNOR_DECISION: Final = _histogram(
    "slackserve_governor_decision_seconds",
    "Time that the governor takes to decide whether a running step is preempted.", buckets=_DECISION_S,
)  # fmt: skip
API_KEYS_UNREAD: Final = _gauge(
    "slackserve_api_keys_unread", "ratio", "1 while an ingress cannot use the file of API keys, else 0."
)
MONITOR_LOST: Final = _gauge(
    "slackserve_monitor_lost", "ratio",
    "1 while a process does not reach the SLO monitor, whose policy holds for a minute then, else 0.",
    "model",
)  # fmt: skip
POLICY_APPLIED: Final = _gauge(
    "slackserve_policy_applied", "version",
    "The version of the cluster's policy that a process follows; 0 for the configured one.", "model",
)  # fmt: skip
DIRECTIVES: Final = _counter(
    "slackserve_directives", "directives",
    "The monitor's orders to stop a running prefill, by what the replica made of them.", "outcome",
)  # fmt: skip

ALL: Final = tuple(each for each in globals().values() if isinstance(each, Metric))
"""The metrics above: what the processes that serve record."""

_SERIES: Final = ("model", "tier", "tenant")

SLO_TARGET: Final = _gauge(
    "slackserve_slo_target_ratio", "ratio",
    "The fraction of requests that shall meet their objectives.", "model", "tier",
)  # fmt: skip
SLO_JUDGED: Final = _counter(
    "slackserve_slo_judged", "requests",
    "Requests that were judged, refused ones included, by whether they met the objective; `all` is all their "
    "objectives together.",
    "model", "served", "tier", "objective", "met",
)  # fmt: skip
SLO_ATTAINMENT: Final = _gauge(
    "slackserve_slo_attainment_ratio", "ratio",
    "The fraction of requests that met all their objectives; absent without any.", "model", "tier", "window",
)  # fmt: skip
SLO_BURN: Final = _gauge(
    "slackserve_slo_burn_rate", "ratio",
    "The fraction that missed an objective over the fraction that may.", "model", "tier", "window",
)  # fmt: skip
SLO_BURN_IN_REACH: Final = _gauge(
    "slackserve_slo_burn_rate_in_reach", "ratio",
    "The same without objectives that a request would miss with the fleet to itself, and without those that "
    "failed: the policy acts on it.",
    "model", "tier", "window",
)  # fmt: skip
SLO_GOODPUT: Final = _gauge(
    "slackserve_slo_goodput", "requests per second",
    "Requests that were finished without missing an objective.", "model", "tier", "window",
)  # fmt: skip
SLO_HEADROOM: Final = _gauge(
    "slackserve_slo_headroom_ratio", "ratio",
    "What is left of the budgets at the target's quantile; negative when they are exceeded.",
    "model", "tier", "window",
)  # fmt: skip
SLO_REQUESTS: Final = _gauge(
    "slackserve_slo_requests", "requests", "Requests that ended in the long window.", *_SERIES
)
SLO_SERIES_ATTAINMENT: Final = _gauge(
    "slackserve_slo_series_attainment_ratio", "ratio",
    "The same as `slackserve_slo_attainment_ratio`, by model, tier and tenant, over the long window.",
    *_SERIES,
)  # fmt: skip
SLO_LATENCY: Final = _gauge(
    "slackserve_slo_latency_seconds", "seconds",
    "Quantiles of what was measured in the long window, within one per cent.",
    *_SERIES, "latency", "quantile",
)  # fmt: skip
POLICY_VERSION: Final = _gauge(
    "slackserve_policy_version", "version", "The version of the cluster's policy.", "model"
)
SHED_LEVEL: Final = _gauge(
    "slackserve_policy_shed_ratio", "ratio",
    "The fraction to turn away of what a tier asks for above its share.", "model", "tier",
)  # fmt: skip
RESERVED: Final = _gauge(
    "slackserve_policy_reserved_ratio", "ratio",
    "The fraction of the prefill tier's time that is kept free for the top tier.", "model",
)  # fmt: skip
POLICY_MARGIN: Final = _gauge("slackserve_policy_margin", "ratio", "The margin of preemption.", "model")
POLICY_CHANGES: Final = _counter(
    "slackserve_policy_changes", "policies",
    "Changes of shed levels and of the reservation, by why.", "model", "reason",
)  # fmt: skip
CORRECTION: Final = _gauge(
    "slackserve_prediction_correction_ratio", "ratio",
    "How many times as long as a prefill replica's own predictor says a prefill takes there.", "replica",
)  # fmt: skip
PREDICTION_ERROR: Final = _gauge(
    "slackserve_prediction_error_ratio", "ratio",
    "Absolute error of the predicted times of forward passes, over the measured times.",
    "replica", "statistic",
)  # fmt: skip
FIRST_TOKEN_ERROR: Final = _gauge(
    "slackserve_monitor_ttft_error_ratio", "ratio",
    "Absolute error of the predicted times to first token, over the measured times, of the latest requests.",
    "model", "statistic",
)  # fmt: skip
ROUTED: Final = _counter(
    "slackserve_monitor_placements", "requests",
    "Decisions of the router that the monitor has heard of: `placed`, or `refused`.",
    "model", "tier", "decision",
)  # fmt: skip
SUBSCRIBERS: Final = _gauge(
    "slackserve_monitor_subscribers", "processes", "Processes that report.", "model", "role"
)
REPLICAS_USED: Final = _gauge(
    "slackserve_monitor_replicas", "replicas",
    "Replicas that the router uses, whatever code they run.", "model", "role",
)  # fmt: skip
SUBSCRIBERS_BEHIND: Final = _gauge(
    "slackserve_monitor_subscribers_behind",
    "processes",
    "Those of them that follow an older policy.",
    "model",
)
DIRECTED: Final = _counter(
    "slackserve_monitor_directives",
    "directives",
    "Orders to stop a running prefill, by why.",
    "model",
    "reason",
)
REPORTS_DROPPED: Final = _counter(
    "slackserve_monitor_dropped", "events",
    "Events that reporters had to leave out because the monitor had not taken the ones before.", "model",
)  # fmt: skip

MONITOR: Final = tuple(each for each in globals().values() if isinstance(each, Metric) and each not in ALL)
"""The metrics between `ALL` and here: what the SLO monitor exports itself, under these very names."""
