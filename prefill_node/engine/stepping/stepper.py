"""What a prefill engine does next and what it remembers: the core of vLLM's scheduler and of the simulator's.

Pure: events and the time in, commands and views out. The shell (`prefill_node.engine.scheduler`,
`simulator.replica.engine`) carries commands out, tells what happened, and owns the mechanism: KV blocks,
queues, the forward pass, the board.

    next_step -> StartOver | Start | Resume | Wait      what to do now
    step_issued -> StepView                             it runs
    step_ended | step_preempted                         it does not run any more
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from prefill_node.board.messages import SchedulerView, StepView
from prefill_node.engine.stepping.step_choice import (
    ChoiceRules,
    Resume,
    Start,
    SuspensionRoom,
    Wait,
    choose,
    in_excess,
    in_order,
)
from prefill_node.engine.stepping.suspension import SuspendedStep, Suspensions
from slo.request import JobId

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prefill_node.board.messages import Queued, SuspendedView
    from prefill_node.engine.stepping.step_choice import Suspended
    from slo.predict.prefill_time import PrefillPredictor
    from slo.queue.fairness import Boost
    from slo.queue.prefill import Prefill
    from slo.tiers import Tier

_REMEMBER_JOBS = 8192
_REMEMBER_DONE = 128


class StartOver(msgspec.Struct, frozen=True):
    """Take the KV blocks of these requests, then ask again; they are suspended and late, and too many."""

    requests: tuple[str, ...]


Command: TypeAlias = StartOver | Start | Resume | Wait


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How long and how much may be suspended.

    Attributes:
        max_suspended_s: A request that has been suspended for so long in total goes first.
        room: How much may be suspended at a time.
        arrival_wait_s: How long a stopped step waits for a beneficiary that has not reached the engine.
    """

    max_suspended_s: float
    room: SuspensionRoom
    arrival_wait_s: float = 0.0


class Member(NamedTuple):
    """A request in a step that has been issued.

    Attributes:
        request: The engine's name for it.
        prefill: Its remaining time is that of what lies behind the step.
        tokens: Prompt tokens that the step computes of it.
        pairs: Their `slo.predict.prefill_time.attention_pairs`.
        behind_tokens: Prompt tokens behind the step.
    """

    request: str
    prefill: Prefill
    tokens: int
    pairs: float
    behind_tokens: int


class StepStop(NamedTuple):
    """How a step stopped.

    Attributes:
        at_s: When.
        boundary: Where it goes on; 0 without a checkpoint.
        done: The fraction of its forward pass that need not be repeated.
        checkpoint_bytes: What each rank keeps of it; 0 for none.
        beneficiary: The job that it was preempted for, empty for none.
    """

    at_s: float
    boundary: int
    done: float
    checkpoint_bytes: int
    beneficiary: str


class _Issued(NamedTuple):
    """The running step: its tokens by tier, and the right that it runs by."""

    view: StepView
    tokens: dict[Tier, int]
    boost: Boost | None


