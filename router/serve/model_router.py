"""What the router does for one model: its fleet, its admission and its word to the monitor.

Owns the clock, the metrics and the log lines; decides nothing itself. Models share nothing but what a tenant
may have of all of them together.
"""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, assert_never

from router.admission import Gate
from router.core import RouterCore
from router.fleet.decode_replica import DecodeView
from router.fleet.prefill_replica import PrefillView
from router.fleet.view import RouterLimits
from router.messages import JobEnded, LiveJobs, Placed, PlacementDecision, PlacementRequested
from router.placement.registry import POLICIES
from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRules
from slo.admission.tenant_limits import TenantGates
from slo.autoscaling.need import FleetDemand, PrefillDemand
from slo.errors import Rejected, RejectionReason
from slo.monitor.messages import Role, RouterSeen
from slo.monitor.policy import ClusterPolicy
from slo.predict.handoff import TransferFit
from slo.reports import DecodeReported, PrefillReported, ReplicaGone, Report, unsound
from slo.request import JobId, ReplicaId
from slo.tiers import Tier, TierSet
from telemetry import catalogue, logs
from telemetry.instruments import Instruments
from telemetry.reporting import monitor_client
from telemetry.reporting.monitor_client import MonitorClient, Participant

METRICS: Final = (
    catalogue.PLACEMENTS,
    catalogue.DECISION,
    catalogue.SLACK_AT_DISPATCH,
    catalogue.PROMPT_LENGTH_ERROR,
    catalogue.BYTES_PER_TOKEN,
    catalogue.FLEET_LOAD,
    catalogue.FLEET_BACKLOG,
    catalogue.ENGINES_ENDED,
    *monitor_client.METRICS,
)


