"""Alerts on causes: what makes requests late, or will."""

from __future__ import annotations

from typing import Final

from observability.promql import exported, grown, growth, named_served, select, served
from observability.rule_groups import Alert, RuleGroup, Severity
from telemetry.catalogue import (
    API_KEYS_UNREAD,
    ENGINES_ENDED,
    FLEET_LOAD,
    KV_TRANSFERS,
    KV_USAGE,
    MONITOR_LOST,
    PREDICTION_ERROR,
    PREEMPTION_AVAILABLE,
    PREEMPTIONS,
    REPLICAS_USED,
    REQUESTS,
    ROUTER_FALLBACKS,
    SLO_JUDGED,
    STREAMS_PREEMPTED,
    SUBSCRIBERS,
    WORK_WASTED,
)

MAX_STOPS_PER_MIN: Final = 20
MAX_WASTED: Final = 0.05
"""Of a prefill replica's time."""
MAX_LOST_TRANSFERS: Final = 0.01
MIN_LOST_TRANSFERS: Final = 5
MAX_FALLBACKS: Final = 0.01
MIN_FALLBACKS: Final = 5
MAX_PREDICTION_ERROR: Final = 0.5

DECODE_PREEMPTIONS: Final = "ray_vllm_num_preemptions_total"
"""vLLM's own, labelled `ReplicaId` where ours are labelled `replica`. It counts no stream that leaves."""
_ROUTER: Final = "Router"
"""The name of its deployment."""
_OF_ALL_MONITORS: Final = "max by (model, ray_io_cluster)"
"""One that is replaced has the series of another process, and nobody reports to that of old code any more."""
_OF_DECODE: Final = f'label_replace({select(KV_USAGE, role="decode")}, "ReplicaId", "$1", "replica", "(.*)")'
_TAKEN: Final = grown(STREAMS_PREEMPTED, "5m", "replica", by="~swap|reprefill|recompute")
_TAKEN_UNDER_PRESSURE: Final = (
    f'sum by (ReplicaId) (label_replace({_TAKEN}, "ReplicaId", "$1", "replica", "(.*)"))'
)


