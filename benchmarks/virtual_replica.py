"""A prefill replica in virtual time: the server's own rules, and an imagined forward pass.

Who goes first (`slo.order`), who shares a pass (`slo.batching`) and what is stopped (`slo.preemption`) is
decided by the rules that serve. A pass takes its predicted time give or take an error, stops at the next of
its layers, and goes on from there or starts again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from slo.batching import Candidate, compose_step
from slo.forecast import Forecast
from slo.order import QueueOrder, order
from slo.preemption import (
    Keep,
    Preempt,
    PreemptionMode,
    PreemptionRules,
    Prefill,
    ReplicaState,
    RunningStep,
    decide,
    must_wait,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Sequence

    from slo.predictor import PrefillPredictor
    from slo.request import JobId


@dataclass(slots=True)
class Request:
    """A request and what it has been through; `step` is the pass that it is in, running or suspended."""

    job_id: JobId
    kind: str
    tokens: int
    weight: float
    arrived_s: float
    deadline_s: float
    preemptions: int = 0
    suspended_s: float = 0.0
    ended_s: float = math.inf
    step: Pass | None = None

    @property
    def is_on_time(self) -> bool:
        """Whether it has ended by its deadline."""
        return self.ended_s <= self.deadline_s


@dataclass(slots=True)
class Pass:
    """A forward pass: `done` is the fraction behind it at `since_s`, when it was started or stopped last."""

    members: list[Request]
    predicted_s: float
    actual_s: float
    done: float = 0.0
    since_s: float = 0.0
    yielded_to: Request | None = None


@dataclass(frozen=True, slots=True)
class ForwardModel:
    """How long a pass is predicted to take, by how much it is off at most, and where it can stop."""

    line: PrefillPredictor
    layers: int = 32
    token_budget: int = 8192
    error: float = 0.05


@dataclass(slots=True)
class VirtualReplica:
    """One replica; `serve` runs it to its last request.

    Attributes:
        stops: Passes stopped so far.
    """

    queue_order: QueueOrder
    rules: PreemptionRules
    model: ForwardModel
    rng: random.Random
    now_s: float = 0.0
    stops: int = 0
    _forecast: Forecast = field(default_factory=Forecast)
    _fresh: dict[JobId, Request] = field(default_factory=dict)
    _suspended: list[Pass] = field(default_factory=list)
    _running: Pass | None = None
    _stop: tuple[float, int, Request] | None = None
    _recheck_at_s: float = math.inf

    def serve(self, requests: Sequence[Request]) -> None:
        """Serve requests, given in order of arrival."""
        jobs = {request.job_id: request for request in requests}
        coming = [*reversed(requests)]
        while coming or self._running or self._fresh or self._suspended:
            stops_s = math.inf if self._stop is None else self._stop[0]
            ends_s = self._ends_s()
            arrives_s = coming[-1].arrived_s if coming else math.inf
            self.now_s = min(arrives_s, ends_s, stops_s, self._recheck_at_s)
            if self.now_s == stops_s:
                self._suspend()
            elif self.now_s == ends_s:
                self._end()
            elif self.now_s == arrives_s:
                arrived = coming.pop()
                self._fresh[arrived.job_id] = arrived
                work_s = self.model.line.prefill_s(arrived.tokens)
                self._forecast.arrived(work_s, arrived.weight, self.now_s)
            if self._running is None:
                self._start()
            self._reconsider(jobs)

    def _ends_s(self) -> float:
        step = self._running
        return math.inf if step is None else step.since_s + (1 - step.done) * step.actual_s

    def _end(self) -> None:
        assert self._running is not None
        for member in self._running.members:
            member.ended_s = self.now_s
        self._running = self._stop = None

    def _suspend(self) -> None:
        assert self._running is not None
        assert self._stop is not None
        step, (_, layer, beneficiary) = self._running, self._stop
        step.done = 0.0 if self.rules.mode is PreemptionMode.RECOMPUTE else layer / self.model.layers
        step.since_s, step.yielded_to = self.now_s, beneficiary
        for member in step.members:
            member.preemptions += 1
        self._suspended.append(step)
        self._running = self._stop = None
        self.stops += 1

    def _start(self) -> None:
        """Run what is first in the queue and waits for nobody."""
        ready = [prefill.job_id for prefill in self._waiting() if prefill.yielded_to is None]
        if not ready:
            return
        step = next(
            (step for step in self._suspended if any(m.job_id == ready[0] for m in step.members)), None
        )
        if step is None:
            step = self._compose([self._fresh[job] for job in ready if job in self._fresh])
        else:
            self._suspended.remove(step)
            for member in step.members:
                member.suspended_s += self.now_s - step.since_s
        step.since_s, self._running = self.now_s, step

    def _compose(self, queue: Sequence[Request]) -> Pass:
        line = self.model.line
        candidates = [Candidate(request.tokens, request.deadline_s) for request in queue]
        size = compose_step(candidates, self.now_s, line, self.model.token_budget).size
        predicted_s = line.prefill_s(sum(request.tokens for request in queue[:size]))
        error = self.rng.uniform(-self.model.error, self.model.error)
        step = Pass([*queue[:size]], predicted_s, predicted_s * (1 + error))
        for member in step.members:
            member.step = step
            del self._fresh[member.job_id]
        return step

    def _reconsider(self, jobs: dict[JobId, Request]) -> None:
        self._recheck_at_s = math.inf
        step, layers = self._running, self.model.layers
        if step is None or self._stop is not None:
            return
        done = self._done(step)
        running = RunningStep(
            step_id=1,
            members=tuple(map(self._prefill, step.members)),
            remaining_s=(1 - done) * step.predicted_s,
            restart_s=step.predicted_s,
            progress=done,
            boundary_s=step.predicted_s / layers,
        )
        waiting = [] if self.rules.mode is PreemptionMode.OFF else self._waiting()
        state = ReplicaState(running, waiting, len(self._suspended))
        match decide(state, self.now_s, self.rules, self._forecast):
            case Preempt(_, beneficiary):
                layer = math.floor(done * layers) + 1
                stops_s = step.since_s + (layer / layers - step.done) * step.actual_s
                if layer < layers:
                    self._stop = max(stops_s, self.now_s), layer, jobs[beneficiary]
            case Keep(_, recheck_at_s):
                self._recheck_at_s = recheck_at_s

    def _waiting(self) -> list[Prefill]:
        waiting = [self._prefill(request) for request in self._fresh.values()]
        waiting += [self._representative(step) for step in self._suspended]
        limit_s = self.rules.limits.max_suspended_s
        return order(self.queue_order, waiting, self.now_s, max_suspended_s=limit_s, forecast=self._forecast)

    def _representative(self, step: Pass) -> Prefill:
        """A suspended pass in the queue: as urgent as its most urgent member, worth as much as all."""
        members: Iterable[Prefill] = map(self._prefill, step.members)
        urgent = order(QueueOrder.SEDF, [*members], self.now_s)[0]
        suspended_s = urgent.suspended_s + self.now_s - step.since_s
        beneficiary = step.yielded_to
        assert beneficiary is not None
        ended = beneficiary.ended_s <= self.now_s
        bound = must_wait(None if ended else self._prefill(beneficiary), self.now_s)
        return replace(
            urgent,
            weight=sum(member.weight for member in step.members),
            suspended_s=suspended_s,
            yielded_to=beneficiary.job_id if bound else None,
        )

    def _done(self, step: Pass) -> float:
        elapsed_s = self.now_s - step.since_s if step is self._running else 0.0
        return min(1.0, step.done + elapsed_s / step.actual_s)

    def _prefill(self, request: Request) -> Prefill:
        step = request.step
        return Prefill(
            request.job_id,
            request.weight,
            request.deadline_s,
            self.model.line.prefill_s(request.tokens)
            if step is None
            else (1 - self._done(step)) * step.predicted_s,
            request.arrived_s,
            request.preemptions,
            request.suspended_s,
        )
