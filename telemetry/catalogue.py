"""Every metric that SlackServe exports: name, unit, labels, meaning.

The one place where a metric is defined; `docs/metrics.md` is checked against it. Ray prefixes the names
with `ray_` on export and adds its own labels (replica, node). Labels are bounded: no request ids, no
model-chosen strings.

`MONITOR` is what the SLO monitor exports itself, under these very names.

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
    """One exported metric; `buckets` are the upper bounds of a histogram, `sign` labels a signed one."""

    name: str
    kind: MetricKind
    unit: str
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()


_LATENCY_S: Final = (
    0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 0.8, 1.2, 2.0, 3.0, 5.0, 8.0, 15.0,
    30.0, 60.0, 120.0,
)  # fmt: skip
_DECISION_S: Final = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)
_RATIO: Final = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)

REQUESTS: Final = Metric(
    "slackserve_requests", MetricKind.COUNTER, "requests", ("tier", "outcome"), "Requests by how they ended."
)
REJECTIONS: Final = Metric(
    "slackserve_rejections", MetricKind.COUNTER, "requests", ("tier", "reason"),
    "Requests refused before they were queued, by the `code` of the error answer.",
)  # fmt: skip
TTFT: Final = Metric(
    "slackserve_ttft_seconds", MetricKind.HISTOGRAM, "seconds", ("tier",),
    "From the arrival of a streaming request at the ingress to its first chunk.", _LATENCY_S,
)  # fmt: skip
TPOT: Final = Metric(
    "slackserve_tpot_seconds", MetricKind.HISTOGRAM, "seconds", ("tier",),
    "Mean time between the tokens after the first, per streaming request.", _LATENCY_S,
)  # fmt: skip
ATTAINED: Final = Metric(
    "slackserve_objectives", MetricKind.COUNTER, "objectives", ("tier", "objective", "attained"),
    "Objectives (`ttft`, `tpot`) of streaming requests, by whether they were met (`yes`, `no`).",
)  # fmt: skip
SLACK_AT_DISPATCH: Final = Metric(
    "slackserve_slack_at_dispatch_seconds", MetricKind.HISTOGRAM, "seconds", ("tier", "sign"),
    "Budget minus predicted TTFT when a request was placed.", _LATENCY_S,
)  # fmt: skip
SLACK_AT_FIRST_TOKEN: Final = Metric(
    "slackserve_slack_at_first_token_seconds", MetricKind.HISTOGRAM, "seconds", ("tier", "sign"),
    "Budget minus measured TTFT.", _LATENCY_S,
)  # fmt: skip
TTFT_PREDICTION_ERROR: Final = Metric(
    "slackserve_ttft_prediction_error_seconds", MetricKind.HISTOGRAM, "seconds", ("tier", "sign"),
    "Predicted minus measured TTFT.", _LATENCY_S,
)  # fmt: skip
TTFT_PREDICTION_RATIO: Final = Metric(
    "slackserve_ttft_prediction_error_ratio", MetricKind.HISTOGRAM, "ratio", ("tier", "sign"),
    "Predicted minus measured TTFT, over the measured.", _RATIO,
)  # fmt: skip
ROUTER_FALLBACKS: Final = Metric(
    "slackserve_router_fallbacks", MetricKind.COUNTER, "requests", ("cause",),
    "Requests that the ingress placed without the router, by cause.",
)  # fmt: skip
PLACEMENTS: Final = Metric(
    "slackserve_placements", MetricKind.COUNTER, "requests", ("tier", "reason"),
    "Placements by the router, by why the prefill replica was chosen.",
)  # fmt: skip
DECISION: Final = Metric(
    "slackserve_router_decision_seconds", MetricKind.HISTOGRAM, "seconds", (),
    "Time that the router takes to decide on one request.", _DECISION_S,
)  # fmt: skip
FLEET_LOAD: Final = Metric(
    "slackserve_fleet_load_ratio", MetricKind.GAUGE, "ratio", (),
    "Prefill work that arrives per second, over what the fleet can do in a second.",
)  # fmt: skip
FLEET_BACKLOG: Final = Metric(
    "slackserve_fleet_backlog_seconds", MetricKind.GAUGE, "seconds", ("tier",),
    "Predicted prefill work that was admitted and is not done.",
)  # fmt: skip
PROMPT_LENGTH_ERROR: Final = Metric(
    "slackserve_prompt_length_error_ratio", MetricKind.HISTOGRAM, "ratio", ("sign",),
    "Estimated minus actual prompt tokens, over the actual.", _RATIO,
)  # fmt: skip
BYTES_PER_TOKEN: Final = Metric(
    "slackserve_prompt_bytes_per_token",
    MetricKind.GAUGE,
    "bytes",
    (),
    "The ratio that prompt lengths are estimated with.",
)
PREFILL: Final = Metric(
    "slackserve_prefill_seconds", MetricKind.HISTOGRAM, "seconds", ("tier",),
    "From the arrival of a request at a prefill replica to the end of its prefill, queueing included.",
    _LATENCY_S,
)  # fmt: skip
PREFILL_OUTSTANDING: Final = Metric(
    "slackserve_prefill_outstanding",
    MetricKind.GAUGE,
    "requests",
    (),
    "Prefills accepted and not ended, by replica.",
)
LOCAL_PREFILLS: Final = Metric(
    "slackserve_local_prefills", MetricKind.COUNTER, "requests", ("reason",),
    "Requests that the decode tier prefilled itself, by what kept them off the prefill tier.",
)  # fmt: skip
REPLACEMENTS: Final = Metric(
    "slackserve_replacements", MetricKind.COUNTER, "requests", ("cause", "outcome"),
    "Prefills that failed before the first token, by cause, and by where they were placed again, or why not.",
)  # fmt: skip
KV_BYTES: Final = Metric(
    "slackserve_kv_transfer_bytes",
    MetricKind.COUNTER,
    "bytes",
    (),
    "KV cache pulled over NIXL, counted by the connector.",
)
KV_TRANSFERS: Final = Metric(
    "slackserve_kv_transfers", MetricKind.COUNTER, "transfers", ("result",), "NIXL transfers by result."
)
KV_SECONDS: Final = Metric(
    "slackserve_kv_transfer_seconds",
    MetricKind.HISTOGRAM,
    "seconds",
    (),
    "Duration of one NIXL transfer.",
    _LATENCY_S,
)
KV_USAGE: Final = Metric(
    "slackserve_kv_usage_ratio",
    MetricKind.GAUGE,
    "ratio",
    ("role",),
    "Fraction of a replica's KV blocks in use.",
)
PREEMPTIONS: Final = Metric(
    "slackserve_preemptions", MetricKind.COUNTER, "steps", ("outcome", "reason"),
    "Running prefill steps that were stopped, by what happens to their work and why they were stopped.",
)  # fmt: skip
PREEMPTION_REFUSALS: Final = Metric(
    "slackserve_preemption_refusals", MetricKind.COUNTER, "decisions", ("reason",),
    "Decisions of the governor to let the running step go on, by the rule that decided.",
)  # fmt: skip
PREEMPTION_ARRIVAL_TO_STOP: Final = Metric(
    "slackserve_preemption_arrival_to_stop_seconds", MetricKind.HISTOGRAM, "seconds", (),
    "From the arrival of a request at a prefill replica to the stop of the step that it preempts.",
    _LATENCY_S,
)  # fmt: skip
PREEMPTION_ORDER_TO_STOP: Final = Metric(
    "slackserve_preemption_order_to_stop_seconds", MetricKind.HISTOGRAM, "seconds", (),
    "From the governor's order to the stop of the step.", _LATENCY_S,
)  # fmt: skip
PREEMPTION_STOP_TO_SERVICE: Final = Metric(
    "slackserve_preemption_stop_to_service_seconds", MetricKind.HISTOGRAM, "seconds", (),
    "From the stop of a step to the first operator of the request that preempted it.", _LATENCY_S,
)  # fmt: skip
PREEMPTION_RESUME_OVERHEAD: Final = Metric(
    "slackserve_preemption_resume_overhead_seconds", MetricKind.HISTOGRAM, "seconds", (),
    "From the issue of a resumed step to its first operator: the work that each suspension adds.", _LATENCY_S,
)  # fmt: skip
PREEMPTION_AVAILABLE: Final = Metric(
    "slackserve_preemption_available", MetricKind.GAUGE, "ratio", (),
    "1 when running prefills of a replica can be stopped, 0 when it serves without preemption.",
)  # fmt: skip
SUSPENDED_SECONDS: Final = Metric(
    "slackserve_prefill_suspended_seconds", MetricKind.HISTOGRAM, "seconds", (),
    "How long a step was suspended, each time.", _LATENCY_S,
)  # fmt: skip
SUSPENDED_STEPS: Final = Metric(
    "slackserve_prefill_suspended_steps", MetricKind.GAUGE, "steps", (), "Steps that are suspended."
)
SUSPENDED_BYTES: Final = Metric(
    "slackserve_prefill_suspended_bytes", MetricKind.GAUGE, "bytes", (),
    "Memory that the checkpoints of suspended steps take, on each rank.",
)  # fmt: skip
WORK_WASTED: Final = Metric(
    "slackserve_prefill_work_wasted_seconds", MetricKind.COUNTER, "seconds", ("reason",),
    "Predicted seconds of prefill that were done and will not be used.",
)  # fmt: skip
VOTES: Final = Metric(
    "slackserve_votes", MetricKind.COUNTER, "votes", (),
    "Votes of a replica's ranks on whether to stop, one at each boundary.",
)  # fmt: skip
VOTE_TIMEOUTS: Final = Metric(
    "slackserve_vote_timeouts", MetricKind.COUNTER, "votes", (),
    "Votes that a rank did not finish because another stayed away; the engine fails after it.",
)  # fmt: skip
DROPPED_EVENTS: Final = Metric(
    "slackserve_dropped_events", MetricKind.COUNTER, "events", (),
    "Events of the engine's scheduler that the replica was too slow to read; what they say is not counted.",
)  # fmt: skip
GOVERNOR_DECISION: Final = Metric(
    "slackserve_governor_decision_seconds", MetricKind.HISTOGRAM, "seconds", (),
    "Time that the governor takes to decide whether a running step is preempted.", _DECISION_S,
)  # fmt: skip

MONITOR_LOST: Final = Metric(
    "slackserve_monitor_lost", MetricKind.GAUGE, "ratio", (),
    "1 while a process does not reach the SLO monitor and keeps the last policy, else 0.",
)  # fmt: skip
POLICY_APPLIED: Final = Metric(
    "slackserve_policy_applied", MetricKind.GAUGE, "version", (),
    "The version of the cluster's policy that a process follows; 0 for the configured one.",
)  # fmt: skip
DIRECTIVES: Final = Metric(
    "slackserve_directives", MetricKind.COUNTER, "directives", ("outcome",),
    "The monitor's orders to stop a running prefill, by what the replica made of them.",
)  # fmt: skip

ALL: Final = (
    REQUESTS, REJECTIONS, TTFT, TPOT, ATTAINED, SLACK_AT_DISPATCH, SLACK_AT_FIRST_TOKEN,
    TTFT_PREDICTION_ERROR, TTFT_PREDICTION_RATIO, ROUTER_FALLBACKS, PLACEMENTS, DECISION, FLEET_LOAD,
    FLEET_BACKLOG, PROMPT_LENGTH_ERROR, BYTES_PER_TOKEN,
    PREFILL, PREFILL_OUTSTANDING, LOCAL_PREFILLS, REPLACEMENTS, KV_BYTES, KV_TRANSFERS, KV_SECONDS, KV_USAGE,
    PREEMPTIONS, PREEMPTION_REFUSALS, PREEMPTION_ARRIVAL_TO_STOP, PREEMPTION_ORDER_TO_STOP,
    PREEMPTION_STOP_TO_SERVICE, PREEMPTION_RESUME_OVERHEAD, PREEMPTION_AVAILABLE, SUSPENDED_SECONDS,
    SUSPENDED_STEPS, SUSPENDED_BYTES, WORK_WASTED, VOTES, VOTE_TIMEOUTS, DROPPED_EVENTS, GOVERNOR_DECISION,
    MONITOR_LOST, POLICY_APPLIED, DIRECTIVES,
)  # fmt: skip

_SERIES: Final = ("model", "tier", "tenant")

SLO_TARGET: Final = Metric(
    "slackserve_slo_target_ratio", MetricKind.GAUGE, "ratio", ("tier",),
    "The fraction of requests that shall meet their objectives.",
)  # fmt: skip
SLO_ATTAINMENT: Final = Metric(
    "slackserve_slo_attainment_ratio", MetricKind.GAUGE, "ratio", ("tier", "window"),
    "The fraction of requests that met all their objectives; absent without any.",
)  # fmt: skip
SLO_BURN: Final = Metric(
    "slackserve_slo_burn_rate", MetricKind.GAUGE, "ratio", ("tier", "window"),
    "The fraction that missed an objective over the fraction that may.",
)  # fmt: skip
SLO_GOODPUT: Final = Metric(
    "slackserve_slo_goodput", MetricKind.GAUGE, "requests per second", ("tier", "window"),
    "Requests that were finished without missing an objective.",
)  # fmt: skip
SLO_HEADROOM: Final = Metric(
    "slackserve_slo_headroom_ratio", MetricKind.GAUGE, "ratio", ("tier", "window"),
    "What is left of the budgets at the target's quantile; negative when they are exceeded.",
)  # fmt: skip
SLO_REQUESTS: Final = Metric(
    "slackserve_slo_requests",
    MetricKind.GAUGE,
    "requests",
    _SERIES,
    "Requests that ended in the long window.",
)
SLO_SERIES_ATTAINMENT: Final = Metric(
    "slackserve_slo_series_attainment_ratio", MetricKind.GAUGE, "ratio", _SERIES,
    "The same as `slackserve_slo_attainment_ratio`, by model, tier and tenant, over the long window.",
)  # fmt: skip
SLO_LATENCY: Final = Metric(
    "slackserve_slo_latency_seconds", MetricKind.GAUGE, "seconds", (*_SERIES, "latency", "quantile"),
    "Quantiles of what was measured in the long window, within one per cent.",
)  # fmt: skip
POLICY_VERSION: Final = Metric(
    "slackserve_policy_version", MetricKind.GAUGE, "version", (), "The version of the cluster's policy."
)
SHED_LEVEL: Final = Metric(
    "slackserve_policy_shed_ratio",
    MetricKind.GAUGE,
    "ratio",
    ("tier",),
    "The fraction of requests to turn away.",
)
RESERVED: Final = Metric(
    "slackserve_policy_reserved_ratio", MetricKind.GAUGE, "ratio", (),
    "The fraction of the prefill tier's time that is kept free for the top tier.",
)  # fmt: skip
POLICY_MARGIN: Final = Metric(
    "slackserve_policy_margin", MetricKind.GAUGE, "ratio", (), "The margin of preemption."
)
POLICY_CHANGES: Final = Metric(
    "slackserve_policy_changes", MetricKind.COUNTER, "policies", ("reason",),
    "Changes of shed levels and of the reservation, by why.",
)  # fmt: skip
CORRECTION: Final = Metric(
    "slackserve_prediction_correction_ratio", MetricKind.GAUGE, "ratio", ("replica",),
    "How many times as long as a prefill replica's own predictor says a prefill takes there.",
)  # fmt: skip
PREDICTION_ERROR: Final = Metric(
    "slackserve_prediction_error_ratio", MetricKind.GAUGE, "ratio", ("replica", "statistic"),
    "Absolute error of the predicted times of forward passes, over the measured times.",
)  # fmt: skip
FIRST_TOKEN_ERROR: Final = Metric(
    "slackserve_monitor_ttft_error_ratio", MetricKind.GAUGE, "ratio", ("statistic",),
    "Absolute error of the predicted times to first token, over the measured times, of the latest requests.",
)  # fmt: skip
ROUTED: Final = Metric(
    "slackserve_monitor_placements", MetricKind.COUNTER, "requests", ("tier", "decision"),
    "Decisions of the router that the monitor has heard of: `placed`, or `refused`.",
)  # fmt: skip
SUBSCRIBERS: Final = Metric(
    "slackserve_monitor_subscribers", MetricKind.GAUGE, "processes", ("role",), "Processes that report."
)
SUBSCRIBERS_BEHIND: Final = Metric(
    "slackserve_monitor_subscribers_behind", MetricKind.GAUGE, "processes", (),
    "Those of them that follow an older policy.",
)  # fmt: skip
DIRECTED: Final = Metric(
    "slackserve_monitor_directives", MetricKind.COUNTER, "directives", ("reason",),
    "Orders to stop a running prefill, by why.",
)  # fmt: skip
REPORTS_DROPPED: Final = Metric(
    "slackserve_monitor_dropped", MetricKind.COUNTER, "events", (),
    "Events that reporters had to leave out because the monitor had not taken the ones before.",
)  # fmt: skip

MONITOR: Final = (
    SLO_TARGET, SLO_ATTAINMENT, SLO_BURN, SLO_GOODPUT, SLO_HEADROOM, SLO_REQUESTS, SLO_SERIES_ATTAINMENT,
    SLO_LATENCY, POLICY_VERSION, SHED_LEVEL, RESERVED, POLICY_MARGIN, POLICY_CHANGES, CORRECTION,
    PREDICTION_ERROR, FIRST_TOKEN_ERROR, ROUTED, SUBSCRIBERS, SUBSCRIBERS_BEHIND, DIRECTED, REPORTS_DROPPED,
)  # fmt: skip
