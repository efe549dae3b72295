"""Which steps of a replica are suspended, and what each request has been through.

Pure: no clock, no engine. Owns the account of suspensions; `prefill_node.engine.stepping.step_choice` owns
what runs next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from slo.queue.prefill import Prefill


@dataclass(slots=True)
class SuspendedStep:
    """A step that was stopped.

    Attributes:
        step_id: The run that stopped; names its checkpoint.
        members: Tokens of the step by engine request id, in the order in which it is issued again.
        pairs: The `slo.predict.prefill_time.attention_pairs` of the whole step.
        boundary: Where it goes on; 0 without a checkpoint.
        done: The fraction of its forward pass that need not be repeated.
        checkpoint_bytes: What each rank keeps of it beside KV blocks.
        preempted_by: The job that it was preempted for, empty for none.
        arrival_by_s: Until when it waits for that job to reach the engine.
    """

    step_id: int
    members: dict[str, int]
    pairs: float
    boundary: int
    done: float
    checkpoint_bytes: int
    since_s: float
    preempted_by: str
    arrival_by_s: float = -math.inf

    @property
    def tokens(self) -> int:
        """Prompt tokens that the whole step computes."""
        return sum(self.members.values())


class Suspended(msgspec.Struct, frozen=True):
    """A suspended step that could go on.

    Attributes:
        prefill: Its most urgent member, with the weight of all of them.
        held_blocks: KV blocks of its members.
        blocked: The job that it was preempted for is still to be served.
        awaits_arrival: That job has not even reached the engine.
        overdue: A member has been suspended for as long as a request may be.
    """

    step: SuspendedStep
    prefill: Prefill
    held_blocks: int
    blocked: bool = False
    awaits_arrival: bool = False
    overdue: bool = False


@dataclass(slots=True)
class Account:
    """How often a request was stopped, and how long its closed suspensions within its chunk lasted in total.

    Attributes:
        preemptions_before: Of its stops, those before its chunk began.
        behind: Tokens of its prompt behind its chunk; infinite until one has begun that leaves some.
    """

    preemptions: int = 0
    preemptions_before: int = 0
    suspended_s: float = 0.0
    behind: float = math.inf


@dataclass(slots=True)
class Suspensions:
    """The suspended steps of a replica.

    Attributes:
        max_suspended_s: A suspended step goes first when a member has been suspended for so long in total.
        steps: In the order in which they stopped.
        accounts: By engine request id, of requests that have been stopped or are longer than a chunk.
    """

    max_suspended_s: float
    steps: list[SuspendedStep] = field(default_factory=list)
    accounts: dict[str, Account] = field(default_factory=dict)
    _discarded: list[int] = field(default_factory=list)

    def suspend(self, step: SuspendedStep) -> None:
        """A step stopped."""
        self.steps.append(step)
        for request in step.members:
            self.accounts.setdefault(request, Account()).preemptions += 1

    def begins(self, request: str, behind: int) -> bool:
        """A chunk of a request begins, with so many tokens of its prompt behind it.

        Returns:
            Whether its stops and their time are counted anew, as it has got on: a prompt of many chunks may
            be stopped more often.
        """
        if (account := self.accounts.get(request)) is None:
            if behind:
                self.accounts[request] = Account(behind=behind)
            return False
        gets_on = behind < account.behind < math.inf
        account.behind = behind
        if gets_on:
            account.preemptions_before, account.suspended_s = account.preemptions, 0.0
        return gets_on

    def resume(self, step: SuspendedStep, now_s: float) -> None:
        """A step is issued again; whoever runs it takes its checkpoint."""
        self.steps.remove(step)
        for request in step.members:
            self._charge(request, step, now_s)

    def drop(self, step: SuspendedStep, now_s: float) -> None:
        """A step loses its checkpoint, its members start over."""
        self.resume(step, now_s)
        self.discard(step.step_id)

    def forget(self, request: str, now_s: float, pairs: float = 0.0) -> None:
        """A request is gone or has lost its KV blocks; steps without members are dropped.

        `pairs` are its own of those of its step.
        """
        for step in list(self.steps):
            if request not in step.members:
                continue
            self._charge(request, step, now_s)
            del step.members[request]
            step.pairs -= pairs
            if not step.members:
                self.drop(step, now_s)

    def ended(self, request: str) -> None:
        """A request has left the engine."""
        self.accounts.pop(request, None)

    def discard(self, step_id: int) -> None:
        """A checkpoint that was taken is not needed: nobody is left in its step."""
        self._discarded.append(step_id)

    def take_discarded(self) -> tuple[int, ...]:
        """The steps whose checkpoints the workers can drop, since the last call."""
        discarded, self._discarded = tuple(self._discarded), []
        return discarded

    def step_of(self, request: str) -> SuspendedStep | None:
        """The suspended step that `request` is in."""
        return next((step for step in self.steps if request in step.members), None)

    def suspended_s(self, request: str, now_s: float) -> float:
        """Seconds that a request has been suspended within its chunk, an open suspension included."""
        step = self.step_of(request)
        return self.closed_s(request) + (0.0 if step is None else now_s - step.since_s)

    def is_overdue(self, step: SuspendedStep, now_s: float) -> bool:
        """Whether one of its members has been suspended for as long as a request may be."""
        open_s = now_s - step.since_s
        return any(self.closed_s(request) + open_s >= self.max_suspended_s for request in step.members)

    def closed_s(self, request: str) -> float:
        """Of these seconds, those of suspensions that have ended."""
        account = self.accounts.get(request)
        return 0.0 if account is None else account.suspended_s

    def _charge(self, request: str, step: SuspendedStep, now_s: float) -> None:
        if (account := self.accounts.get(request)) is not None:
            account.suspended_s += now_s - step.since_s
