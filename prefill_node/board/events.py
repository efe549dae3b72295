"""What the engine's scheduler reports to the replica process after the fact, for metrics, spans and logs.

Times are seconds on CLOCK_MONOTONIC, which the processes of a host share.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec


class DropReason(enum.StrEnum):
    """Why what had been computed of a job was wasted; the values label metrics."""

    MEMORY = "memory"
    ABANDONED = "abandoned"


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """A step stopped.

    Attributes:
        jobs: Its members that are still wanted.
        beneficiary: The job that it was preempted for.
        reason: A value of `slo.preemption.types.PreemptReason`.
        boundary: Where it stopped.
        boundaries: Boundaries of a whole forward pass.
        computed: The fraction of the pass that lies before `boundary`.
        done: The fraction before the boundary where it goes on if it is kept.
        tokens: Prompt tokens of the step.
        pairs: Their `slo.predict.prefill_time.attention_pairs`.
        is_kept: Whether what was computed is kept; the work is wasted when not.
        checkpoint_bytes: What that takes on each rank beside KV blocks.
        ordered_s: When the governor ordered it.
    """

    step_id: int
    jobs: tuple[str, ...]
    beneficiary: str
    reason: str
    boundary: int
    boundaries: int
    computed: float
    done: float
    tokens: int
    pairs: float
    is_kept: bool
    checkpoint_bytes: int
    ordered_s: float
    stopped_s: float


class Resumed(msgspec.Struct, frozen=True, tag=True):
    """A suspended step was issued again.

    Attributes:
        boundary: Where it goes on; 0 when it is recomputed.
        first_operator_s: When its first layer began to compute.
    """

    jobs: tuple[str, ...]
    boundary: int
    suspended_s: float
    issued_s: float
    first_operator_s: float


class Served(msgspec.Struct, frozen=True, tag=True):
    """The job that a step was preempted for began to compute.

    Attributes:
        stopped_s: When the step stopped for it.
        first_operator_s: When its first layer began to compute.
    """

    job: str
    stopped_s: float
    first_operator_s: float


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """What a suspended step, or a prompt in chunks, had computed was wasted.

    Attributes:
        reason: A value of `DropReason`.
        done: The fraction of the step's forward pass that it had computed and kept; 1 of chunks.
        tokens: Prompt tokens of those jobs in the step; of one that is in none, in its chunks.
        pairs: Their `slo.predict.prefill_time.attention_pairs`.
        dropped_s: When; those that are still wanted wait from then on to start over.
        earlier_tokens: Prompt tokens in chunks before the suspended one, computed to the end.
        earlier_pairs: Theirs.
    """

    jobs: tuple[str, ...]
    reason: str
    done: float
    tokens: int
    pairs: float
    dropped_s: float
    earlier_tokens: int = 0
    earlier_pairs: float = 0.0


class Passed(msgspec.Struct, frozen=True, tag=True):
    """A whole forward pass ran from its beginning to its end.

    Attributes:
        tokens: Prompt tokens that it computed.
        pairs: Pairs of a query and a key that its attention looked at (`slo.predict.prefill_time`).
        seconds: From its issue to its end.
    """

    tokens: int
    pairs: float
    seconds: float


class Started(msgspec.Struct, frozen=True, tag=True):
    """A job is in a step for the first time, or for the first time since it lost its memory.

    Attributes:
        cached_tokens: Prompt tokens that the prefix cache held.
        issued_s: When the step was issued.
        is_first: Whether it had never started; otherwise the cache may have held what it left there itself.
    """

    job: str
    cached_tokens: int
    issued_s: float
    is_first: bool = True


Notice: TypeAlias = Stopped | Resumed | Served | Dropped | Passed | Started

encode = msgspec.msgpack.Encoder().encode
"""Makes one record of the board's event log."""
_DECODER: msgspec.msgpack.Decoder[Notice] = msgspec.msgpack.Decoder(Notice)
decode = _DECODER.decode
"""Reads a record written by `encode`."""
