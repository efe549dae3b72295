"""Whether the running forward pass is preempted, decided in the replica process.

The engine is blocked inside the forward pass when a more urgent request arrives and cannot see it; the
replica process can. Pure: takes the queue that the engine's scheduler has published
(`prefill_node.board.messages`), adds what the replica has accepted since then
(`prefill_node.replica.governing.ledger`), and asks the rules (`slo.preemption.decide`). The shell
(`prefill_node.replica.preemption_controller`) reads the board, carries the decision out and sets the timer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from prefill_node.board.messages import Reached, SchedulerView, StepView, SuspendedView
from prefill_node.replica.governing.ledger import Accepted, PrefillLedger
from slo.monitor.directives import PreemptDirective
from slo.predict.pass_shape import MeanStop, PassPart, PassShape
from slo.predict.prefill_time import PrefillPredictor
from slo.preemption.decide import as_one, decide, limit_reached, must_wait, refusal_of
from slo.preemption.types import (
    Keep,
    KeepReason,
    Preempt,
    PreemptionDecision,
    PreemptionMode,
    PreemptionPolicy,
    PreemptionRules,
    PreemptReason,
    ReplicaState,
    RunningStep,
)
from slo.queue.arrival_forecast import Forecast
from slo.queue.chunks import StopBound, longest_s
from slo.queue.fairness import FairnessRule
from slo.queue.order import QueueOrder, order
from slo.queue.prefill import Prefill
from slo.request import JobId
from slo.tiers import Tier, weight_of

NOBODY = JobId("")
"""The beneficiary of a stop that only ends work that nobody waits for."""


@dataclass(frozen=True, slots=True)
class ForwardProfile:
    """What a replica knows about its engine's forward pass.

    Attributes:
        shape: Where it can stop; without boundaries when it cannot.
        kept_bytes: By boundary, what a stop there keeps beside KV blocks for each token, on each rank, where
            a step fills whole blocks; empty for nothing.
        ahead_s: What is launched on an accelerator before it runs.
        within_s: How long a stop may take at most; infinite for any time.
        stretches: See `PassShape.stretches`.
        mean_stop: See `PassShape.mean_stop`.
        bound: What a step may be for that; None where no step stops, or any may be.
    """

    shape: PassShape
    kept_bytes: tuple[float, ...] = ()
    ahead_s: float = 0.0
    within_s: float = math.inf
    stretches: tuple[PassPart, ...] = field(init=False)
    mean_stop: MeanStop = field(init=False)
    bound: StopBound | None = field(init=False)

    def __post_init__(self) -> None:
        """Work out what does not change."""
        stretches = self.shape.stretches()
        is_bound = bool(stretches) and self.within_s < math.inf
        object.__setattr__(self, "stretches", stretches)
        object.__setattr__(self, "mean_stop", self.shape.mean_stop())
        left_s = max(0.0, self.within_s - self.ahead_s)
        object.__setattr__(self, "bound", StopBound(left_s, stretches) if is_bound else None)

    def stop_s(self, tokens: int, pairs: float, predictor: PrefillPredictor) -> float:
        """The longest that such a pass runs between an order and the stop, as predicted."""
        return self.ahead_s + longest_s(self.stretches, tokens, pairs, predictor)

    def mean_stop_s(self, tokens: int, pairs: float, predictor: PrefillPredictor) -> float:
        """The mean of the same."""
        return self.ahead_s + self.mean_stop.seconds(*predictor.kinds_s(tokens, pairs))

    def checkpoint_bytes(self, tokens: int, reached: int) -> int:
        """Bytes that stopping a pass as soon as it can keeps beside KV blocks, on each rank."""
        if not self.kept_bytes:
            return 0
        stops_at = min(reached + 1 + self.shape.late_by, len(self.kept_bytes) - 1)
        return math.ceil(tokens * self.kept_bytes[stops_at])

    @property
    def boundaries(self) -> int:
        """Places where it can stop; 0 when it cannot."""
        return self.shape.boundaries


@dataclass(slots=True)
class Governor:
    """Decides for one replica.

    Attributes:
        ledger: What the replica has accepted; kept by its owner.
        weights: Value of a request on time, by tier.
        fairness: The scheduler's rule, of which the board has the state; None for none.
        ordered: The last step that was ordered to stop.
        has_failed: Whether it raised an error when it was asked, so that nothing is stopped any more.
    """

    ledger: PrefillLedger
    weights: Mapping[Tier, float]
    rules: PreemptionRules
    queue_order: QueueOrder
    profile: ForwardProfile
    fairness: FairnessRule | None = None
    ordered: int = 0
    has_failed: bool = False
    forecast: Forecast = field(default_factory=Forecast)
    _fresh: dict[JobId, Prefill] = field(default_factory=dict)
    _predictor: PrefillPredictor | None = None
    _view: SchedulerView | None = None
    _seen: set[str] = field(default_factory=set)

    @property
    def is_on(self) -> bool:
        """Whether running steps can be stopped at all."""
        may_stop = self.rules.mode is not PreemptionMode.OFF and self.profile.boundaries > 0
        return may_stop and not self.has_failed

    def decide(self, view: SchedulerView | None, reached: Reached, now_s: float) -> PreemptionDecision:
        """Decide anew; called whenever something has changed.

        `view` is what the scheduler has published last, None before that; `reached` is the first
        rank's.
        """
        if not self.is_on:
            return Keep(KeepReason.OFF)
        if view is None or view.step is None or view.step.step_id == self.ordered:
            return Keep(KeepReason.IDLE)
        step = view.step
        abandoned = self.ledger.abandoned
        if abandoned and step.members and all(member.job_id in abandoned for member in step.members):
            decision: PreemptionDecision = Preempt(step.step_id, NOBODY, PreemptReason.ABANDONED)
        else:
            running = self._running(step, reached, now_s)
            waiting = self._beneficiaries(view, now_s)
            if self.rules.policy is not PreemptionPolicy.FEASIBLE_SET:
                waiting = self._ordered(view, waiting, now_s)
            decision = decide(
                self._state(view, running, waiting), now_s, self.rules, self.forecast, view.targets
            )
        if isinstance(decision, Preempt):
            self.ordered = decision.step_id
            return decision
        later_s = [until_s for until_s in self._let_it_run(view).values() if until_s > now_s]
        recheck_at_s = min(later_s, default=math.inf)
        return Keep(decision.reason, min(recheck_at_s, decision.recheck_at_s))

    def direct(
        self,
        directive: PreemptDirective,
        view: SchedulerView | None,
        reached: Reached,
        now_s: float,
    ) -> PreemptionDecision:
        """Whether an order of the cluster's monitor still makes sense here.

        The step must run, its beneficiary wait and still be saved by a stop, and no limit may be in the way.
        Whose deadline counts for more is the monitor's decision.
        """
        if not self.is_on:
            return Keep(KeepReason.OFF)
        step = None if view is None else view.step
        if view is None or step is None or step.step_id != directive.step_id or step.step_id == self.ordered:
            return Keep(KeepReason.IDLE)
        running = self._running(step, reached, now_s)
        if (limit := limit_reached(running, self._state(view, running, ()), self.rules)) is not None:
            return Keep(limit)
        waiting = {prefill.job_id: prefill for prefill in self._beneficiaries(view, now_s)}
        if (waiter := waiting.get(directive.beneficiary)) is None:
            return Keep(KeepReason.NOBODY_WAITS)
        if (refusal := refusal_of(running, waiter, now_s, self.rules)) is not None:
            return Keep(refusal)
        self.ordered = step.step_id
        return Preempt(step.step_id, waiter.job_id, PreemptReason.DIRECTED)

    def follow(self, predictor: PrefillPredictor, rules: PreemptionRules) -> None:
        """Predict and decide by these from now on."""
        self.ledger.predictor = predictor
        self.rules = rules

    def arrived(self, job: Accepted, now_s: float) -> None:
        """The replica has accepted a prefill, which may have waited for a place since it arrived."""
        self.ledger.arrived(job)
        work_s = self.ledger.predictor.work_s(*job.left(0))
        weight, view = weight_of(self.weights, job.tier), self._view
        if view is not None and view.targets is not None:
            weight *= view.targets.price(job.tier)
        self.forecast.arrived(work_s, weight, now_s)

    def remaining_s(self, step: StepView, reached: Reached) -> float:
        """Predicted seconds to the end of a running step."""
        return self.total_s(step) * (1.0 - self.progress(step, reached))

    def total_s(self, step: StepView) -> float:
        """Predicted seconds of a whole forward pass."""
        return self.ledger.predictor.pass_s(step.tokens, step.pairs)

    def progress(self, step: StepView, reached: Reached) -> float:
        """The fraction of a running step's forward pass that is done, by its time."""
        at = self.profile.shape.at(_boundary(step, reached))
        return self.ledger.predictor.fraction(at, step.tokens, step.pairs)

    def preemptible_in_s(self, view: SchedulerView, reached: Reached, now_s: float) -> float | None:
        """How soon the running step would be preempted for somebody more urgent; None when it would not.

        What is decided here reckons with the longest that a stop may take; what is predicted, with the mean.
        """
        if not self.is_on or (step := view.step) is None:
            return None
        running = self._running(step, reached, now_s)
        if limit_reached(running, self._state(view, running, ()), self.rules) is not None:
            return None
        return self.profile.mean_stop_s(step.tokens, step.pairs, self.ledger.predictor)

    def waiting(self, view: SchedulerView, now_s: float) -> list[Prefill]:
        """Everything that is accepted and does not run, in the queue's order; one for each suspended step."""
        return self._ordered(view, self.prefills(view, now_s), now_s)

    def prefills(self, view: SchedulerView, now_s: float) -> list[Prefill]:
        """As `waiting`, without the order."""
        accepted = self.ledger.accepted
        prefills = [prefill for item in view.queue if (prefill := item.prefill).job_id in accepted]
        prefills += [self._fresh_prefill(job) for job in self.fresh(view)]
        return prefills + self._all_suspended(view, now_s)

    def fresh(self, view: SchedulerView) -> list[Accepted]:
        """The accepted jobs that the engine has not seen yet."""
        if view is not self._view:
            self._view, self._seen = view, _seen(view)
        seen = self._seen
        return [job for job_id, job in self.ledger.accepted.items() if job_id not in seen]

    def _all_suspended(self, view: SchedulerView, now_s: float) -> list[Prefill]:
        steps = [self._suspended(step, view, now_s) for step in view.suspended]
        return [step for step in steps if step is not None]

    def _beneficiaries(self, view: SchedulerView, now_s: float) -> list[Prefill]:
        """Those that a stop could help: of those in the engine only who finds memory.

        Where nobody could start, what is suspended is work like any other, but stops nobody.
        """
        if not view.none_can_start:
            prefills, until_s = self.prefills(view, now_s), self._let_it_run(view)
            return [one for one in prefills if until_s.get(one.job_id, now_s) <= now_s]
        later = [self._fresh_prefill(job) for job in self.fresh(view)]
        return later + [
            msgspec.structs.replace(step, preempted_by=step.preempted_by or NOBODY)
            for step in self._all_suspended(view, now_s)
        ]

    def _let_it_run(self, view: SchedulerView) -> Mapping[str, float]:
        """Until when those that were passed let the step run, for a stop to be in time."""
        if view.step is None or not view.passed:
            return {}
        stop_s = self.profile.stop_s(view.step.tokens, view.step.pairs, self.ledger.predictor)
        return {job_id: until_s - stop_s for job_id, until_s in view.passed.items()}

    def _ordered(self, view: SchedulerView, prefills: Sequence[Prefill], now_s: float) -> list[Prefill]:
        fairness = None
        if self.fairness is not None and view.fairness is not None:
            fairness = self.fairness.at(view.fairness)
        return order(
            self.queue_order,
            prefills,
            now_s,
            max_suspended_s=self.rules.limits.max_suspended_s,
            forecast=self.forecast,
            fairness=fairness,
            targets=view.targets,
        )

    def _state(self, view: SchedulerView, running: RunningStep, waiting: Sequence[Prefill]) -> ReplicaState:
        kept_bytes = sum([item.checkpoint_bytes for item in view.suspended])
        return ReplicaState(running, waiting, len(view.suspended), kept_bytes)

    def _running(self, step: StepView, reached: Reached, now_s: float) -> RunningStep:
        total_s, progress = self.total_s(step), self.progress(step, reached)
        remaining_s = total_s * (1.0 - progress)
        members = [self._member(member, remaining_s, now_s) for member in step.members]
        return RunningStep(
            step_id=step.step_id,
            members=tuple(members),
            remaining_s=remaining_s,
            restart_s=total_s,
            progress=progress,
            stoppable=step.stoppable and bool(members),
            checkpoint_bytes=self.profile.checkpoint_bytes(step.tokens, _boundary(step, reached)),
            boundary_s=self.profile.stop_s(step.tokens, step.pairs, self.ledger.predictor),
            guard=step.guard,
        )

    def _member(self, member: Prefill, remaining_s: float, now_s: float) -> Prefill:
        """One of a running step; warm-up, or a client that has left, has no value and is never late."""
        if member.job_id in self.ledger.accepted:
            return msgspec.structs.replace(member, remaining_s=remaining_s + member.remaining_s)
        preemptions, suspended_s = member.preemptions_in_chunk, member.suspended_s
        return Prefill(member.job_id, 0.0, math.inf, remaining_s, now_s, preemptions, suspended_s)

    def _fresh_prefill(self, job: Accepted) -> Prefill:
        """A job of which nothing is computed; it looks the same as long as it waits."""
        predictor = self.ledger.predictor
        if self._predictor is not predictor or len(self._fresh) > 2 * len(self.ledger.accepted):
            self._predictor, self._fresh = predictor, {}
        if (known := self._fresh.get(job.job_id)) is None:
            tokens, context = job.left(0)
            left = max(1, tokens), context
            known = self._fresh[job.job_id] = Prefill(
                job.job_id,
                weight_of(self.weights, job.tier),
                job.deadline_s,
                predictor.prefill_s(*left),
                job.arrived_s,
                tier=job.tier,
                idle_s=predictor.idle_s(*left),
            )
        return known

    def _suspended(self, step: SuspendedView, view: SchedulerView, now_s: float) -> Prefill | None:
        """A suspended step as one; None when all its clients have left."""
        accepted, open_s = self.ledger.accepted, now_s - step.since_s
        members = [
            msgspec.structs.replace(member, suspended_s=open_s + member.suspended_s)
            for member in step.members
            if member.job_id in accepted
        ]
        if not members:
            return None
        one = as_one(members, now_s)
        beneficiary = accepted.get(JobId(step.preempted_by))
        if beneficiary is None or not self._waits_for(beneficiary, step, view, now_s):
            return one
        return msgspec.structs.replace(one, preempted_by=beneficiary.job_id)

    def _waits_for(
        self, beneficiary: Accepted, step: SuspendedView, view: SchedulerView, now_s: float
    ) -> bool:
        if beneficiary.job_id not in self._seen:
            return must_wait(self._fresh_prefill(beneficiary), now_s)
        return now_s <= step.protects_until_s or (
            view.step is not None and step.preempted_by in view.step.jobs
        )


def _boundary(step: StepView, reached: Reached) -> int:
    """The last boundary that a running step is known to have reached."""
    return reached.boundary if reached.step_id == step.step_id else step.from_boundary


def _seen(view: SchedulerView) -> set[str]:
    """The jobs that the engine has, or has just completed."""
    jobs = set(view.done)
    jobs.update([item.prefill.job_id for item in view.queue])
    if view.step is not None:
        jobs.update([member.job_id for member in view.step.members])
    for step in view.suspended:
        jobs.update([member.job_id for member in step.members])
    return jobs
