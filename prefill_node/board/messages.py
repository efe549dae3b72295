"""What the engine's scheduler tells the governor through the board, and what the governor answers.

Plain values that cross processes of one host; all times are seconds on CLOCK_MONOTONIC, which those share.
Prefills are told as the decision rules see them (`slo.queue.prefill.Prefill`), by the scheduler's predictor
and accounts, so that nobody works out anew what is left of one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from slo.queue.class_targets import TargetState
from slo.queue.prefill import Prefill
from slo.queue.shares import FairnessState


class StepView(msgspec.Struct, frozen=True, array_like=True):
    """A forward pass as the scheduler issued it.

    Attributes:
        step_id: Identity; only grows.
        members: Its prefills, the remaining time that of what lies behind the step alone; with an empty job
            id for work that the governor does not know.
        tokens: Prompt tokens that the whole step computes.
        pairs: Their `slo.predict.prefill_time.attention_pairs`.
        from_boundary: Where it starts: 0, or the boundary of the checkpoint that it resumes.
        stoppable: Whether the governor has been told enough about it to stop it.
        guard: Only waiters of a higher weight or of its class may stop it; see
            `slo.preemption.types.RunningStep`.
        behind_tokens: Prompt tokens of its members that lie behind it.
    """

    step_id: int
    members: tuple[Prefill, ...]
    tokens: int
    pairs: float
    from_boundary: int
    started_s: float
    stoppable: bool = True
    guard: float = 0.0
    behind_tokens: int = 0

    @property
    def jobs(self) -> tuple[str, ...]:
        """Job ids of its members."""
        return tuple([member.job_id for member in self.members])


class Queued(msgspec.Struct, frozen=True, array_like=True):
    """A prefill that can start, or go on with its next chunk.

    Attributes:
        tokens: Prompt tokens still to compute.
        pairs: Their `slo.predict.prefill_time.attention_pairs`.
        missing_blocks: KV blocks that it needs and does not hold, for the whole prompt.
        request: The engine's name for it.
        has_started: Whether the engine computes it already, a chunk at a time.
    """

    prefill: Prefill
    tokens: int
    pairs: float
    missing_blocks: int
    held_blocks: int = 0
    request: str = ""
    has_started: bool = False


class SuspendedView(msgspec.Struct, frozen=True, array_like=True):
    """A step that was stopped and waits to be resumed.

    Attributes:
        members: Its prefills. Each has the remaining time of the whole step and of what lies behind it, and
            the suspended time before `since_s`.
        tokens: Prompt tokens that the whole step computes.
        done: The fraction of its forward pass that need not be repeated.
        checkpoint_bytes: Bytes that its checkpoint holds beside KV blocks, on each rank.
        preempted_by: The job that it was preempted for; while others can run, it does not resume before that
            one has ended or is infeasible.
        protects_until_s: Until when that job is feasible while it waits in the engine.
        behind_tokens: Prompt tokens of its members that lie behind it.
    """

    members: tuple[Prefill, ...]
    tokens: int
    done: float
    checkpoint_bytes: int
    since_s: float
    preempted_by: str
    protects_until_s: float = -math.inf
    behind_tokens: int = 0

    @property
    def jobs(self) -> tuple[str, ...]:
        """Job ids of its members."""
        return tuple([member.job_id for member in self.members])


class SchedulerView(msgspec.Struct, frozen=True, array_like=True):
    """Everything that the governor needs to know about the engine.

    A job that is accepted and that the view does not name has not reached the engine yet, or stands behind
    those that had room on the board: either way nothing of it has been computed.

    Attributes:
        step: The forward pass that runs; None between steps.
        queue: What waits and is not suspended, in the order in which it would run.
        suspended: Steps that wait to be resumed, in the order in which they stopped.
        done: The jobs whose prefill was completed last; the replica may not have heard of it yet.
        fairness: What the order of the queue owes to which class; None for nothing.
        targets: How many misses each class has used up; None when all requests are alike.
        none_can_start: A stopped step, or a prompt that had started, goes on because nobody in the queue
            could start: to stop it for them again would help nobody.
        passed: The jobs before the step in the order that found no memory, and until when each lets others
            run; infinite where it could take the memory of nobody. A stop helps none of them before.
    """

    step: StepView | None = None
    queue: tuple[Queued, ...] = ()
    suspended: tuple[SuspendedView, ...] = ()
    done: tuple[str, ...] = ()
    fairness: FairnessState | None = None
    targets: TargetState | None = None
    none_can_start: bool = False
    passed: dict[str, float] = {}


class Reached(NamedTuple):
    """The step that a rank is in, and the last boundary of it that it has reached."""

    step_id: int
    boundary: int


class StopOrder(msgspec.Struct, frozen=True, array_like=True):
    """The governor's last order.

    Attributes:
        step_id: The step to be stopped; a step with another id takes no notice.
        beneficiary: The job that it is preempted for; empty when its own clients are gone.
        reason: A value of `slo.preemption.types.PreemptReason`.
    """

    step_id: int
    beneficiary: str
    reason: str
    ordered_s: float
