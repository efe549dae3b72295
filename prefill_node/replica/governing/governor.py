"""Whether the running forward pass makes way, decided in the replica process.

The engine is blocked inside the forward pass when a more urgent request arrives and cannot see it; the
replica process can. Pure: puts together what the replica has accepted
(`prefill_node.replica.governing.ledger`) and what the engine's scheduler has published
(`prefill_node.board.messages`), and asks the rules (`slo.preemption.decide`). The shell
(`prefill_node.replica.preemption_controller`) reads the board, carries the decision out and sets the timer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from prefill_node.board.messages import JobAccount
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
from slo.queue.order import QueueOrder, order
from slo.queue.prefill import Prefill
from slo.request import JobId

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prefill_node.board.messages import SchedulerView, StepView, SuspendedView
    from prefill_node.board.pass_shape import PassShape
    from prefill_node.replica.governing.ledger import Accepted, PrefillLedger
    from slo.monitor.directives import PreemptDirective
    from slo.predict.prefill_time import PrefillPredictor
    from slo.tiers import Tier

_UNTOUCHED = JobAccount(0, 0.0, 0)
NOBODY = JobId("")
"""The beneficiary of a stop that only ends work that nobody waits for."""


@dataclass(frozen=True, slots=True)
class ForwardProfile:
    """What a replica knows about its engine's forward pass.

    Attributes:
        shape: Where it can stop; without boundaries when it cannot.
        checkpoint_bytes_per_token: What stopping keeps, on each rank.
        ahead: Boundaries that are launched on an accelerator before the one that it is at.
        longest_stop: The largest fraction of it that runs between an order and the stop.
    """

    shape: PassShape
    checkpoint_bytes_per_token: int
    ahead: int = 0
    longest_stop: float = field(init=False)

    def __post_init__(self) -> None:
        """Work out what does not change."""
        object.__setattr__(self, "longest_stop", self.shape.longest(self.ahead))

    @property
    def boundaries(self) -> int:
        """Places where it can stop; 0 when it cannot."""
        return self.shape.boundaries


@dataclass(slots=True)
class Governor:
    """Decides for one replica.

    Attributes:
        ledger: What the replica has accepted; kept by its owner.
        weights: Worth of a request on time, by tier.
        ordered: The last step that was ordered to stop.
        forecast: What is expected to arrive.
    """

    ledger: PrefillLedger
    weights: Mapping[Tier, float]
    rules: PreemptionRules
    queue_order: QueueOrder
    profile: ForwardProfile
    ordered: int = 0
    forecast: Forecast = field(default_factory=Forecast)
    _fresh: dict[JobId, Prefill] = field(default_factory=dict)
    _predictor: PrefillPredictor | None = None
    _view: SchedulerView | None = None
    _elsewhere: set[str] = field(default_factory=set)

    @property
    def is_on(self) -> bool:
        """Whether running steps can be stopped at all."""
        return self.rules.mode is not PreemptionMode.OFF and self.profile.boundaries > 0

    def decide(
        self, view: SchedulerView | None, reached: tuple[int, int], now_s: float
    ) -> PreemptionDecision:
        """Decide anew; called whenever something has changed.

        Args:
            view: What the scheduler has published last; None before that.
            reached: The step and boundary that the first rank has published last.
            now_s: The time.
        """
        if not self.is_on:
            return Keep(KeepReason.OFF)
        if view is None or view.step is None or view.step.step_id == self.ordered:
            return Keep(KeepReason.IDLE)
        step = view.step
        if step.jobs and all(job in self.ledger.abandoned for job in step.jobs):
            decision: PreemptionDecision = Preempt(step.step_id, NOBODY, PreemptReason.ABANDONED)
        else:
            running = self._running(view, step, reached, now_s)
            waiting = self._prefills(view, now_s)
            if self.rules.policy is not PreemptionPolicy.FEASIBLE_SET:
                waiting = self._ordered(waiting, now_s)
            decision = decide(self._state(view, running, waiting), now_s, self.rules, self.forecast)
        if isinstance(decision, Preempt):
            self.ordered = decision.step_id
        return decision

    def direct(
        self,
        directive: PreemptDirective,
        view: SchedulerView | None,
        reached: tuple[int, int],
        now_s: float,
    ) -> PreemptionDecision:
        """Whether an order of the cluster's monitor still makes sense here.

        The step must run, its beneficiary wait and still be saved by a stop, and no limit may be in the way.
        Whose deadline is worth more is the monitor's decision.
        """
        if not self.is_on:
            return Keep(KeepReason.OFF)
        step = None if view is None else view.step
        if view is None or step is None or step.step_id != directive.step_id or step.step_id == self.ordered:
            return Keep(KeepReason.IDLE)
        running = self._running(view, step, reached, now_s)
        if (limit := limit_reached(running, self._state(view, running, ()), self.rules)) is not None:
            return Keep(limit)
        waiting = {prefill.job_id: prefill for prefill in self._prefills(view, now_s)}
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

    def arrived(self, job: Accepted) -> None:
        """The replica has accepted a prefill."""
        self.ledger.arrived(job)
        work_s = self.ledger.predictor.prefill_s(*job.left(0))
        self.forecast.arrived(work_s, self.weights[job.tier], job.arrived_s)

    def remaining_s(self, step: StepView, reached: tuple[int, int]) -> float:
        """Predicted seconds to the end of a running step."""
        return self.total_s(step) * (1.0 - self.progress(step, reached))

    def total_s(self, step: StepView | SuspendedView) -> float:
        """Predicted seconds of a whole forward pass."""
        return self.ledger.predictor.pass_s(step.tokens, step.pairs)

    def progress(self, step: StepView, reached: tuple[int, int]) -> float:
        """The fraction of a running step's forward pass that is done."""
        return self.profile.shape.at(reached[1] if reached[0] == step.step_id else step.from_boundary)

    def preemptible_in_s(self, view: SchedulerView, reached: tuple[int, int], now_s: float) -> float | None:
        """How soon the running step would make way for somebody more urgent; None when it would not."""
        if not self.is_on or view.step is None:
            return None
        running = self._running(view, view.step, reached, now_s)
        limit = limit_reached(running, self._state(view, running, ()), self.rules)
        return running.boundary_s if limit is None else None

    def waiting(self, view: SchedulerView, now_s: float) -> list[Prefill]:
        """Everything that is accepted and does not run, in the queue's order; one for each suspended step."""
        return self._ordered(self._prefills(view, now_s), now_s)

    def _prefills(self, view: SchedulerView, now_s: float) -> list[Prefill]:
        if view is not self._view:
            self._view, self._elsewhere = view, _elsewhere(view)
        elsewhere = self._elsewhere
        if self._predictor is not self.ledger.predictor:
            self._predictor, self._fresh = self.ledger.predictor, {}
        accounts, fresh = view.accounts, self._fresh
        prefills = [
            (fresh.get(job_id) or self._remember(job))
            if (account := accounts.get(job_id)) is None
            else self._queued(job, account)
            for job_id, job in self.ledger.accepted.items()
            if job_id not in elsewhere
        ]
        steps = (self._suspended(step, view, now_s) for step in view.suspended)
        return prefills + [step for step in steps if step is not None]

    def _ordered(self, prefills: Sequence[Prefill], now_s: float) -> list[Prefill]:
        limit_s = self.rules.limits.max_suspended_s
        return order(self.queue_order, prefills, now_s, max_suspended_s=limit_s, forecast=self.forecast)

    def _state(self, view: SchedulerView, running: RunningStep, waiting: Sequence[Prefill]) -> ReplicaState:
        kept_bytes = sum([item.checkpoint_bytes for item in view.suspended])
        return ReplicaState(running, waiting, len(view.suspended), kept_bytes)

    def _running(
        self, view: SchedulerView, step: StepView, reached: tuple[int, int], now_s: float
    ) -> RunningStep:
        total_s, progress = self.total_s(step), self.progress(step, reached)
        remaining_s = total_s * (1.0 - progress)
        members = [
            self._member(job, view.accounts.get(job, _UNTOUCHED), remaining_s, now_s) for job in step.jobs
        ]
        return RunningStep(
            step_id=step.step_id,
            members=tuple(members),
            remaining_s=remaining_s,
            restart_s=total_s,
            progress=progress,
            stoppable=step.stoppable and bool(step.jobs),
            checkpoint_bytes=step.tokens * self.profile.checkpoint_bytes_per_token,
            boundary_s=total_s * self.profile.longest_stop,
            guard=step.guard,
        )

    def _member(self, job_id: str, account: JobAccount, remaining_s: float, now_s: float) -> Prefill:
        """One of a running step; warm-up, or a client that has left, is of no worth and never late."""
        if (job := self.ledger.accepted.get(JobId(job_id))) is not None:
            return self._prefill(job, account, remaining_s + self.behind_s(job, account.computed_tokens))
        return Prefill(
            JobId(job_id), 0.0, math.inf, remaining_s, now_s, account.preemptions, account.suspended_s
        )

    def _prefill(
        self, job: Accepted, account: JobAccount, remaining_s: float, open_s: float = 0.0
    ) -> Prefill:
        """An accepted job; `open_s` is how long it has been suspended this time."""
        return Prefill(
            job.job_id,
            self.weights[job.tier],
            job.deadline_s,
            remaining_s,
            job.arrived_s,
            account.preemptions,
            open_s + account.suspended_s,
            tier=job.tier,
        )

    def _remember(self, job: Accepted) -> Prefill:
        """What a job that has not started looks like, which does not change while it waits."""
        if len(self._fresh) > 2 * len(self.ledger.accepted):
            self._fresh = {key: it for key, it in self._fresh.items() if key in self.ledger.accepted}
        self._fresh[job.job_id] = prefill = self._queued(job, _UNTOUCHED)
        return prefill

    def _queued(self, job: Accepted, account: JobAccount) -> Prefill:
        tokens, context = job.left(account.computed_tokens)
        return self._prefill(job, account, self.ledger.predictor.prefill_s(max(1, tokens), context))

    def behind_s(self, job: Accepted, computed_tokens: int) -> float:
        """The work behind so many tokens; none when nothing is known to be computed."""
        left = job.tokens - computed_tokens if computed_tokens else 0
        return self.ledger.predictor.prefill_s(left, computed_tokens)

    def _suspended(self, step: SuspendedView, view: SchedulerView, now_s: float) -> Prefill | None:
        """A suspended step as one; None when all its clients have left."""
        jobs = [
            (job, view.accounts.get(name, _UNTOUCHED))
            for name in step.jobs
            if (job := self.ledger.accepted.get(JobId(name))) is not None
        ]
        if not jobs:
            return None
        open_s = now_s - step.since_s
        remaining_s = self.total_s(step) * (1.0 - step.done)
        if len(jobs) == 1:  # the only kind of step that is one chunk of a prompt
            [(job, account)] = jobs
            remaining_s += self.behind_s(job, account.computed_tokens + step.tokens)
        members = [self._prefill(job, account, remaining_s, open_s) for job, account in jobs]
        beneficiary = self.ledger.accepted.get(JobId(step.preempted_by))
        runs = view.step is not None and step.preempted_by in view.step.jobs
        if beneficiary is None or not (runs or must_wait(self._queued(beneficiary, _UNTOUCHED), now_s)):
            return as_one(members, now_s)
        return msgspec.structs.replace(as_one(members, now_s), preempted_by=beneficiary.job_id)


def _elsewhere(view: SchedulerView) -> set[str]:
    """The jobs that do not wait to start or for their next chunk: done, running or suspended."""
    jobs = set(view.done)
    if view.step is not None:
        jobs.update(view.step.jobs)
    for step in view.suspended:
        jobs.update(step.jobs)
    return jobs
