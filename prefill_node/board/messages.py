"""What the engine's scheduler tells the governor through the board, and what the governor answers.

Plain values that cross processes of one host; all times are seconds on CLOCK_MONOTONIC, which those share.
"""

from __future__ import annotations

import msgspec


class StepView(msgspec.Struct, frozen=True, array_like=True):
    """A forward pass as the scheduler issued it.

    Attributes:
        step_id: Identity; only grows.
        jobs: Job ids of its members; an empty one for work that the governor does not know.
        tokens: Prompt tokens that the whole step computes.
        pairs: Their `slo.predict.prefill_time.attention_pairs`.
        from_boundary: Where it starts: 0, or the boundary of the checkpoint that it resumes.
        started_s: When the scheduler issued it.
        stoppable: Whether the governor has been told enough about it to stop it.
        guard: Only waiters of a higher worth or of its class may stop it; see
            `slo.preemption.types.RunningStep`.
    """

    step_id: int
    jobs: tuple[str, ...]
    tokens: int
    pairs: float
    from_boundary: int
    started_s: float
    stoppable: bool = True
    guard: float = 0.0


class SuspendedView(msgspec.Struct, frozen=True, array_like=True):
    """A step that was stopped and waits to be resumed.

    Attributes:
        jobs: Job ids of its members.
        tokens: Prompt tokens that the whole step computes.
        pairs: Their `slo.predict.prefill_time.attention_pairs`.
        done: The fraction of its forward pass that need not be repeated.
        boundary: Where it resumes; 0 when it has no checkpoint and is recomputed.
        checkpoint_bytes: Bytes that its checkpoint holds, on each rank.
        since_s: When it stopped.
        preempted_by: The job that it made way for; while others can run, it does not resume before that one
            has ended or is lost.
    """

    jobs: tuple[str, ...]
    tokens: int
    pairs: float
    done: float
    boundary: int
    checkpoint_bytes: int
    since_s: float
    preempted_by: str


class JobAccount(msgspec.Struct, frozen=True, array_like=True):
    """What a job has been through.

    Attributes:
        preemptions: How often it has been stopped.
        suspended_s: Seconds that it has been suspended, closed suspensions only.
        computed_tokens: Prompt tokens whose KV is complete, or will be with the running step.
    """

    preemptions: int
    suspended_s: float
    computed_tokens: int


class SchedulerView(msgspec.Struct, frozen=True, array_like=True):
    """Everything that the governor needs to know about the engine.

    Attributes:
        step: The forward pass that runs; None between steps.
        suspended: Steps that wait to be resumed.
        accounts: Jobs that have been stopped or computed in part; a job without an entry has not.
        done: The jobs whose prefill was completed last; the replica may not have heard of it yet.
    """

    step: StepView | None
    suspended: tuple[SuspendedView, ...]
    accounts: dict[str, JobAccount]
    done: tuple[str, ...] = ()


class StopOrder(msgspec.Struct, frozen=True, array_like=True):
    """The governor's last order.

    Attributes:
        step_id: The step to be stopped; a step with another id takes no notice.
        beneficiary: The job that it shall make way for; empty when its own clients are gone.
        reason: A value of `slo.preemption.types.PreemptReason`.
        ordered_s: When it was ordered.
    """

    step_id: int
    beneficiary: str
    reason: str
    ordered_s: float
