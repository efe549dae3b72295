"""What a replica tells about itself: the router, in messages, and whoever asks, whether it is there.

Messages carry budgets, not deadlines: the receiver's clock is another one.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final, TypeAlias, assert_never

import msgspec

from slo.decode.headroom import DecodeLoad
from slo.model_digest import UNTOLD, ModelDigest
from slo.monitor.messages import Role
from slo.predict.prefill_time import PrefillPredictor
from slo.protocol import Message
from slo.request import JobId, Party, ReplicaId
from slo.tiers import Tier

PACE_HOLDS_S: Final = 30.0
"""What the pace of a decode engine was so long ago says nothing of what it is: whatever made it slow may be
over."""


class OutstandingJob(msgspec.Struct, frozen=True):
    """A prefill as a replica reports it.

    Attributes:
        tokens: Tokens still to compute.
        budget_s: What is left of its budget when the replica reports; None for no deadline.
        work_s: Predicted seconds of the work still to do, progress and cached prefix credited, in passes that
            it shares with others; None leaves the prediction to the receiver.
    """

    job_id: JobId
    tier: Tier
    tokens: int
    budget_s: float | None
    work_s: float | None = None


@dataclass(frozen=True, slots=True)
class PrefillReported(Message):
    """A prefill replica has reported its work.

    Attributes:
        jobs: Everything that it has accepted and not finished, and behind that what waits for a place there.
        running: The job whose forward pass is under way; it stands for all in the same pass.
        running_for_s: How much of that pass's predicted time is behind it.
        preemptible_in_s: How soon the pass would make way for a more urgent prefill: stop, in the mean, or
            end where more of its prompts lies behind it; None when it would not.
        kv_usage: Fraction of its KV blocks in use.
        ended: Jobs that ended since the last report, however they ended.
        learned: (tenant, prompt bytes, tokens) of prompts whose length became known since the last report.
        kv_tokens: Tokens that its KV memory holds; 0 leaves it open.
        hits: (job, prompt tokens that its prefix cache held) of prefills that started or ended since the last
            report.
        draining: Whether it is being shut down: it finishes what it has and takes no more.
        caches_prefixes: Whether it keeps the KV cache of prompts for others that begin alike.
        digest: Of the model that it serves.
        unlearned: What its predictor was before it had learned from passes; None where it learns from none.
    """

    replica_id: ReplicaId
    predictor: PrefillPredictor
    jobs: tuple[OutstandingJob, ...]
    running: JobId | None
    running_for_s: float
    preemptible_in_s: float | None = None
    kv_usage: float = 0.0
    ended: tuple[JobId, ...] = ()
    learned: tuple[tuple[str, int, int], ...] = ()
    kv_tokens: int = 0
    hits: tuple[tuple[JobId, int], ...] = ()
    draining: bool = False
    caches_prefixes: bool = True
    digest: ModelDigest = UNTOLD
    unlearned: PrefillPredictor | None = None


class AwaitedKv(msgspec.Struct, frozen=True):
    """A request on a decode replica whose KV cache is not there yet.

    Attributes:
        tokens: That its KV cache will have; 0 where nobody has counted them.
    """

    job_id: JobId
    tier: Tier
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class DecodeReported(Message):
    """A decode replica has reported its load.

    Attributes:
        kv_usage: Fraction of its KV blocks in use.
        running: Requests that it has, those included that wait for a place or whose prefill still runs.
        kv_tokens: Tokens that its KV memory holds; 0 leaves it open.
        tpot_s: Recent time per output token of a stream, of which a step may bring several; None when no
            token came since the last report.
        draining: Whether it is being shut down: it finishes what it has and takes no more.
        local_prefills: How many prompts it is to compute itself and has not computed yet, by whose they are.
        local_prompt_s: Recent seconds from the end of one of them to the end of the next.
        load: What its streams hold and will hold; None when its engine does not say.
        awaited: Those of its requests that wait for a place, whose prefill waits or runs, or whose KV it has
            not got yet.
        caches_prefixes: Whether requests share the KV cache of prompts that begin alike.
        digest: Of the model that it serves.
        has_pulled: Whether a KV cache has come to it from a prefill replica.
        waiting: Requests for which its engine has no memory, or no place, yet.
    """

    replica_id: ReplicaId
    kv_usage: float
    running: int
    kv_tokens: int = 0
    tpot_s: float | None = None
    draining: bool = False
    local_prefills: Mapping[Party, int] = field(default_factory=dict)
    local_prompt_s: float = 1.0
    load: DecodeLoad | None = None
    awaited: tuple[AwaitedKv, ...] = ()
    caches_prefixes: bool = True
    digest: ModelDigest = UNTOLD
    has_pulled: bool = False
    waiting: int = 0


class EngineEnd(enum.StrEnum):
    """How an engine ended while its replica served; the values label a metric."""

    FAILED = "failed"
    HUNG = "hung"
    VOTE_TIMEOUT = "vote_timeout"


@dataclass(frozen=True, slots=True)
class ReplicaGone(Message):
    """A replica serves nothing any more.

    It was shut down, its engine has died, or whoever called it found it lost.

    Attributes:
        ended: Its role and how its engine ended, where the replica itself reports that; None otherwise.
    """

    replica_id: ReplicaId
    ended: tuple[Role, EngineEnd] | None = None


Report: TypeAlias = PrefillReported | DecodeReported | ReplicaGone


def who_is_up(own: ReplicaId, asked: ReplicaId | None, *, is_dead: bool) -> ReplicaId | None:
    """What a replica answers to the question whether one is there: who it is; None when its engine is dead.

    The question for one that Serve no longer sends to comes to another, whose own state is no answer to it.

    Args:
        own: Whose answer it is.
        asked: Who is meant; None for anybody.
        is_dead: Whether its engine is dead.
    """
    return None if is_dead and asked in (None, own) else own


def unsound(report: Report) -> str | None:
    """What in a report is no number that can be reckoned with; None for nothing.

    One that is not a number is above no limit, so that nothing would ever be refused for it again.
    """
    names: tuple[str, ...]
    match report:
        case PrefillReported():
            for which in ("predictor", "unlearned"):
                if (wrong_part := _unsound_part(getattr(report, which))) is not None:
                    return f"{which}.{wrong_part}"
            names = ("running_for_s", "preemptible_in_s", "kv_usage")
            for job in report.jobs:
                if not (_is_finite(job.work_s) and _is_finite(job.budget_s)):
                    return f"work_s and budget_s of {job.job_id} are {job.work_s} and {job.budget_s}"
        case DecodeReported():
            names = ("kv_usage", "tpot_s")
            if not _is_finite(report.local_prompt_s):
                return f"local_prompt_s is {report.local_prompt_s}"
            if report.load is not None and not _is_finite(report.load.step_s):
                return f"load.step_s is {report.load.step_s}"
        case ReplicaGone():
            return None
        case _:
            assert_never(report)
    wrong = [f"{name} is {getattr(report, name)}" for name in names if not _is_finite(getattr(report, name))]
    return ", ".join(wrong) or None


def _unsound_part(line: PrefillPredictor | None) -> str | None:
    if line is None:
        return None
    values = ((part.name, getattr(line, part.name)) for part in fields(line))
    return next((f"{name} is {value}" for name, value in values if not 0 <= value < math.inf), None)


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)