@dataclass(frozen=True, slots=True)
class Route:
    """What is one model's own.

    Attributes:
        link: What its KV moves over; None for a handoff that does not depend on the prompt's length.
        local_below_tokens: As `RouterLimits.local_below_tokens`.
        longest: As `RouterLimits.longest`.
    """

    link: TransferFit | None = None
    local_below_tokens: int = 0
    longest: int | None = None


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What the router is started with.

    Attributes:
        tiers: What each tier is promised.
        placement: A key of `router.placement.registry.POLICIES`.
        limits: How the router treats what it is told.
        admission: When a model's fleet is under pressure, and what is done about it.
        models: What is served, by name.
        find_monitor: Finds the application's SLO monitor, and starts it when there is none; None without one.
    """

    tiers: TierSet
    placement: str
    limits: RouterLimits
    models: Mapping[str, Route]
    admission: AdmissionRules = field(default_factory=AdmissionRules)
    find_monitor: Callable[[], Any] | None = None


class ModelRouter:
    """Places one model's requests, keeps the view of its fleet.

    Args:
        model: A key of the configuration's `models`.
        config: Of the router.
        tenants: What each tenant may have of all models together.
        instruments: Have `METRICS`.
    """

    def __init__(
        self, model: str, config: RouterConfig, tenants: TenantGates, instruments: Instruments
    ) -> None:
        draw = random.Random().random  # noqa: S311 - no secret
        route = config.models[model]
        self._model = model
        self._admission = AdmissionController(config.tiers, config.admission, tenants, draw)
        self._tiers = config.tiers
        self._core = RouterCore(
            config.tiers,
            POLICIES[config.placement](random.Random().randrange),  # noqa: S311 - no secret
            replace(config.limits, local_below_tokens=route.local_below_tokens, longest=route.longest),
            time.monotonic(),
            route.link,
            Gate(self._admission),
        )
        self._instruments = instruments
        self._ended = set[ReplicaId]()
        self._monitor: MonitorClient | None = None
        if config.find_monitor is not None:
            participant = Participant(_reporter(), Role.ROUTER, self._seen, self.follow, model=model)
            self._monitor = MonitorClient(participant, instruments, config.find_monitor)

    def place(self, request: PlacementRequested) -> PlacementDecision:
        """See `SlackRouter.place`."""
        started_s = time.monotonic()
        if request.objective.tier not in self._tiers:  # its ingress is of another configuration
            lowest = replace(request.objective, tier=self._tiers.lowest)
            request = replace(request, objective=lowest)
        if request.lost_replica is not None:
            self._core.replica_gone(ReplicaGone(request.lost_replica), started_s)
        decision = self._core.place(request, started_s)
        self._instruments.observe(catalogue.DECISION, time.monotonic() - started_s)
        self._show_load((request.objective.tier,), started_s)
        self._record(request, decision)
        return decision

    def _seen(self, events: tuple[tuple[Tier, PlacementDecision], ...]) -> RouterSeen:
        placed, refused = Counter[tuple["Tier", str]](), Counter[tuple["Tier", str]]()
        for tier, decision in events:
            counts = placed if isinstance(decision, Placed) else refused
            counts[tier, decision.reason.value] += 1
        now_s = time.monotonic()
        admission, decode = self._admission, self._core.decode_demand(now_s)
        admission.decode.sees(decode)
        prefill = PrefillDemand(
            *admission.demand(now_s),
            capacity=admission.capacity,
            refused=admission.refused_work(now_s),
            replicas=len(self._core.view.usable_prefill(now_s)),
        )
        account = admission.decode
        decode = replace(decode, asked=account.replicas_asked(now_s), refused=account.replicas_refused(now_s))
        return RouterSeen(placed, refused, FleetDemand(prefill, decode))

    def _show_load(self, tiers: Iterable[Tier], now_s: float) -> None:
        self._instruments.set(catalogue.FLEET_LOAD, self._admission.shown_load(now_s), model=self._model)
        for tier in tiers:
            backlog_s = self._admission.backlog_s(tier)
            self._instruments.set(catalogue.FLEET_BACKLOG, backlog_s, model=self._model, tier=tier)

    def follow(self, policy: ClusterPolicy) -> None:
        """Shed and reserve by the cluster's policy from now on."""
        self._admission.follow(policy.shed, policy.reserved)

    def job_ended(self, ended: JobEnded) -> None:
        """See `SlackRouter.job_ended`."""
        self._core.job_ended(ended, time.monotonic())

    def generated(self, job_id: JobId, tokens: int) -> None:
        """See `SlackRouter.generated`."""
        self._core.generated(job_id, tokens, time.monotonic())

    def not_for_prefill(self, job_id: JobId) -> None:
        """See `SlackRouter.not_for_prefill`."""
        self._core.not_for_prefill(job_id)

    def held_up(self, job_id: JobId) -> None:
        """See `SlackRouter.held_up`."""
        self._core.held_up(job_id)

    def reconcile(self, live: LiveJobs) -> None:
        """See `SlackRouter.reconcile`."""
        self._core.reconcile(live, time.monotonic())
        for ended in live.ended:
            self.job_ended(ended)

    def report(self, report: Report) -> None:
        """See `SlackRouter.report`."""
        if self._monitor is not None:
            self._monitor.start()
        if (why := unsound(report)) is not None:
            # Its replica falls silent to the router, and is not used: better than decisions by such numbers.
            logs.event("report_refused", level=logging.ERROR, replica=report.replica_id, why=why)
            return
        match report:
            case PrefillReported():
                for error in self._core.prefill_reported(report, time.monotonic()):
                    self._instruments.observe(catalogue.PROMPT_LENGTH_ERROR, error, model=self._model)
                self._instruments.set(
                    catalogue.BYTES_PER_TOKEN,
                    self._core.view.prompt_length.bytes_per_token,
                    model=self._model,
                )
            case DecodeReported():
                self._core.view.decode_reported(report, time.monotonic())
                self._show_load(self._tiers.names, time.monotonic())  # also of a model that nobody asks for
            case ReplicaGone():
                self._core.replica_gone(report, time.monotonic())
                self._count(report)
            case _:
                assert_never(report)

    def _count(self, gone: ReplicaGone) -> None:
        """Once, however often the replica says it until Serve replaces it."""
        if gone.ended is None or gone.replica_id in self._ended:
            return
        self._ended.add(gone.replica_id)
        role, cause = gone.ended
        self._instruments.count(catalogue.ENGINES_ENDED, model=self._model, role=role, cause=cause)
        logs.event(
            "engine_ended",
            level=logging.ERROR,
            replica=gone.replica_id,
            model=self._model,
            role=role,
            cause=cause,
        )

    def _record(self, request: PlacementRequested, decision: PlacementDecision) -> None:
        tier = request.objective.tier
        match decision:
            case Placed():
                event = "request_placed"
                self._instruments.count(
                    catalogue.PLACEMENTS, model=self._model, tier=tier, reason=decision.reason.value
                )
                if decision.ttft_budget_s is not None and decision.predicted_ttft_s is not None:
                    self._instruments.observe(
                        catalogue.SLACK_AT_DISPATCH, decision.slack_s, model=self._model, tier=tier
                    )
            case Rejected():
                event = "request_rejected"
            case _:
                assert_never(decision)
        # Who was admitted has been counted; until the router knows the replicas, ingresses go on without it.
        is_counted = not request.is_admitted and decision.reason is not RejectionReason.NOT_SETTLED
        if self._monitor is not None and is_counted:
            self._monitor.note((tier, decision))
        logs.event(event, job_id=request.job_id, model=self._model, tier=tier, **asdict(decision))

    def fleet(self) -> dict[str, Any]:
        """See `SlackRouter.fleet`."""
        now_s = time.monotonic()
        return {
            "model": self._model,
            "ready": self._core.is_ready(now_s),
            "serves": self._core.serves(now_s),
            "settled": self._core.is_settled(now_s),
            "monitored": self._monitor is not None,
            "tiers": list(self._tiers.names),
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
        "floor_s": replica.predictor.floor_s,
        "handoff_s": replica.predictor.handoff_s,
    }


def _decode_state(replica: DecodeView, now_s: float) -> dict[str, Any]:
    return {
        "replica": replica.replica_id,
        "running": replica.running,
        "prompts": replica.local_prefills.total(),
        "kv_usage": replica.kv_usage,
        "reported_s_ago": now_s - replica.reported_at_s,
        "draining": replica.draining,
    }