def cause_alerts() -> RuleGroup:
    """All of them."""
    # Not those whose series had no label `served` then: after an upgrade an adapter's are another model's.
    were_judged = f"group by (model) ({named_served(SLO_JUDGED, '{} offset 1h')})"
    fallbacks = grown(ROUTER_FALLBACKS, "10m")
    lost = grown(KV_TRANSFERS, "10m", "result", result="~failed|expired")
    return RuleGroup(
        "slackserve-causes",
        "30s",
        (
            Alert(
                "SlackServeSliAbsent",
                f"absent({exported(SLO_JUDGED)})\n"
                # What another deployment's monitor exports says nothing of this one's.
                f"or ({were_judged} or group by (model) ({exported(MONITOR_LOST)}))\n"
                f"unless {served(SLO_JUDGED, '{}')}",
                Severity.PAGE,
                "Nobody counts how objectives are met{{ with $labels.model }} by {{ . }}{{ end }}; the "
                "alerts on error budgets cannot fire.",
                for_="5m",
            ),
            Alert(
                "SlackServeMonitorLost",
                f"max by (deployment) ({exported(MONITOR_LOST)}) > 0",
                Severity.TICKET,
                "{{ $labels.deployment }} does not reach the SLO monitor and goes by what is configured: it "
                "sheds and corrects nothing.",
                for_="5m",
            ),
            Alert(
                "SlackServeApiKeysUnread",
                f"max by (replica) ({exported(API_KEYS_UNREAD)}) > 0",
                Severity.TICKET,
                "{{ $labels.replica }} cannot use the file of API keys: it goes by old ones or, without any, "
                "does not start.",
                for_="2m",
            ),
            Alert(
                "SlackServeOverload",
                f"max by (model) ({exported(FLEET_LOAD)}) > 1",
                Severity.TICKET,
                "More prefill work arrives for {{ $labels.model }} than its replicas can do: "
                "{{ $value | humanizePercentage }} of it.",
                for_="10m",
            ),
            Alert(
                "SlackServePrefillLost",
                # Of one cluster: while a RayService is upgraded, the new one's are not there yet.
                f"{_unheard('prefill')}\nand {_reporting('decode')} > 0",
                Severity.TICKET,
                "No prefill replica of {{ $labels.model }} reports; decode computes the prompts, if it may.",
                for_="2m",
            ),
            _lost(
                "SlackServeDecodeLost",
                "decode",
                "No decode replica of {{ $labels.model }} reports: nobody answers its requests.",
            ),
            _lost(
                "SlackServeIngressLost",
                "ingress",
                "No ingress of {{ $labels.model }} reports: no request reaches it, and none is judged.",
            ),
            Alert(
                "SlackServeManyStops",
                f"{grown(PREEMPTIONS, '5m', 'replica')} / 5 > {MAX_STOPS_PER_MIN}",
                Severity.TICKET,
                "{{ $labels.replica }} stops running prefills {{ $value | humanize }} times a minute.",
                for_="5m",
            ),
            Alert(
                "SlackServeWastedWork",
                f"{grown(WORK_WASTED, '10m', 'replica')} / 600 > {MAX_WASTED}",
                Severity.TICKET,
                "{{ $labels.replica }} throws {{ $value | humanizePercentage }} of its prefill time away.",
                for_="5m",
            ),
            Alert(
                "SlackServePreemptionUnavailable",
                f"min by (replica) ({exported(PREEMPTION_AVAILABLE)}) == 0",
                Severity.TICKET,
                "{{ $labels.replica }} serves without preemption.",
                for_="5m",
            ),
            Alert(
                "SlackServeEngineEnded",
                f"{grown(ENGINES_ENDED, '10m', 'model', 'role', 'cause')} > 0",
                Severity.TICKET,
                "A {{ $labels.role }} engine of {{ $labels.model }} has ended: {{ $labels.cause }}. Serve "
                "replaces it; the router's log names the replica.",
            ),
            Alert(
                "SlackServeDecodePreemptions",
                f"sum by (ReplicaId) ({growth(DECODE_PREEMPTIONS, '5m')}) / 5 > {MAX_STOPS_PER_MIN}\n"
                f"and on (ReplicaId) {_OF_DECODE}\n"
                f"or {_TAKEN_UNDER_PRESSURE} / 5 > {MAX_STOPS_PER_MIN}",
                Severity.TICKET,
                "{{ $labels.ReplicaId }} takes KV memory from {{ $value | humanize }} requests a minute.",
                for_="5m",
            ),
            Alert(
                "SlackServeStreamsDropped",
                f"{grown(STREAMS_PREEMPTED, '10m', 'replica', 'tier', by='drop')} > 0",
                Severity.TICKET,
                "{{ $labels.replica }} has ended {{ $value | humanize }} streams of {{ $labels.tier }} in 10 "
                "minutes for want of KV memory.",
            ),
            Alert(
                "SlackServeKvTransfersLost",
                f"{lost}\n/ on () group_left () {grown(KV_TRANSFERS, '10m')} > {MAX_LOST_TRANSFERS}\n"
                f"and {lost} > {MIN_LOST_TRANSFERS}",
                Severity.TICKET,
                "{{ $value | humanizePercentage }} of the NIXL transfers of the last 10 minutes have "
                "{{ $labels.result }}.",
            ),
            Alert(
                "SlackServeRouterFallbacks",
                f"{fallbacks}\n/ {grown(REQUESTS, '10m')} > {MAX_FALLBACKS}\n"
                f"and {fallbacks} >= {MIN_FALLBACKS}",
                Severity.TICKET,
                "{{ $value | humanizePercentage }} of the requests were placed without the router.",
            ),
            Alert(
                "SlackServePredictionsOff",
                f"{select(PREDICTION_ERROR, statistic='mape')} > {MAX_PREDICTION_ERROR}",
                Severity.TICKET,
                "Predicted prefill times of {{ $labels.replica }} are {{ $value | humanizePercentage }} off.",
                for_="15m",
            ),
        ),
    )


def _unheard(role: str) -> str:
    """Nobody of a role reports, and the router uses none that reports to a monitor of other code.

    Nor does the router itself report to that one: then nobody says here what it uses.
    """
    reporting = _reporting(role)
    if role == "ingress":
        return f"{reporting} == 0"
    used = f"{_OF_ALL_MONITORS} ({select(REPLICAS_USED, role=role)})"
    reaches_one = f"min by (model, ray_io_cluster) ({select(MONITOR_LOST, deployment=_ROUTER)}) == 0"
    return f"{reporting} == 0\nunless {used} > 0\nunless ({_reporting('router')} == 0 and {reaches_one})"


def _reporting(role: str) -> str:
    """How many processes of a role report."""
    return f"{_OF_ALL_MONITORS} ({select(SUBSCRIBERS, role=role)})"


def _lost(name: str, role: str, summary: str) -> Alert:
    """Nobody is left of a role without which nothing is answered, and of which there was somebody.

    In a deployment that comes up there is nobody yet, for as long as a model takes to load. A cluster without
    a router beside another one that has the role is drained: its successor answers.
    """
    reporting = select(SUBSCRIBERS, role=role)
    return Alert(
        name,
        f"{_unheard(role)}\n"
        f"and {_OF_ALL_MONITORS} (max_over_time({reporting}[1d])) > 0\n"
        f"unless ({_reporting('router')} == 0 and on (model) max by (model) ({reporting}) > 0)",
        Severity.PAGE,
        summary,
        for_="2m",
    )