class Stepper:
    """The state of one engine's steps.

    Attributes:
        rules: How it chooses; the predictor changes with what the replica sends.
        suspensions: What is suspended, and what each request has been through.
        jobs: Engine request ids by job, of all jobs that are in the engine.
        step_id: Identity of the last step.
    """

    def __init__(self, rules: ChoiceRules, limits: StepLimits) -> None:
        self.rules = rules
        self.suspensions = Suspensions(limits.max_suspended_s)
        self.jobs: dict[str, str] = {}
        self.step_id = 0
        self._limits = limits
        self._arrived: OrderedDict[str, None] = OrderedDict()
        self._done: deque[str] = deque(maxlen=_REMEMBER_DONE)
        self._issued: _Issued | None = None
        self._members: frozenset[str] = frozenset()
        self._queue: dict[JobId, Queued] = {}
        self._ordered: list[Prefill] = []

    # Events

    def predicts(self, predictor: PrefillPredictor) -> None:
        """The replica has sent its predictor."""
        if predictor != self.rules.predictor:
            self.rules = replace(self.rules, predictor=predictor)

    def job_arrived(self, job: str, request: str, prefill: Prefill, now_s: float) -> None:
        """A job has reached the engine."""
        self.jobs[job] = request
        self._arrived[job] = None
        while len(self._arrived) > _REMEMBER_JOBS:
            self._arrived.popitem(last=False)
        if self.rules.forecast is not None:
            self.rules.forecast.arrived(prefill.remaining_s, prefill.weight, now_s)

    def has_arrived(self, job: str) -> bool:
        """Whether a job has reached the engine, even if it has left since."""
        return job in self._arrived

    def job_left(self, job: str, request: str) -> None:
        """A request has left the engine; its job is empty if it had none."""
        self.suspensions.ended(request)
        self.jobs.pop(job, None)
        self._queue.pop(JobId(job), None)

    def started_over(self, item: Queued) -> None:
        """A request has lost its KV blocks, and waits as if it had never started."""
        if self._queue.pop(item.prefill.job_id, None) is None:
            self._ordered.append(item.prefill)
        self._queue[item.prefill.job_id] = item

    def job_done(self, job: str) -> None:
        """The prefill of a job is complete."""
        self._done.append(job)

    def step_issued(
        self, command: Start | Resume | Wait, members: Sequence[Member], now_s: float
    ) -> StepView:
        """The step that was chosen runs, with these members."""
        self.step_id += 1
        from_boundary, boost = 0, None if isinstance(command, Wait) else command.boost
        if isinstance(command, Resume):
            from_boundary = command.step.boundary
            self.suspensions.resume(command.step, now_s)
        step_tokens, pairs, behind_tokens = 0, 0.0, 0
        tokens: dict[Tier, int] = {}
        for _, prefill, new, new_pairs, behind in members:
            step_tokens += new
            pairs += new_pairs
            behind_tokens += behind
            tokens[prefill.tier] = tokens.get(prefill.tier, 0) + new
        view = StepView(
            self.step_id,
            tuple([member.prefill for member in members]),
            step_tokens,
            pairs,
            from_boundary,
            now_s,
            guard=0.0 if boost is None else boost.guard,
            behind_tokens=behind_tokens,
        )
        self._issued = _Issued(view, tokens, boost)
        self._members = frozenset([member.request for member in members])
        return view

    def step_ended(self, now_s: float) -> None:
        """The running step has ended or stopped: charge it to the classes of its members."""
        issued, self._issued, self._members = self._issued, None, frozenset()
        if issued is not None and self.rules.fairness is not None:
            seconds = now_s - issued.view.started_s
            self.rules.fairness.step_ended(issued.tokens, seconds, now_s, issued.boost)

    def step_preempted(
        self, members: Mapping[str, int], pairs: float, stop: StepStop, now_s: float
    ) -> SuspendedStep:
        """The last step, which has ended, stopped on the way; it is kept for those who are still there.

        Args:
            members: Its tokens by request, of those that have not left meanwhile.
            pairs: The `slo.predict.prefill_time.attention_pairs` of the whole step.
            stop: How.
            now_s: The time.
        """
        step = SuspendedStep(
            step_id=self.step_id,
            members=dict(members),
            pairs=pairs,
            boundary=stop.boundary,
            done=stop.done,
            checkpoint_bytes=stop.checkpoint_bytes,
            since_s=stop.at_s,
            preempted_by=stop.beneficiary,
            arrival_by_s=now_s + self._limits.arrival_wait_s,
        )
        if members:
            self.suspensions.suspend(step)
        elif stop.checkpoint_bytes:
            self.suspensions.discard(step.step_id)
        return step

    # Commands

    def next_step(
        self, queue: Sequence[Queued], suspended: Sequence[Suspended], free_blocks: int, now_s: float
    ) -> Command:
        """What to do now.

        Args:
            queue: Everything that can run and is not suspended.
            suspended: The suspended steps.
            free_blocks: KV blocks that nobody holds.
            now_s: The time.
        """
        if suspended and (excess := in_excess(suspended, now_s, self._limits.room)):
            return StartOver(tuple(request for step in excess for request in step.members))
        self._queue = {item.prefill.job_id: item for item in queue}
        self._ordered = in_order(queue, suspended, now_s, self.rules)
        return choose(queue, suspended, free_blocks, now_s, self.rules, self._ordered)

    # What is published

    @property
    def running(self) -> StepView | None:
        """The step that runs."""
        return None if self._issued is None else self._issued.view

    def view(self, suspended: Sequence[SuspendedView]) -> SchedulerView:
        """The step that runs and what waits behind it, in the order in which it would run."""
        queue, members = self._queue, self._members
        waiting = [item for prefill in self._ordered if (item := queue.get(prefill.job_id)) is not None]
        if members:
            waiting = [item for item in waiting if item.request not in members]
        fairness = self.rules.fairness
        return SchedulerView(
            self.running,
            tuple(waiting),
            tuple(suspended),
            tuple(self._done),
            None if fairness is None else fairness.account.state(),
        )
