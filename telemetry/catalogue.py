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


class Kind(enum.StrEnum):
    """What sort of instrument a metric is."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported metric; `buckets` are the upper bounds of a histogram, `sign` labels a signed one."""

    name: str
    kind: Kind
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
    "slackserve_requests", Kind.COUNTER, "requests", ("tier", "outcome"), "Requests by how they ended."
)
REJECTIONS: Final = Metric(
    "slackserve_rejections", Kind.COUNTER, "requests", ("tier", "reason"),
    "Requests refused before they were queued, by the `code` of the error answer.",
)  # fmt: skip
TTFT: Final = Metric(
    "slackserve_ttft_seconds", Kind.HISTOGRAM, "seconds", ("tier",),
    "From the arrival of a streaming request at the ingress to its first chunk.", _LATENCY_S,
)  # fmt: skip
TPOT: Final = Metric(
    "slackserve_tpot_seconds", Kind.HISTOGRAM, "seconds", ("tier",),
    "Mean time between the tokens after the first, per streaming request.", _LATENCY_S,
)  # fmt: skip
ATTAINED: Final = Metric(
    "slackserve_objectives", Kind.COUNTER, "objectives", ("tier", "objective", "attained"),
    "Objectives (`ttft`, `tpot`) of streaming requests, by whether they were met (`yes`, `no`).",
)  # fmt: skip
SLACK_AT_DISPATCH: Final = Metric(
    "slackserve_slack_at_dispatch_seconds", Kind.HISTOGRAM, "seconds", ("tier", "sign"),
    "Budget minus predicted TTFT when a request was placed.", _LATENCY_S,
)  # fmt: skip
SLACK_AT_FIRST_TOKEN: Final = Metric(
    "slackserve_slack_at_first_token_seconds", Kind.HISTOGRAM, "seconds", ("tier", "sign"),
    "Budget minus measured TTFT.", _LATENCY_S,
)  # fmt: skip
TTFT_PREDICTION_ERROR: Final = Metric(
    "slackserve_ttft_prediction_error_seconds", Kind.HISTOGRAM, "seconds", ("tier", "sign"),
    "Predicted minus measured TTFT.", _LATENCY_S,
)  # fmt: skip
TTFT_PREDICTION_RATIO: Final = Metric(
    "slackserve_ttft_prediction_error_ratio", Kind.HISTOGRAM, "ratio", ("tier", "sign"),
    "Predicted minus measured TTFT, over the measured.", _RATIO,
)  # fmt: skip
ROUTER_FALLBACKS: Final = Metric(
    "slackserve_router_fallbacks", Kind.COUNTER, "requests", ("cause",),
    "Requests that the ingress placed without the router, by cause.",
)  # fmt: skip
PLACEMENTS: Final = Metric(
    "slackserve_placements", Kind.COUNTER, "requests", ("tier", "reason"),
    "Placements by the router, by why the prefill replica was chosen.",
)  # fmt: skip
DECISION: Final = Metric(
    "slackserve_router_decision_seconds", Kind.HISTOGRAM, "seconds", (),
    "Time that the router takes to decide on one request.", _DECISION_S,
)  # fmt: skip
FLEET_LOAD: Final = Metric(
    "slackserve_fleet_load_ratio", Kind.GAUGE, "ratio", (),
    "Prefill work that arrives per second, over what the fleet can do in a second.",
)  # fmt: skip
FLEET_BACKLOG: Final = Metric(
    "slackserve_fleet_backlog_seconds", Kind.GAUGE, "seconds", ("tier",),
    "Predicted prefill work that was let in and is not done.",
)  # fmt: skip
HELD: Final = Metric(
    "slackserve_router_held", Kind.GAUGE, "requests", (),
    "Requests that the router holds back until a replica can start them.",
)  # fmt: skip
PROMPT_LENGTH_ERROR: Final = Metric(
    "slackserve_prompt_length_error_ratio", Kind.HISTOGRAM, "ratio", ("sign",),
    "Estimated minus actual prompt tokens, over the actual.", _RATIO,
)  # fmt: skip
BYTES_PER_TOKEN: Final = Metric(
    "slackserve_prompt_bytes_per_token",
    Kind.GAUGE,
    "bytes",
    (),
    "The ratio that prompt lengths are estimated with.",
)
PREFILL: Final = Metric(
    "slackserve_prefill_seconds", Kind.HISTOGRAM, "seconds", ("tier",),
    "From the arrival of a request at a prefill replica to the end of its prefill, queueing included.",
    _LATENCY_S,
)  # fmt: skip
PREFILL_OUTSTANDING: Final = Metric(
    "slackserve_prefill_outstanding",
    Kind.GAUGE,
    "requests",
    (),
    "Prefills accepted and not ended, by replica.",
)
LOCAL_PREFILLS: Final = Metric(
    "slackserve_local_prefills", Kind.COUNTER, "requests", ("reason",),
    "Requests that the decode tier prefilled itself, by what kept them off the prefill tier.",
)  # fmt: skip
KV_BYTES: Final = Metric(
    "slackserve_kv_transfer_bytes",
    Kind.COUNTER,
    "bytes",
    (),
    "KV cache pulled over NIXL, counted by the connector.",
)
KV_TRANSFERS: Final = Metric(
    "slackserve_kv_transfers", Kind.COUNTER, "transfers", ("result",), "NIXL transfers by result."
)
KV_SECONDS: Final = Metric(
    "slackserve_kv_transfer_seconds",
    Kind.HISTOGRAM,
    "seconds",
    (),
    "Duration of one NIXL transfer.",
    _LATENCY_S,
)
KV_USAGE: Final = Metric(
    "slackserve_kv_usage_ratio", Kind.GAUGE, "ratio", ("role",), "Fraction of a replica's KV blocks in use."
)
PREEMPTIONS: Final = Metric(
    "slackserve_preemptions", Kind.COUNTER, "steps", ("outcome", "reason"),
    "Running prefill steps that were stopped, by what became of their work and why they were stopped.",
)  # fmt: skip
PREEMPTION_REFUSALS: Final = Metric(
    "slackserve_preemption_refusals", Kind.COUNTER, "decisions", ("reason",),
    "Decisions of the governor to let the running step go on, by the rule that decided.",
)  # fmt: skip
PREEMPTION_ARRIVAL_TO_STOP: Final = Metric(
    "slackserve_preemption_arrival_to_stop_seconds", Kind.HISTOGRAM, "seconds", (),
    "From the arrival of a request at a prefill replica to the stop of the step that makes way for it.",
    _LATENCY_S,
)  # fmt: skip
PREEMPTION_ORDER_TO_STOP: Final = Metric(
    "slackserve_preemption_order_to_stop_seconds", Kind.HISTOGRAM, "seconds", (),
    "From the governor's order to the stop of the step.", _LATENCY_S,
)  # fmt: skip
PREEMPTION_STOP_TO_SERVICE: Final = Metric(
    "slackserve_preemption_stop_to_service_seconds", Kind.HISTOGRAM, "seconds", (),
    "From the stop of a step to the first operator of the request that it made way for.", _LATENCY_S,
)  # fmt: skip
PREEMPTION_RESUME_OVERHEAD: Final = Metric(
    "slackserve_preemption_resume_overhead_seconds", Kind.HISTOGRAM, "seconds", (),
    "From the issue of a resumed step to its first operator: the work that each suspension adds.", _LATENCY_S,
)  # fmt: skip
PREEMPTION_AVAILABLE: Final = Metric(
    "slackserve_preemption_available", Kind.GAUGE, "ratio", (),
    "1 when running prefills of a replica can be stopped, 0 when it serves without preemption.",
)  # fmt: skip
SUSPENDED_SECONDS: Final = Metric(
    "slackserve_prefill_suspended_seconds", Kind.HISTOGRAM, "seconds", (),
    "How long a step was suspended, each time.", _LATENCY_S,
)  # fmt: skip
SUSPENDED_STEPS: Final = Metric(
    "slackserve_prefill_suspended_steps", Kind.GAUGE, "steps", (), "Steps that are suspended."
)
SUSPENDED_BYTES: Final = Metric(
    "slackserve_prefill_suspended_bytes", Kind.GAUGE, "bytes", (),
    "Memory that the checkpoints of suspended steps take, on each rank.",
)  # fmt: skip
WORK_LOST: Final = Metric(
    "slackserve_prefill_work_lost_seconds", Kind.COUNTER, "seconds", ("reason",),
    "Predicted seconds of prefill that were done and will not be used.",
)  # fmt: skip
VOTES: Final = Metric(
    "slackserve_votes", Kind.COUNTER, "votes", (),
    "Votes of a replica's ranks on whether to stop, one at each boundary.",
)  # fmt: skip
VOTE_TIMEOUTS: Final = Metric(
    "slackserve_vote_timeouts", Kind.COUNTER, "votes", (),
    "Votes that a rank gave up because another stayed away; the engine fails after it.",
)  # fmt: skip
GOVERNOR_DECISION: Final = Metric(
    "slackserve_governor_decision_seconds", Kind.HISTOGRAM, "seconds", (),
    "Time that the governor takes to decide whether a running step makes way.", _DECISION_S,
)  # fmt: skip

ALL: Final = (
    REQUESTS, REJECTIONS, TTFT, TPOT, ATTAINED, SLACK_AT_DISPATCH, SLACK_AT_FIRST_TOKEN,
    TTFT_PREDICTION_ERROR, TTFT_PREDICTION_RATIO, ROUTER_FALLBACKS, PLACEMENTS, DECISION, HELD, FLEET_LOAD,
    FLEET_BACKLOG, PROMPT_LENGTH_ERROR, BYTES_PER_TOKEN,
    PREFILL, PREFILL_OUTSTANDING, LOCAL_PREFILLS, KV_BYTES, KV_TRANSFERS, KV_SECONDS, KV_USAGE,
    PREEMPTIONS, PREEMPTION_REFUSALS, PREEMPTION_ARRIVAL_TO_STOP, PREEMPTION_ORDER_TO_STOP,
    PREEMPTION_STOP_TO_SERVICE, PREEMPTION_RESUME_OVERHEAD, PREEMPTION_AVAILABLE, SUSPENDED_SECONDS,
    SUSPENDED_STEPS, SUSPENDED_BYTES, WORK_LOST, VOTES, VOTE_TIMEOUTS, GOVERNOR_DECISION,
)  # fmt: skip
