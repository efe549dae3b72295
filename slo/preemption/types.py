"""The terms in which preemption is decided: what runs, what waits, what is allowed, what is decided and why.

Owns values alone; the rules are `slo.preemption.decide`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from slo.queue.prefill import Prefill
from slo.request import JobId


class PreemptionMode(enum.StrEnum):
    """Whether a stopped step later continues where it stopped or starts again; off when none is stopped."""

    RESUME = "resume"
    RECOMPUTE = "recompute"
    OFF = "off"


class PreemptionPolicy(enum.StrEnum):
    """When a feasible waiter preempts a feasible runner.

    `CONSERVATIVE` and `AGGRESSIVE` (FlowPrefill, arXiv 2602.16603) compare the waiter's deadline with that of
    the most and of the least urgent member of the step. `RESCUE` stops a step only for a waiter that would
    otherwise be late and has more weight than all that become late by it. `FEASIBLE_SET`
    (`slo.preemption.feasible_set_policy`) weighs the step against all waiters together, not one by one.
    """

    CONSERVATIVE = "conservative"
    AGGRESSIVE = "aggressive"
    RESCUE = "rescue"
    FEASIBLE_SET = "feasible_set"


class PreemptReason(enum.StrEnum):
    """Why a running step is stopped; the values label metrics."""

    RUNNER_INFEASIBLE = "runner_infeasible"
    RUNNER_TARDY = "runner_tardy"
    """Not everybody can be on time, and others have more value per second of work."""
    RESCUE = "rescue"
    BEATS_MOST_URGENT = "beats_most_urgent"
    BEATS_LEAST_URGENT = "beats_least_urgent"
    DIRECTED = "directed"
    """The cluster's monitor ordered it (`slo.monitor.directives`)."""
    ABANDONED = "abandoned"
    """Nobody wants its result any more. Decided by whoever knows the clients, never by `decide`."""


class KeepReason(enum.StrEnum):
    """Why a running step goes on; the values label metrics."""

    OFF = "off"
    IDLE = "idle"
    NOBODY_WAITS = "nobody_waits"
    NOT_STOPPABLE = "not_stoppable"
    ENDS_SOONER = "ends_sooner"
    """The step ends before a stop would take effect."""
    MAX_PREEMPTIONS = "max_preemptions"
    MAX_SUSPENDED_TIME = "max_suspended_time"
    SUSPENDED_STEPS = "suspended_steps"
    SUSPENDED_BYTES = "suspended_bytes"
    STUBBORN = "stubborn"
    """It would be recomputed, and most of it is done."""
    WAITERS_IN_TIME = "waiters_in_time"
    PATIENCE = "patience"
    """Who needs the stop still has time for it; the step may end first, and others may share the stop."""
    WAITERS_INFEASIBLE = "waiters_infeasible"
    MARGIN = "margin"
    """The step is not due later than the waiter by the margin."""
    WOULD_HARM = "would_harm"
    CANNOT_SAVE = "cannot_save"
    """The waiter would be late even if the step were stopped."""
    PROTECTED = "protected"
    """The waiter was itself preempted, for a member of the step or for another job."""
    STARVING = "starving"
    """The step belongs to a class that has waited for too long; no waiter has enough weight to pass it."""


