"""What a prefill replica runs next: a step of waiting prefills, or one that was suspended.

Pure: no clock, no engine. Owns the choice, whose KV memory is taken when it is short, and how much of the
limits of suspension late steps may take; the order among requests is `slo.queue.order`, who shares a step
`slo.queue.batching`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import msgspec

from prefill_node.board.messages import Queued
from prefill_node.engine.stepping.memory import NOTHING_ELSE, FreeRoom, Holder, Holders, Memory
from prefill_node.engine.stepping.suspension import Suspended, SuspendedStep
from slo.predict.prefill_time import PrefillPredictor
from slo.preemption.types import Limits
from slo.queue.arrival_forecast import Forecast
from slo.queue.batching import Candidate, compose_step
from slo.queue.chunks import StopBound
from slo.queue.class_targets import ClassTargets
from slo.queue.fairness import Boost, Fairness
from slo.queue.order import QueueOrder, order
from slo.queue.prefill import ROUNDED_TOKENS, Prefill
from slo.queue.slack import slack_s
from slo.request import JobId
from slo.tiers import Tier


class Start(msgspec.Struct, frozen=True):
    """Run these requests in a step of their own, after dropping what stands in the way of their memory.

    Attributes:
        boost: The right by which the first of them runs; None for its deadline.
        passed: Those before them in the order that do not fit, by job, and until when each lets others run:
            then it takes their memory, or never, which is infinite.
        most_tokens: What the step takes of them at most, for it to be stopped soon enough and for none to
            wait for what another was not expected to compute; infinite for what the engine takes.
    """

    requests: tuple[str, ...]
    drop_steps: tuple[SuspendedStep, ...] = ()
    drop_requests: tuple[str, ...] = ()
    boost: Boost | None = None
    most_tokens: float = math.inf
    passed: Mapping[str, float] = {}


class Resume(msgspec.Struct, frozen=True):
    """Issue a suspended step again; `boost` and `passed` as for `Start`.

    Attributes:
        none_can_start: It is not its turn, but nobody else can run.
    """

    step: SuspendedStep
    boost: Boost | None = None
    passed: Mapping[str, float] = {}
    none_can_start: bool = False


class Wait(msgspec.Struct, frozen=True):
    """Run nothing: there is nothing, or a beneficiary is about to arrive, or memory about to be freed.

    Attributes:
        starves: The tier of one that starves, for which memory is kept that it does not fit into yet.
    """

    starves: Tier | None = None


Choice: TypeAlias = Start | Resume | Wait


@dataclass(frozen=True, slots=True)
class ChoiceRules:
    """How to choose.

    Attributes:
        predictor: Time of a forward pass.
        join_tokens: Prompts share a step while they have no more tokens together; no more than the engine
            takes in one, of which it gives those first that have started.
        forecast: What is expected to arrive; None for nothing.
        fairness: What is owed to those that would be left behind; None for nothing.
        stop: How soon steps must be able to stop; None for no bound.
        targets: What each class aims at; None when all requests are alike.
        most_members: The engine runs no more requests in a step.
    """

    queue_order: QueueOrder
    predictor: PrefillPredictor
    join_tokens: int
    forecast: Forecast | None = None
    fairness: Fairness | None = None
    stop: StopBound | None = None
    targets: ClassTargets | None = None
    most_members: float = math.inf


def in_order(
    queue: Sequence[Queued], suspended: Sequence[Suspended], now_s: float, rules: ChoiceRules
) -> list[Prefill]:
    """The order in which they would run, those that wait for their beneficiary left out."""
    waiting = [item.prefill for item in queue] + [item.prefill for item in suspended if not item.blocked]
    targets = None if rules.targets is None else rules.targets.state
    return order(
        rules.queue_order,
        waiting,
        now_s,
        forecast=rules.forecast,
        fairness=rules.fairness,
        targets=targets,
    )


def choose(
    queue: Sequence[Queued],
    suspended: Sequence[Suspended],
    free_blocks: int,
    now_s: float,
    rules: ChoiceRules,
    ordered: Sequence[Prefill] | None = None,
    memory: Memory = NOTHING_ELSE,
) -> Choice:
    """Choose the next step.

    In this order: (1) the longest-stopped step of which a member has been suspended for as long as it may be;
    (2) nothing, while a step was preempted for a job that has not reached the engine; (3) the first of
    `ordered` that can run: a suspended step that is not `blocked`, or a waiting prefill with memory and a
    place; (4) any suspended step, nearest deadline first.

    A prefill that lacks memory waits for others to end if its slack allows. Otherwise it takes memory from
    those worth no more than itself, least first; from those before it in the order, only if they are worth
    less. A boosted one takes up to its guard; with an infinite guard, and if `memory` is kept, no prefill
    behind it starts while it does not fit. `ordered` is `in_order` of the same, from whoever has it already.
    """
    overdue = [item for item in suspended if item.overdue]
    if overdue:
        return Resume(min(overdue, key=lambda item: item.step.since_s).step)
    if any(item.awaits_arrival for item in suspended):
        return Wait()  # whatever started now would be in the way of the one that the replica was cleared for
    if ordered is None:
        ordered = in_order(queue, suspended, now_s, rules)
    ready = [item for item in suspended if not item.blocked]
    room = FreeRoom(free_blocks, memory)
    holders = Holders(queue, suspended, free_blocks, memory, lambda prefill: _worth(prefill, now_s, rules))
    choice = _first_that_fits(queue, ready, room, holders, now_s, rules, ordered)
    if not isinstance(choice, Wait):
        return _until_it_ends(choice, holders)
    if suspended:
        last = min(suspended, key=lambda item: item.prefill.deadline_s)
        return Resume(last.step, none_can_start=True)
    return choice


def _first_that_fits(
    queue: Sequence[Queued],
    ready: Sequence[Suspended],
    room: FreeRoom,
    holders: Holders,
    now_s: float,
    rules: ChoiceRules,
    ordered: Sequence[Prefill],
) -> Choice:
    """The first in order that can run with `room`, or what `holders` give up."""
    fairness = rules.fairness
    steps = {item.prefill.job_id: item for item in ready}
    queued = {item.prefill.job_id: item for item in queue}
    passed: dict[str, float] = {}
    for position, first in enumerate(ordered):
        boost = None if fairness is None else fairness.boost_of(first, now_s)
        if (resumable := steps.get(first.job_id)) is not None:
            return Resume(resumable.step, boost, passed)
        item = queued[first.job_id]
        if not room.fits(item):
            found = _who_gives_way(item, boost, room, holders, now_s)
            if found.given_up is None:
                if found.may_take == math.inf and room.is_kept:
                    return Wait(first.tier)
                holders.passed(item)
                passed[first.job_id] = found.until_s
                continue
            if not room.fits(item, always_looks=True):
                return _start_after_drops(item, found.given_up, boost, passed, rules)
        return _start(_until_suspended(ordered[position:], queued), room, boost, passed, now_s, rules)
    return Wait()


def _until_it_ends(choice: Start | Resume, holders: Holders) -> Start | Resume:
    """The same; if it is what those with time wait for, alone, they let it run to its end."""
    awaited = holders.ends_first
    if isinstance(awaited, Suspended):
        is_awaited = isinstance(choice, Resume) and choice.step is awaited.step
    else:
        is_awaited = (
            awaited is not None and isinstance(choice, Start) and choice.requests == (awaited.request,)
        )
    if not is_awaited or not holders.awaiting:
        return choice
    to_its_end: dict[str, float] = dict.fromkeys(holders.awaiting, math.inf)
    return msgspec.structs.replace(choice, passed={**choice.passed, **to_its_end})


class _GivesWay(NamedTuple):
    """For one that does not fit: up to what worth it takes the memory of others, and whose.

    Nobody's while it waits: until `until_s`, if it can be on time even so.
    """

    may_take: float
    given_up: Sequence[Holder] | None
    until_s: float = math.inf


def _who_gives_way(
    item: Queued, boost: Boost | None, room: FreeRoom, holders: Holders, now_s: float
) -> _GivesWay:
    first, awaited = item.prefill, holders.ends_first
    room_s = slack_s(first.deadline_s, now_s, first.remaining_s)
    may_take = holders.may_take(item)
    if boost is not None:
        may_take = max(may_take, boost.guard)
    short_blocks = item.missing_blocks - room.free_blocks  # those who lose theirs may be those it shares with
    if may_take < math.inf and awaited is not None and awaited.prefill.remaining_s <= room_s:
        if awaited is item:
            return _GivesWay(may_take, None, _looks_again_s(now_s, room_s))
        holders.awaiting.add(first.job_id)
        until_s = now_s + room_s - awaited.prefill.remaining_s
        return _GivesWay(may_take, None, until_s if holders.hold(may_take, short_blocks) else math.inf)
    given_up = holders.give_up(item, may_take, short_blocks)
    if given_up is None and room_s > 0 and holders.hold(may_take, short_blocks - holders.ended_blocks):
        return _GivesWay(may_take, None, _looks_again_s(now_s, room_s))
    return _GivesWay(may_take, given_up)


def _looks_again_s(now_s: float, room_s: float) -> float:
    """When one may find memory that decode is about to pull; more and more often, as its time runs out."""
    return now_s + room_s / 2


def _worth(prefill: Prefill, now_s: float, rules: ChoiceRules) -> float:
    return prefill.weight if rules.fairness is None else rules.fairness.worth(prefill, now_s)


def _start(
    ahead: Sequence[Queued],
    room: FreeRoom,
    boost: Boost | None,
    passed: Mapping[str, float],
    now_s: float,
    rules: ChoiceRules,
) -> Start:
    """The first of these, and those that share its step."""
    requests = _joined(ahead, room, now_s, rules)
    most_tokens = _most_tokens(ahead[: len(requests)], rules)
    return Start(requests, boost=boost, most_tokens=most_tokens, passed=passed)


def _start_after_drops(
    item: Queued,
    given_up: Sequence[Holder],
    boost: Boost | None,
    passed: Mapping[str, float],
    rules: ChoiceRules,
) -> Start:
    """One alone, with the memory that these give up."""
    return Start(
        (item.request,),
        tuple(one.step for one in given_up if isinstance(one, Suspended)),
        tuple(one.request for one in given_up if not isinstance(one, Suspended)),
        boost=boost,
        most_tokens=_most_tokens([item], rules),
        passed=passed,
    )


def _until_suspended(ordered: Sequence[Prefill], queued: dict[JobId, Queued]) -> list[Queued]:
    """The prefills ahead of the first suspended step: nobody joins a step past one that would go first."""
    ahead: list[Queued] = []
    for prefill in ordered:
        if (item := queued.get(prefill.job_id)) is None:
            break
        ahead.append(item)
    return ahead


def _joined(ahead: Sequence[Queued], room: FreeRoom, now_s: float, rules: ChoiceRules) -> tuple[str, ...]:
    fitting: list[Queued] = []
    free_blocks, free_places, tokens = room.free_blocks, room.free_places, 0
    for item in ahead:
        tokens += item.tokens
        if fitting and (tokens > rules.join_tokens or len(fitting) >= rules.most_members):
            break
        free_blocks -= room.new_blocks(item)
        free_places -= not item.has_started
        if free_blocks < 0 or free_places < 0:
            break
        fitting.append(item)
    candidates = [Candidate(item.tokens, item.prefill.deadline_s, item.pairs) for item in fitting]
    step = compose_step(candidates, now_s, rules.predictor, rules.join_tokens, rules.stop)
    return tuple([item.request for item in fitting[: step.size]])


def _most_tokens(members: Sequence[Queued], rules: ChoiceRules) -> float:
    """Of a step of these; several share one only if the step can be stopped soon enough whole.

    One of several that finds clearly less in the prefix cache than was expected goes on in its next chunk:
    nobody has foreseen that the others would wait for all of it.
    """
    tokens = sum([item.tokens for item in members])
    if rules.stop is None or tokens <= 0:
        return math.inf
    pairs = sum([item.pairs for item in members])
    context_tokens = max(0.0, pairs / tokens - tokens / 2)
    chunk_tokens = rules.stop.chunk_tokens(context_tokens, rules.predictor)
    if len(members) == 1:
        return chunk_tokens
    return max(tokens, min(chunk_tokens, rules.join_tokens, tokens + ROUNDED_TOKENS * len(members)))


LATE_PART: Final = 0.5
"""Of the limits, what steps that cannot be on time any more may take; the rest is for those that can.

A late step is resumed when nobody on time waits, which in an overload is never; until then its checkpoint and
its place count against the limits, and would keep others from being stopped."""


def in_excess(suspended: Sequence[Suspended], now_s: float, limits: Limits) -> list[SuspendedStep]:
    """The steps to start over: of those that are late, the least advanced first, until few enough remain.

    One without a deadline is never late.
    """
    late = [
        item
        for item in suspended
        if not item.overdue and slack_s(item.prefill.deadline_s, now_s, item.prefill.remaining_s) < 0
    ]
    steps, kept_bytes = len(late), sum(item.step.checkpoint_bytes for item in late)
    excess: list[SuspendedStep] = []
    for item in sorted(late, key=lambda item: item.step.done * item.step.tokens):
        is_few = steps <= LATE_PART * limits.max_suspended_steps
        if is_few and kept_bytes <= LATE_PART * limits.max_suspended_bytes:
            break
        if is_few and not item.step.checkpoint_bytes:  # its checkpoint lies in KV blocks
            continue
        excess.append(item.step)
        steps -= 1
        kept_bytes -= item.step.checkpoint_bytes
    return excess
