"""What a prefill engine does next and what it remembers: the core of vLLM's scheduler and of the simulator's.

Pure: events and the time in, commands and views out. The shell (`prefill_node.engine.scheduler`,
`simulator.replica.engine`) carries commands out, tells what happened, and owns the mechanism: KV blocks,
queues, the forward pass, the board.

    next_step -> StartOver | Start | Resume | Wait      what to do now
    step_issued -> StepView                             it runs, or will behind those that were issued before
    step_ended | step_preempted                         it does not run any more

Where nothing is ever stopped a step may be issued while one runs, as vLLM does by itself.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

import msgspec

from prefill_node.board.messages import Queued, SchedulerView, StepView, SuspendedView
from prefill_node.engine.stepping.kept_memory import KeptMemory
from prefill_node.engine.stepping.memory import NOTHING_ELSE, Memory
from prefill_node.engine.stepping.step_choice import (
    ChoiceRules,
    Resume,
    Start,
    Wait,
    choose,
    in_excess,
    in_order,
)
from prefill_node.engine.stepping.suspension import Suspended, SuspendedStep, Suspensions
from slo.predict.prefill_time import PrefillPredictor
from slo.preemption.types import Limits
from slo.queue.chunks import StopBound
from slo.queue.fairness import Boost, PassServed
from slo.queue.prefill import Prefill
from slo.request import JobId
from slo.tiers import Tier

_REMEMBER_JOBS = 8192
_REMEMBER_DONE: Final = 128
"""So many jobs that are complete are told, and all of the last two steps in any case."""
COMPOSED_AHEAD_S: Final = 0.05
"""Behind a longer step none is issued before it ends: who arrives meanwhile would wait for two steps, and the
host's time for a step, which is what that saves, is little of it."""


_OFTEN: Final = 2
"""A prefill that has lost its memory so many times keeps it where `Memory.lost_often` says so."""


class StartOver(msgspec.Struct, frozen=True):
    """Take the KV blocks of these requests, then ask again; they are suspended and late, and too many."""

    requests: tuple[str, ...]


Command: TypeAlias = StartOver | Start | Resume | Wait


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


class _Issued(NamedTuple):
    """A step that has been issued: the tier and the tokens of each member, and the right that it runs by."""

    view: StepView
    members: dict[str, tuple[Tier, int]]
    boost: Boost | None


