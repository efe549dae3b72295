"""The Serve deployment around the router's core.

Owns the clock, the metrics and the log lines; decides nothing itself. Off the token path: it answers a
question about a request and never sees the request's text or its tokens.
"""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, assert_never

from router.admission import Gate
from router.core import RouterCore
from router.fleet.decode_replica import DecodeView, KvLink
from router.fleet.prefill_replica import PrefillView
from router.fleet.view import RouterLimits
from router.messages import JobEnded, LiveJobs, Placed, PlacementDecision, PlacementRequested
from router.placement.registry import POLICIES
from slo.admission.controller import AdmissionController, AdmissionRules
from slo.admission.tenant_limits import TenantGates
from slo.autoscaling.need import FleetDemand, PrefillDemand
from slo.errors import Rejected
from slo.monitor.messages import Role, RouterSeen
from slo.monitor.policy import ClusterPolicy
from slo.replacement import Replaced, ReplacementDecision, ReplacementRequested
from slo.reports import DecodeReported, PrefillReported, ReplicaGone, Report, unsound
from slo.request import JobId
from slo.tiers import Tier, TierSet
from telemetry import catalogue, logs
from telemetry.instruments import Instruments
from telemetry.reporting import monitor_client
from telemetry.reporting.monitor_client import MonitorClient, Participant


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What the router is started with.

    Attributes:
        tiers: What each tier is promised.
        placement: A key of `router.placement.registry.POLICIES`.
        limits: How the router treats what it is told.
        admission: When the fleet is under pressure, and what is done about it.
        link: What KV moves over; None for a handoff that does not depend on the prompt's length.
        find_monitor: Finds the application's SLO monitor, and starts it when there is none; None without one.
    """

    tiers: TierSet
    placement: str
    limits: RouterLimits
    admission: AdmissionRules = field(default_factory=AdmissionRules)
    link: KvLink | None = None
    find_monitor: Callable[[], Any] | None = None

    def controller(self) -> AdmissionController:
        """Admission with nothing admitted yet."""
        draw = random.Random().random  # noqa: S311 - no secret
        return AdmissionController(self.tiers, self.admission, TenantGates({}), draw)


class SlackRouter:
    """Places requests, keeps the view of the fleet."""

    def __init__(self, config: RouterConfig) -> None:
        self._admission = config.controller()
        self._tier_names = config.tiers.names
        self._core = RouterCore(
            config.tiers,
            POLICIES[config.placement](random.Random().randrange),  # noqa: S311 - no secret
            config.limits,
            time.monotonic(),
            config.link,
            Gate(self._admission),
        )
        self._instruments = Instruments(
            catalogue.PLACEMENTS,
            catalogue.DECISION,
            catalogue.SLACK_AT_DISPATCH,
            catalogue.PROMPT_LENGTH_ERROR,
            catalogue.BYTES_PER_TOKEN,
            catalogue.FLEET_LOAD,
            catalogue.FLEET_BACKLOG,
            *monitor_client.METRICS,
        )
        self._monitor: MonitorClient | None = None
        if config.find_monitor is not None:
            participant = Participant(_reporter(), Role.ROUTER, self._seen, self.follow)
            self._monitor = MonitorClient(participant, self._instruments, config.find_monitor)

    async def place(self, request: PlacementRequested) -> PlacementDecision:
        """Decide on one request, and place nothing any more on a replica that was lost with it.

        A replica that has not failed after all says so with its next report.
        """
        started_s = time.monotonic()
        if request.lost_replica is not None:
            self._core.view.replica_gone(ReplicaGone(request.lost_replica))
        decision = self._core.place(request, started_s)
        self._instruments.observe(catalogue.DECISION, time.monotonic() - started_s)
        self._show_load(request.objective.tier, started_s)
        self._record(request.job_id, request.objective.tier, decision)
        return decision

    def _seen(self, events: tuple[tuple[Tier, PlacementDecision], ...]) -> RouterSeen:
        placed, refused = Counter[tuple["Tier", str]](), Counter[tuple["Tier", str]]()
        for tier, decision in events:
            counts = placed if isinstance(decision, Placed) else refused
            counts[tier, decision.reason.value] += 1
        now_s = time.monotonic()
        prefill = PrefillDemand(*self._admission.demand(now_s))
        return RouterSeen(placed, refused, FleetDemand(prefill, self._core.decode_demand(now_s)))

    def _show_load(self, tier: Tier, now_s: float) -> None:
        self._instruments.set(catalogue.FLEET_LOAD, self._admission.load(now_s))
        self._instruments.set(catalogue.FLEET_BACKLOG, self._admission.backlog_s(tier), tier=tier)

    def follow(self, policy: ClusterPolicy) -> None:
        """Shed and reserve by the cluster's policy from now on."""
        self._admission.follow(policy.shed, policy.reserved)

    async def replace(self, request: ReplacementRequested) -> ReplacementDecision:
        """Find another place for a prefill."""
        decision = await self.place(PlacementRequested.again(request))
        if isinstance(decision, Placed):
            return Replaced(decision.prefill_replica, decision.handoff_s)
        return decision

    async def job_ended(self, ended: JobEnded) -> None:
        """Forget a request that is over."""
        self._core.job_ended(ended, time.monotonic())

    async def not_for_prefill(self, job_id: JobId) -> None:
        """Hear from a decode replica that it computes a prompt itself."""
        self._core.not_for_prefill(job_id)

    async def reconcile(self, live: LiveJobs) -> None:
        """Hear from an ingress which of its requests have not ended."""
        self._core.reconcile(live, time.monotonic())

    async def report(self, report: Report) -> None:
        """Hear from a replica."""
        if self._monitor is not None:
            self._monitor.start()
        if (why := unsound(report)) is not None:
            # Its replica falls silent to the router, and is not used: better than decisions by such numbers.
            logs.event("report_refused", level=logging.ERROR, replica=report.replica_id, why=why)
            return
        match report:
            case PrefillReported():
                for error in self._core.prefill_reported(report, time.monotonic()):
                    self._instruments.observe(catalogue.PROMPT_LENGTH_ERROR, error)
                if report.learned:
                    self._instruments.set(
                        catalogue.BYTES_PER_TOKEN, self._core.view.prompt_length.bytes_per_token
                    )
            case DecodeReported():
                self._core.view.decode_reported(report, time.monotonic())
            case ReplicaGone():
                self._core.view.replica_gone(report)
            case _:
                assert_never(report)

    def _record(self, job_id: JobId, tier: Tier, decision: PlacementDecision) -> None:
        match decision:
            case Placed():
                event = "request_placed"
                self._instruments.count(catalogue.PLACEMENTS, tier=tier, reason=decision.reason.value)
                if decision.ttft_budget_s is not None and decision.predicted_ttft_s is not None:
                    self._instruments.observe(catalogue.SLACK_AT_DISPATCH, decision.slack_s, tier=tier)
            case Rejected():
                event = "request_rejected"
            case _:
                assert_never(decision)
        if self._monitor is not None:
            self._monitor.note((tier, decision))
        logs.event(event, job_id=job_id, tier=tier, **asdict(decision))

    async def fleet(self) -> dict[str, Any]:
        """The state of the fleet as plain data: readiness, and each replica's load."""
        now_s = time.monotonic()
        return {
            "ready": self._core.is_ready(now_s),
            "monitored": self._monitor is not None,
            "tiers": list(self._tier_names),
            "bytes_per_token": self._core.view.prompt_length.bytes_per_token,
            "prompt_length_error": self._core.view.prompt_length.error,
            "prefill": [_prefill_state(replica, now_s) for replica in self._core.view.prefill.values()],
            "decode": [_decode_state(replica, now_s) for replica in self._core.view.decode.values()],
        }


def _reporter() -> str:
    """A name of this router's own; the one that replaces it has another."""
    return f"router-{uuid.uuid4().hex[:8]}"


def _prefill_state(replica: PrefillView, now_s: float) -> dict[str, Any]:
    return {
        "replica": replica.replica_id,
        "outstanding": len(replica.jobs),
        "outstanding_tokens": replica.outstanding_tokens,
        "backlog_s": replica.backlog_s(now_s),
        "kv_usage": replica.kv_usage,
        "reported_s_ago": now_s - replica.reported_at_s,
        "draining": replica.draining,
        "per_token_s": replica.predictor.per_token_s,
        "per_pair_s": replica.predictor.per_pair_s,
        "fixed_s": replica.predictor.fixed_s,
        "handoff_s": replica.predictor.handoff_s,
    }


def _decode_state(replica: DecodeView, now_s: float) -> dict[str, Any]:
    return {
        "replica": replica.replica_id,
        "running": replica.running,
        "kv_usage": replica.kv_usage,
        "reported_s_ago": now_s - replica.reported_at_s,
        "draining": replica.draining,
    }
