"""What a prefill replica runs next: a step of waiting prefills, or one that was suspended.

Pure: no clock, no engine. Owns the choice and what is given up when KV memory is short; the order among
requests is `slo.queue.order`, who shares a step `slo.queue.batching`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from slo.queue.batching import Candidate, compose_step
from slo.queue.order import QueueOrder, order
from slo.queue.slack import slack_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefill_node.engine.stepping.suspension import SuspendedStep
    from slo.predict.prefill_time import PrefillPredictor
    from slo.queue.arrival_forecast import Forecast
    from slo.queue.fairness import Boost, Fairness
    from slo.queue.prefill import Prefill
    from slo.request import JobId


class Queued(msgspec.Struct, frozen=True):
    """A prefill that can start, or go on with its next chunk.

    Attributes:
        prefill: As the decision rules see it; its job id is the engine's request id here.
        tokens: Prompt tokens still to compute.
        pairs: Their `slo.predict.prefill_time.attention_pairs`.
        missing_blocks: KV blocks that it needs and does not hold, for the whole prompt.
        held_blocks: KV blocks that it holds.
    """

    prefill: Prefill
    tokens: int
    pairs: float
    missing_blocks: int
    held_blocks: int = 0


class Suspended(msgspec.Struct, frozen=True):
    """A suspended step that could go on.

    Attributes:
        step: The step.
        prefill: Its most urgent member, worth as much as all of them.
        held_blocks: KV blocks of its members.
        blocked: The job that it yielded to is still to be served.
        awaits_arrival: That job has not even reached the engine.
        overdue: A member has been suspended for as long as a request may be.
    """

    step: SuspendedStep
    prefill: Prefill
    held_blocks: int
    blocked: bool = False
    awaits_arrival: bool = False
    overdue: bool = False


class Start(msgspec.Struct, frozen=True):
    """Run these requests in a step of their own, after dropping what stands in the way of their memory.

    `lead` is the right by which the first of them runs; None for its deadline.
    """

    requests: tuple[str, ...]
    drop_steps: tuple[SuspendedStep, ...] = ()
    drop_requests: tuple[str, ...] = ()
    boost: Boost | None = None


class Resume(msgspec.Struct, frozen=True):
    """Issue a suspended step again; `lead` as for `Start`."""

    step: SuspendedStep
    boost: Boost | None = None


class Wait(msgspec.Struct, frozen=True):
    """Run nothing: there is nothing, or a beneficiary is about to arrive, or memory about to be freed."""


Choice: TypeAlias = Start | Resume | Wait


@dataclass(frozen=True, slots=True)
class ChoiceRules:
    """How to choose.

    Attributes:
        queue_order: Which prefill goes first.
        predictor: Time of a forward pass.
        join_tokens: Prompts share a step while they have no more tokens together.
        forecast: What is expected to arrive; None for nothing.
        fairness: What is owed to those that would be left behind; None for nothing.
    """

    queue_order: QueueOrder
    predictor: PrefillPredictor
    join_tokens: int
    forecast: Forecast | None = None
    fairness: Fairness | None = None


def choose(
    queue: Sequence[Queued],
    suspended: Sequence[Suspended],
    free_blocks: int,
    now_s: float,
    rules: ChoiceRules,
) -> Choice:
    """Choose the next step.

    Nothing runs while a step has just made way for a job that has not reached the engine yet. A suspended
    step does not go on before the job that it yielded to is served, unless a member has been suspended for as
    long as it may be, or nothing else can run. The first in order that fits in memory runs.
    One that does not fit waits for suspended steps to finish if its slack allows, and takes the memory of
    those worth no more than itself, least valuable first, if not. One that nothing may stop, as its class
    would starve, may take anybody's, and as long as it does not fit nothing else starts.
    """
    overdue = [item for item in suspended if item.overdue]
    if overdue:
        return Resume(min(overdue, key=lambda item: item.step.since_s).step)
    if any(item.awaits_arrival for item in suspended):
        return Wait()  # whatever started now would be in the way of the one that the replica was cleared for
    ready = [item for item in suspended if not item.blocked]
    if (choice := _first_that_fits(queue, ready, suspended, (free_blocks, now_s), rules)) is not None:
        return choice
    if suspended:
        return Resume(min(suspended, key=lambda item: item.prefill.deadline_s).step)
    return Wait()


def _first_that_fits(
    queue: Sequence[Queued],
    ready: Sequence[Suspended],
    suspended: Sequence[Suspended],
    room: tuple[int, float],
    rules: ChoiceRules,
) -> Choice | None:
    """The first in order that can run with `room`, which is free blocks and the time; None when none can."""
    free_blocks, now_s = room
    steps = {item.prefill.job_id: item for item in ready}
    queued = {item.prefill.job_id: item for item in queue}
    waiting = [item.prefill for item in queue] + [item.prefill for item in ready]
    fairness = rules.fairness
    ordered = order(rules.queue_order, waiting, now_s, forecast=rules.forecast, fairness=fairness)
    for position, first in enumerate(ordered):
        boost = None if fairness is None else fairness.boost_of(first, now_s)
        if (resumable := steps.get(first.job_id)) is not None:
            return Resume(resumable.step, boost)
        missing = queued[first.job_id].missing_blocks
        if missing <= free_blocks:
            behind = _until_suspended(ordered[position:], queued)
            return Start(_joined(behind, free_blocks, now_s, rules), boost=boost)
        room_s = slack_s(first.deadline_s, now_s, first.remaining_s)
        may_take = first.weight if boost is None else max(first.weight, boost.guard)
        if may_take < math.inf and any(room_s >= step.prefill.remaining_s for step in ready):
            continue
        if (tardy := _give_up(first, may_take, missing - free_blocks, queue, suspended)) is not None:
            return msgspec.structs.replace(tardy, boost=boost)
        if may_take == math.inf:
            return None
    return None


def _until_suspended(ordered: Sequence[Prefill], queued: dict[JobId, Queued]) -> list[Queued]:
    """The prefills ahead of the first suspended step: nobody joins a step past one that would go first."""
    ahead: list[Queued] = []
    for prefill in ordered:
        if (item := queued.get(prefill.job_id)) is None:
            break
        ahead.append(item)
    return ahead


def _joined(ahead: Sequence[Queued], free_blocks: int, now_s: float, rules: ChoiceRules) -> tuple[str, ...]:
    fitting: list[Queued] = []
    for item in ahead:
        free_blocks -= item.missing_blocks
        if free_blocks < 0:
            break
        fitting.append(item)
    candidates = [Candidate(item.tokens, item.prefill.deadline_s, item.pairs) for item in fitting]
    step = compose_step(candidates, now_s, rules.predictor, rules.join_tokens)
    return tuple(item.prefill.job_id for item in fitting[: step.size])


def _give_up(
    first: Prefill,
    may_take: float,
    short_blocks: int,
    queue: Sequence[Queued],
    suspended: Sequence[Suspended],
) -> Start | None:
    """Drop holders of memory worth up to `may_take` until `first` fits; None when that is not enough."""
    holders: list[Queued | Suspended] = [
        *(item for item in suspended if not item.overdue),
        *(item for item in queue if item.held_blocks and item.prefill.job_id != first.job_id),
    ]
    holders = [item for item in holders if item.prefill.weight <= may_take]
    holders.sort(key=lambda item: (item.prefill.weight, -item.prefill.deadline_s, -item.prefill.remaining_s))
    dropped: list[Queued | Suspended] = []
    for item in holders:
        if short_blocks <= 0:
            break
        dropped.append(item)
        short_blocks -= item.held_blocks
    if short_blocks > 0:
        return None
    return Start(
        (first.job_id,),
        tuple(item.step for item in dropped if isinstance(item, Suspended)),
        tuple(item.prefill.job_id for item in dropped if isinstance(item, Queued)),
    )
