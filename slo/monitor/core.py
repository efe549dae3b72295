"""The cluster-wide monitor's knowledge and decisions, pure: reports in, answers and policies out.

Owns what is known of every reporter and the one policy. Reads no clock (`now_s` is passed in), sends nothing
and exports nothing; the actor around it is `deployments.monitor.actor`. The rules are in
`slo.monitor.shedding`, `slo.monitor.corrections` and `slo.monitor.directives`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, assert_never

from slo.autoscaling.need import FleetDemand, FleetLoad
from slo.monitor.attainment import Attainment, Counted, RollingAttainment, Series
from slo.monitor.corrections import Corrections
from slo.monitor.directives import DirectiveReason, PreemptDirective, direct
from slo.monitor.easing import UNTRIED
from slo.monitor.messages import (
    DecodeSeen,
    IngressSeen,
    MonitorAnswer,
    MonitorReport,
    PrefillSeen,
    Role,
    RouterSeen,
    Seen,
    without_events,
)
from slo.monitor.policy import UNSTEERED, ClusterPolicy
from slo.monitor.settings import MonitorSettings
from slo.monitor.shedding import SteerReason, TierBurn, steer
from slo.outcomes import RequestEnded
from slo.predict.prediction_error import PredictionError, RollingError, prediction_error
from slo.request import ReplicaId
from slo.tiers import ObjectiveName, Tier

SETTLE_S: Final = 5.0
"""For so long a monitor changes nothing after its start, and after it has heard of a policy unknown to it."""
FORGET_AFTER_S: Final = 60.0
"""Serve replaces a failed replica within a minute."""
_TELLS_AGAIN_S: Final = 3600.0
"""Who was not answered, as behind a network that was cut, tells the same again when it is back."""
ALL_OBJECTIVES: Final = "all"
"""Stands for all objectives of a request together."""
_DEMAND_HOLDS_S: Final = 5.0
_FIRST_TOKENS: Final = 512
"""How many of the latest requests the error of predicted times to first token covers."""


@dataclass(slots=True)
class Subscriber:
    """A reporter, as the monitor knows it.

    Attributes:
        follows: The version of the policy in its last report.
        heard_at_s: When that came.
        seen: What it said.
        dropped: How much it has had to leave out, as it said then.
    """

    role: Role
    follows: int
    heard_at_s: float
    seen: Seen | None = None
    dropped: int = 0


class Judged(NamedTuple):
    """By what requests that were judged are counted; `objective` is a name of one, or `ALL_OBJECTIVES`."""

    model: str
    tier: Tier
    objective: str
    met: bool


@dataclass(frozen=True, slots=True)
class TierState:
    """One tier's attainment and burn rates.

    Attributes:
        burn: Of all promises.
        burn_in_reach: Of those that an idle fleet would keep, without requests that failed: by these the
            fleet is steered.
        at_risk: Whether others are shed for it, under load, by these.
    """

    target: float
    burn: TierBurn
    burn_in_reach: TierBurn
    long: Attainment
    short: Attainment
    at_risk: bool


@dataclass(frozen=True, slots=True)
class MonitorState:
    """Everything that the monitor knows, to be shown.

    Attributes:
        reason: Why it is that one, by the last look.
        corrections: By prefill replica, how many times as long as its own predictor says a prefill takes.
        error: How far predicted forward passes are off; None when none has been measured.
        ttft_error: The same of predicted times to first token.
        subscribers: How many report, by role.
        behind: How many of them follow an older policy.
        uptime_s: Since this monitor started.
    """

    policy: ClusterPolicy
    reason: SteerReason
    tiers: Mapping[Tier, TierState]
    corrections: Mapping[ReplicaId, float]
    error: PredictionError | None
    ttft_error: PredictionError | None
    subscribers: Mapping[Role, int]
    behind: int
    uptime_s: float


class MonitorCore:
    """Takes all reports and decides on the policy.

    Args:
        settings: Hold until an ingress reports other ones.
        now_s: The time of its start.

    Attributes:
        heard_s: When the last report came; the time of the start before the first.
    """

    def __init__(self, settings: MonitorSettings, now_s: float) -> None:
        self.settings = settings
        self.policy = UNSTEERED
        self.subscribers: dict[str, Subscriber] = {}
        self._teachers: list[str] = []
        """Who reports settings, by when they were first heard: the last one knows of the latest change."""
        self.placed: Counter[tuple[Tier, str]] = Counter()
        self.refused: Counter[tuple[Tier, str]] = Counter()
        self.directed: Counter[DirectiveReason] = Counter()
        self.steered: Counter[SteerReason] = Counter()
        self.judged: Counter[Judged] = Counter()
        self.dropped = 0
        self.reason = SteerReason.NOTHING_TO_DO
        self._started_s = now_s
        self._changed_s = now_s
        self._easing = UNTRIED
        self.heard_s = now_s
        self._attainment = RollingAttainment(settings.window_s)
        self._corrections = Corrections()
        self._first_tokens = RollingError(_FIRST_TOKENS)
        self._at_risk: frozenset[Tier] = frozenset()
        self._ordered: dict[ReplicaId, int] = {}
        self._batches: dict[str, tuple[int, float]] = {}
        """By reporter, the number of the events that came last, and when."""
        self._settled_at_s = now_s + SETTLE_S
        self._awaits_known_policy = False
        self._demand: tuple[FleetDemand | None, float] = None, now_s

    def heard(self, report: MonitorReport, now_s: float) -> MonitorAnswer:
        """Take a report in and answer it."""
        if report.settings is not None:
            self._learn(report.reporter, report.settings)
        self._go_on_from_predecessor(report, now_s)
        self._count_dropped(report)
        self.heard_s = now_s
        seen = self._unheard(report, now_s)
        self.subscribers[report.reporter] = Subscriber(
            report.role, report.follows, now_s, report.seen, report.dropped
        )
        answer = MonitorAnswer() if seen is None else self._take(seen, now_s)
        if self._awaits_known_policy:
            return replace(answer, wanted=report.follows == self.policy.version)
        return replace(answer, policy=self.policy if self.policy.version > report.follows else None)

    def look(self, now_s: float) -> SteerReason:
        """Revise the policy by what is known now; called about once a second."""
        self._forget(now_s)
        burns = self._burns(now_s, Counted.IN_REACH)
        rules = self.settings.rules
        self._at_risk = frozenset(tier for tier, burn in burns.items() if burn.at_risk(rules))
        if now_s < self._settled_at_s:
            self.reason = SteerReason.TOO_SOON
            return self.reason
        if self._awaits_known_policy:
            # nobody who follows it has reported: the next number, so that all take what is known here
            self.policy, self._awaits_known_policy = self.policy.raised_to(self.policy.version + 1), False
        self._forget_tiers()
        self._correct()
        if self.settings.steers:
            demand = self._told_demand(now_s)
            load = FleetLoad.UNKNOWN if demand is None else demand.load
            if demand is not None and demand.prefill.capacity > 0:
                self._easing = self._easing.asking(
                    demand.prefill.work / demand.prefill.capacity, demand.decode.asked_load
                )
            since_s, tiers = now_s - self._changed_s, self.settings.tiers
            steered = steer(self.policy, burns, load, since_s, rules, tiers, self._easing)
            self.reason, self._easing = steered.reason, steered.easing
            if steered.policy is not self.policy:
                self.policy, self._changed_s = steered.policy, now_s
                self.steered[steered.reason] += 1
        else:
            self.policy = self.policy.revised(shed={}, reserved=0.0)
            self.reason = SteerReason.NOTHING_TO_DO
        return self.reason

    def state(self, now_s: float) -> MonitorState:
        """What there is to show."""
        settings, targets, windows = self.settings, self.settings.targets, self._attainment
        burns, steering = (self._burns(now_s, counted) for counted in (Counted.ALL, Counted.IN_REACH))
        roles = Counter(subscriber.role for subscriber in self.subscribers.values())
        return MonitorState(
            policy=self.policy,
            reason=self.reason,
            tiers={
                tier: TierState(
                    target=targets[tier],
                    burn=burns[tier],
                    burn_in_reach=steering[tier],
                    long=windows.over(windows.long_s, now_s, targets[tier], tier=tier),
                    short=windows.over(windows.short_s, now_s, targets[tier], tier=tier),
                    at_risk=steering[tier].at_risk(settings.rules),
                )
                for tier in settings.tiers.names
            },
            corrections=self._corrections.all,
            error=self._corrections.error(),
            ttft_error=prediction_error(self._first_tokens),
            subscribers=roles,
            behind=sum(it.follows < self.policy.version for it in self.subscribers.values()),
            uptime_s=now_s - self._started_s,
        )

    def series(self, now_s: float) -> dict[Series, Attainment]:
        """Attainment by model, tier and tenant, over the long window; takes longer than all other state."""
        return self._attainment.series(now_s, self.settings.targets)

    def demand(self, now_s: float) -> FleetDemand | None:
        """What there is to do, for whoever sizes the tiers of replicas; None when the router does not say."""
        if (demand := self._told_demand(now_s)) is None:
            return None
        return replace(demand, prefill=replace(demand.prefill, at_risk=self._is_ttft_at_risk(now_s)))

    def _told_demand(self, now_s: float) -> FleetDemand | None:
        demand, heard_s = self._demand
        return None if now_s - heard_s > _DEMAND_HOLDS_S else demand

    def judgements(self) -> dict[Judged, int]:
        """Requests that were judged since it began to count; 0 for what has not occurred yet."""
        kinds = itertools.product(
            self.settings.models, self.settings.tiers.names, (*ObjectiveName, ALL_OBJECTIVES), (True, False)
        )
        return dict.fromkeys(itertools.starmap(Judged, kinds), 0) | self.judged

    def count_anew(self) -> None:
        """Begin at zero with all that is only counted: somebody else's counters stand in its place."""
        for counts in (self.placed, self.refused, self.directed, self.steered, self.judged):
            counts.clear()
        self.dropped = 0

    def errors(self) -> dict[ReplicaId, PredictionError | None]:
        """How far the predictions of each prefill replica are off; None with too few of late."""
        return self._corrections.errors()

    def _learn(self, reporter: str, settings: MonitorSettings) -> None:
        """Take settings from the teacher who was first heard last; others may be of a version that drains."""
        if reporter not in self._teachers:
            self._teachers.append(reporter)
        if reporter == self._teachers[-1] and settings != self.settings:
            self._resettle(settings)

    def _resettle(self, settings: MonitorSettings) -> None:
        if settings.window_s != self.settings.window_s:
            self._attainment = RollingAttainment(settings.window_s)
        self.settings = settings

    def _go_on_from_predecessor(self, report: MonitorReport, now_s: float) -> None:
        """Go on from the policy of the monitor before this one, which those who report still follow.

        (1) Somebody follows a higher version than ours: it was issued before us. Ours takes that number, that
        policy is asked for (`MonitorAnswer.wanted`), and nothing is changed for `SETTLE_S`. (2) A report
        brings it: it becomes ours. (3) A reporter we did not know follows exactly our version: two monitors
        have issued that number. Ours takes the next, so that the reporter takes it over.
        """
        is_new = report.reporter not in self.subscribers
        if report.policy is not None and self._awaits_known_policy:  # (2)
            if report.policy.version >= self.policy.version:
                self.policy, self._awaits_known_policy = report.policy, False
            return
        if report.follows > self.policy.version:  # (1)
            self.policy = self.policy.raised_to(report.follows)
            self._awaits_known_policy, self._settled_at_s = True, now_s + SETTLE_S
        elif is_new and report.follows == self.policy.version > 0 and not self._awaits_known_policy:  # (3)
            self.policy = self.policy.raised_to(report.follows + 1)

    def _count_dropped(self, report: MonitorReport) -> None:
        """Count what is new: a report may have been heard, and its reporter not know."""
        known = self.subscribers.get(report.reporter)
        counted = report.acknowledged if known is None else known.dropped
        self.dropped += max(0, report.dropped - counted)

    def _unheard(self, report: MonitorReport, now_s: float) -> Seen | None:
        """What a report says, without events that came before: the answer to those was late."""
        known, _ = self._batches.get(report.reporter, (0, 0.0))
        self._batches[report.reporter] = report.batch, now_s
        is_again = known == report.batch != 0
        return without_events(report.seen) if is_again and report.seen is not None else report.seen

    def _take(self, seen: Seen, now_s: float) -> MonitorAnswer:
        """What is for the one alone who has seen it."""
        match seen:
            case IngressSeen():
                for request, age_s in seen.aged:
                    self._attainment.add(request, now_s, age_s)
                    self._judge(request)
                    if request.ttft_s is not None and request.predicted_ttft_s is not None:
                        self._first_tokens.add(request.predicted_ttft_s, request.ttft_s)
            case RouterSeen(placed, refused, demand):
                self.placed.update(placed)
                self.refused.update(refused)
                self._demand = demand, now_s
            case PrefillSeen():
                replica_id = seen.work.replica_id
                self._corrections.reported(replica_id, seen.correction, seen.measured, now_s)
                factor = self._corrections.of(replica_id)
                correction = None if factor == seen.correction else factor
                return MonitorAnswer(directives=self._directives(seen), correction=correction)
            case DecodeSeen():
                pass
            case _:
                assert_never(seen)
        return MonitorAnswer()

    def _judge(self, ended: RequestEnded) -> None:
        for objective, met in ended.judged.items():
            self.judged[Judged(ended.model, ended.tier, objective, met)] += 1
        if (attained := ended.attained) is not None:
            self.judged[Judged(ended.model, ended.tier, ALL_OBJECTIVES, attained)] += 1

    def _directives(self, seen: PrefillSeen) -> tuple[PreemptDirective, ...]:
        replica_id = seen.work.replica_id
        directive = direct(seen.work, self._at_risk, self.settings.tiers) if self.settings.directs else None
        if directive is None or self._ordered.get(replica_id) == directive.step_id:
            return ()
        self._ordered[replica_id] = directive.step_id
        self.directed[directive.reason] += 1
        return (directive,)

    def _burns(self, now_s: float, counted: Counted) -> dict[Tier, TierBurn]:
        windows = self._attainment
        return {
            tier: TierBurn(
                windows.burn(tier, target, windows.long_s, now_s, counted),
                windows.burn(tier, target, windows.short_s, now_s, counted),
            )
            for tier, target in self.settings.targets.items()
        }

    def _is_ttft_at_risk(self, now_s: float) -> bool:
        """Whether a tier misses its target by its first tokens alone: more prefill replicas help no other."""
        burns = self._burns(now_s, Counted.PREFILL)
        return any(burn.at_risk(self.settings.rules) for burn in burns.values())

    def _forget_tiers(self) -> None:
        """Shed no tier that is gone or may not be shed, as after the deployment has changed its tiers."""
        sheddable = self.settings.tiers.sheddable
        shed = {tier: level for tier, level in self.policy.shed.items() if tier in sheddable}
        self.policy = self.policy.revised(shed=shed)

    def _correct(self) -> None:
        """Follow the measured passes, each replica's own and, with the margin, those of all.

        Without corrections what each replica has configured holds.
        """
        settings = self.settings
        if not settings.corrects:
            self._corrections.take_back()
            self.policy = self.policy.revised(preemption=None, margin=None)
            return
        self._corrections.revise()
        margin = self._corrections.margin(self.policy.margin or settings.margin, settings.margin)
        self.policy = self.policy.revised(preemption=settings.preemption, margin=margin)

    def _forget(self, now_s: float) -> None:
        self._corrections.forget_old(now_s)
        for name, (_, heard_s) in list(self._batches.items()):
            if now_s - heard_s > _TELLS_AGAIN_S:
                del self._batches[name]
        for name, subscriber in list(self.subscribers.items()):
            if now_s - subscriber.heard_at_s > FORGET_AFTER_S:
                del self.subscribers[name]
                self._teachers = [each for each in self._teachers if each != name]
                if isinstance(subscriber.seen, PrefillSeen):
                    self._corrections.forget(subscriber.seen.work.replica_id)
                    self._ordered.pop(subscriber.seen.work.replica_id, None)