LAUNCH_AHEAD_S: Final = 0.002
"""How much work the host launches ahead of an accelerator, by default: enough that it does not starve."""
STOP_WITHIN_S: Final = 0.010
"""How long a stop takes at most on an accelerator, by default; chunks are cut to that."""
CPU_STOP_WITHIN_S: Final = 0.050
"""The same on CPU, where one operator of a long prompt can take half a second."""
PATIENCE: Final = 0.5
"""Within which part of its objective a first token is still to come that a step is stopped for, on an
accelerator and by default; on a CPU none, so that steps are stopped at once."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of preemption; a step that has reached one of them runs to its end.

    Attributes:
        max_preemptions: Stops of one request, of a long one within a chunk.
        max_suspended_s: Seconds of suspension of one request, of a long one within a chunk, over all its
            stops.
        max_suspended_steps: Steps suspended on the replica at a time.
        max_suspended_bytes: Bytes of their checkpoints beside KV blocks, on each rank.
        stubborn_after: Fraction of a step after which it is not stopped to be recomputed.
    """

    max_preemptions: int = 64
    max_suspended_s: float = 600.0
    max_suspended_steps: int = 32
    max_suspended_bytes: int = 2 << 30
    stubborn_after: float = 0.5

    @staticmethod
    def default_for(mode: PreemptionMode) -> Limits:
        """Limits that suit a mode: recomputing pays for each stop with the work done so far."""
        return Limits(max_preemptions=1) if mode is PreemptionMode.RECOMPUTE else Limits()


class RunningStep(msgspec.Struct, frozen=True):
    """The forward pass under way.

    Attributes:
        members: The prefills in it, at least one.
        remaining_s: Predicted seconds to its end; a member whose prompt is longer than the step has more.
        restart_s: Predicted seconds to compute it again from its start.
        progress: Fraction of its boundaries that it has passed, 0 to 1.
        stoppable: Whether it looks at stop orders at all.
        checkpoint_bytes: Bytes that stopping it would keep beside KV blocks, on each rank.
        boundary_s: Longest time between two of its boundaries; a stop takes effect at the next one.
        guard: Only waiters of a higher weight or of its own class may stop it, as that class would otherwise
            starve (`slo.queue.fairness`). Infinite: no other class may.
    """

    step_id: int
    members: tuple[Prefill, ...]
    remaining_s: float
    restart_s: float
    progress: float = 0.0
    stoppable: bool = True
    checkpoint_bytes: int = 0
    boundary_s: float = 0.0
    guard: float = 0.0


class ReplicaState(msgspec.Struct, frozen=True):
    """What runs and what waits.

    Attributes:
        waiting: Waiting prefills in the queue's order, which `FEASIBLE_SET` does not need; each suspended
            step is one (`slo.preemption.decide.as_one`).
    """

    running: RunningStep | None
    waiting: Sequence[Prefill]
    suspended_steps: int = 0
    suspended_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PreemptionRules:
    """The rules in force.

    Attributes:
        margin: At least 1. `FEASIBLE_SET` and `RESCUE` assume that the runner takes this many times its
            predicted time. With the other policies and `RESCUE`, the runner's deadline must be more than this
            many times as far away as the waiter's.
        patience: From 0 to 1. `FEASIBLE_SET` stops a step only when a waiter's first token would otherwise
            not come within this part of its objective; 0 for at once, 1 for the last moment.

    Raises:
        ValueError: if the margin is less than 1, or the patience no fraction.
    """

    mode: PreemptionMode = PreemptionMode.RESUME
    policy: PreemptionPolicy = PreemptionPolicy.FEASIBLE_SET
    margin: float = 3.0
    limits: Limits = field(default_factory=Limits)
    patience: float = 0.0

    def __post_init__(self) -> None:  # noqa: D105 - see Raises
        if not self.margin >= 1.0:
            raise ValueError(f"a preemption margin is at least 1, not {self.margin}")
        if not 0.0 <= self.patience <= 1.0:
            raise ValueError(f"a patience is from 0 to 1, not {self.patience}")


class Preempt(msgspec.Struct, frozen=True):
    """Stop the step; `beneficiary` and all that wait before it run before it is resumed."""

    step_id: int
    beneficiary: JobId
    reason: PreemptReason


class Keep(msgspec.Struct, frozen=True):
    """Let the step go on, and decide anew at `recheck_at_s` if it still runs; infinite for never."""

    reason: KeepReason
    recheck_at_s: float = math.inf


PreemptionDecision: TypeAlias = Preempt | Keep