class Stepper:
    """The state of one engine's steps.

    Args:
        limits: How long and how much may be suspended.
        arrival_wait_s: How long a stopped step waits for a beneficiary that has not reached the engine.

    Attributes:
        rules: How it chooses; the predictor and the bound on stops change with what the replica sends.
        suspensions: What is suspended, and what each request has been through.
        jobs: Engine request ids by job, of all jobs that are in the engine.
        step_id: Identity of the last step.
    """

    def __init__(self, rules: ChoiceRules, limits: Limits, arrival_wait_s: float = 0.0) -> None:
        self.rules = rules
        self.suspensions = Suspensions(limits.max_suspended_s)
        self.jobs: dict[str, str] = {}
        self.step_id = 0
        self._limits = limits
        self._arrival_wait_s = arrival_wait_s
        self._arrived: OrderedDict[str, None] = OrderedDict()
        self._done: deque[str] = deque()
        self._done_lately = (0, 0)
        self._issued: deque[_Issued] = deque()
        self._due: dict[str, tuple[Tier, float]] = {}
        self._passes: dict[str, list[PassServed]] = {}
        """Of each request that has started, what it has been served."""
        self._losses: dict[str, int] = {}
        """How many times each request has lost its memory."""
        self._lost_often: dict[str, None] = {}
        self._kept_memory = KeptMemory()
        self._queue: dict[JobId, Queued] = {}
        self._none_can_start = False
        self._passed: Mapping[str, float] = {}
        self._ordered: list[Prefill] = []

    # Events

    def predicts(self, predictor: PrefillPredictor) -> None:
        """The replica has sent its predictor."""
        if predictor != self.rules.predictor:
            self.rules = replace(self.rules, predictor=predictor)

    def must_stop(self, bound: StopBound) -> None:
        """The replica has said how soon steps must be able to stop."""
        if bound != self.rules.stop:
            self.rules = replace(self.rules, stop=bound)

    def job_arrived(self, job: str, request: str, prefill: Prefill, now_s: float) -> None:
        """A job has reached the engine."""
        self.jobs[job] = request
        self._arrived[job] = None
        while len(self._arrived) > _REMEMBER_JOBS:
            self._arrived.popitem(last=False)
        weight, targets = prefill.weight, self.rules.targets
        if targets is not None:
            self._due[job] = prefill.tier, prefill.deadline_s
            targets.arrived(prefill.tier, prefill.work_s, now_s)
            weight *= targets.state.price(prefill.tier)
        if self.rules.forecast is not None:
            self.rules.forecast.arrived(prefill.work_s, weight, now_s)

    def has_arrived(self, job: str) -> bool:
        """Whether a job has reached the engine, even if it has left since."""
        return job in self._arrived

    def job_left(self, job: str, request: str) -> None:
        """A request has left the engine; its job is empty if it had none.

        Where the job has come again meanwhile, as the replica was called twice, it has not left with it.
        """
        self.suspensions.ended(request)
        self._passes.pop(request, None)
        self._losses.pop(request, None)
        self._lost_often.pop(request, None)
        if self.jobs.get(job) == request:
            del self.jobs[job]
            self._due.pop(job, None)
            self._queue.pop(JobId(job), None)

    def started_over(self, item: Queued) -> None:
        """A request has lost its KV blocks, and waits as if it had never started.

        Its class has not had what was computed of it.
        """
        passes = self._passes.pop(item.request, ())
        losses = self._losses[item.request] = self._losses.get(item.request, 0) + 1
        if losses >= _OFTEN:
            self._lost_often[item.request] = None
        if self.rules.fairness is not None:
            self.rules.fairness.work_lost(passes)
        job_id = item.prefill.job_id
        if job_id not in self._queue:  # but a suspended step may stand in the order under its name
            self._ordered = [prefill for prefill in self._ordered if prefill.job_id != job_id]
            self._ordered.append(item.prefill)
        self._queue[job_id] = item

    def job_done(self, job: str, now_s: float) -> None:
        """The prefill of a job is complete."""
        self._done.append(job)
        before, of_this = self._done_lately
        self._done_lately = before, of_this + 1
        while len(self._done) > max(_REMEMBER_DONE, sum(self._done_lately)):
            self._done.popleft()
        if (due := self._due.pop(job, None)) is not None and self.rules.targets is not None:
            self.rules.targets.ended(*due, now_s)

    def step_issued(
        self, command: Start | Resume | Wait, members: Sequence[Member], now_s: float
    ) -> StepView:
        """The step that was chosen runs, with these members, whose suspension ends now if it is resumed."""
        self.step_id += 1
        from_boundary, boost = 0, None if isinstance(command, Wait) else command.boost
        if isinstance(command, Resume):
            from_boundary = command.step.boundary
            self.suspensions.resume(command.step, now_s)
            members = [self._charged(member, now_s) for member in members]
        else:
            members = [self._begun(member) for member in members]
        step_tokens, pairs, behind_tokens = 0, 0.0, 0
        by_request: dict[str, tuple[Tier, int]] = {}
        for request, prefill, new, new_pairs, behind in members:
            step_tokens += new
            pairs += new_pairs
            behind_tokens += behind
            by_request[request] = prefill.tier, new
            self._passes.setdefault(request, [])
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
        self._issued.append(_Issued(view, by_request, boost))
        return view

    def _begun(self, member: Member) -> Member:
        if not self.suspensions.begins(member.request, member.behind_tokens):
            return member
        before = member.prefill.preemptions
        prefill = msgspec.structs.replace(member.prefill, preemptions_before=before, suspended_s=0.0)
        return member._replace(prefill=prefill)

    def _charged(self, member: Member, now_s: float) -> Member:
        suspended_s = self.suspensions.suspended_s(member.request, now_s)
        return member._replace(prefill=msgspec.structs.replace(member.prefill, suspended_s=suspended_s))

    def step_ended(self, now_s: float) -> None:
        """The running step has ended or stopped: charge it to the classes of its members."""
        if not self._issued:
            return
        issued = self._issued.popleft()
        self._done_lately = self._done_lately[1], 0
        if self._issued:
            started = msgspec.structs.replace(self._issued[0].view, started_s=now_s)
            self._issued[0] = self._issued[0]._replace(view=started)
        if self.rules.fairness is not None:
            seconds, by_tier = now_s - issued.view.started_s, dict[Tier, int]()
            for request, (tier, tokens) in issued.members.items():
                by_tier[tier] = by_tier.get(tier, 0) + tokens
                if (passes := self._passes.get(request)) is not None:  # it is still here
                    passes.append(PassServed(tier, seconds * tokens / issued.view.tokens, now_s))
            predicted_s = self.rules.predictor.pass_s(issued.view.tokens, issued.view.pairs) or math.inf
            self.rules.fairness.step_ended(by_tier, seconds, now_s, issued.boost, predicted_s)

    def step_preempted(self, step: SuspendedStep, now_s: float) -> None:
        """The last step, which has ended, stopped on the way; it is kept for members that are still there."""
        step.arrival_by_s = now_s + self._arrival_wait_s
        if step.members:
            self.suspensions.suspend(step)
        elif step.boundary:
            self.suspensions.discard(step.step_id)

    # Commands

    def next_step(
        self,
        queue: Sequence[Queued],
        suspended: Sequence[Suspended],
        free_blocks: int,
        now_s: float,
        *,
        refused: bool = False,
        memory: Memory = NOTHING_ELSE,
    ) -> Command:
        """What to do now; `memory` as for `choose`.

        What was chosen last may have been `refused`: it looked as if it would fit, and did not. Then nobody
        finds room but in what others give up. Where nobody finds any, who has started goes on.
        """
        if self._issued and not self._may_issue_ahead():
            return Wait()
        if suspended and (excess := in_excess(suspended, now_s, self._limits)):
            return StartOver(tuple(request for step in excess for request in step.members))
        self._queue = {item.prefill.job_id: item for item in queue}
        self._ordered = in_order(queue, suspended, now_s, self.rules)
        room = 0 if refused else free_blocks
        is_kept = self._kept_memory.is_kept(now_s)
        memory = replace(memory, lost_often=tuple(self._lost_often), is_kept=is_kept)
        command = choose(queue, suspended, room, now_s, self.rules, self._ordered, memory)
        self._none_can_start = isinstance(command, Resume) and command.none_can_start
        if not suspended and isinstance(command, Wait):
            if command.starves is not None and self.rules.fairness is not None:
                self._kept_memory.starves(self.rules.fairness.share(command.starves), free_blocks, now_s)
            going_on = self._going_on(queue, free_blocks, now_s, memory)
            if isinstance(going_on, Start):
                command, self._none_can_start = going_on, True
        self._passed = {} if isinstance(command, Wait) else command.passed
        if not isinstance(command, Wait) and command.boost is not None and command.boost.guard == math.inf:
            self._kept_memory.started()
        return command

    def _going_on(
        self, queue: Sequence[Queued], free_blocks: int, now_s: float, memory: Memory
    ) -> Start | Resume | Wait:
        """What those that have started can do, although nobody may start: together, or one that fits."""
        started = [item for item in queue if item.held_blocks]
        command = choose(started, (), free_blocks, now_s, self.rules, memory=memory)
        for item in started:
            if isinstance(command, Wait):
                command = choose([item], (), free_blocks, now_s, self.rules, memory=memory)
        return command

    def _may_issue_ahead(self) -> bool:
        """Whether one step may follow on that which runs, without the host's time between them."""
        (running, *others) = self._issued
        step_s = self.rules.predictor.pass_s(running.view.tokens, running.view.pairs)
        return not others and step_s <= COMPOSED_AHEAD_S

    # What is published

    @property
    def running(self) -> StepView | None:
        """The step that runs."""
        return self._issued[0].view if self._issued else None

    def view(self, suspended: Sequence[SuspendedView]) -> SchedulerView:
        """The step that runs and what waits behind it, in the order in which it would run."""
        queue = self._queue
        waiting = [item for prefill in self._ordered if (item := queue.get(prefill.job_id)) is not None]
        if self._issued:
            members = frozenset[str]().union(*[step.members for step in self._issued])
            waiting = [item for item in waiting if item.request not in members]
        fairness, targets = self.rules.fairness, self.rules.targets
        return SchedulerView(
            self.running,
            tuple(waiting),
            tuple(suspended),
            tuple(self._done),
            None if fairness is None else fairness.standing,
            None if targets is None else targets.state,
            self._none_can_start,
            dict(self._passed),
        )
