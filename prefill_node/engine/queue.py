"""The engine's requests as the decision rules see them.

Reads vLLM's scheduler, or the simulator's, and changes nothing in it. Requests without a job, such as warm-up
prefills, have no deadline and the weight 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from prefill_node.board.messages import Queued, SuspendedView
from prefill_node.engine.stepping.memory import Holder
from prefill_node.engine.stepping.stepper import Member, Stepper
from prefill_node.engine.stepping.suspension import Suspended, SuspendedStep
from slo.predict.prefill_time import PrefillPredictor, attention_pairs
from slo.preemption.decide import as_one, must_wait
from slo.queue.prefill import Prefill
from slo.queue.slack import NO_DEADLINE
from slo.request import ARRIVED_XARG, CACHED_XARG, DEADLINE_XARG, JOB_XARG, TIER_XARG, WEIGHT_XARG, JobId
from slo.tiers import SYSTEM

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


_NO_ARGUMENTS: Mapping[str, Any] = {}


class _Stopped(NamedTuple):
    """The members of a suspended step, by one predictor; the open suspension is not counted."""

    predictor: PrefillPredictor
    requests: list[Request]
    members: tuple[Prefill, ...]
    behind_tokens: int


class QueueView:
    """Looks at a scheduler's queues.

    Args:
        stepper: Its predictor, and what each request has been through.
    """

    def __init__(self, scheduler: Scheduler, stepper: Stepper) -> None:
        self._scheduler = scheduler
        self._stepper = stepper
        self._suspensions = stepper.suspensions
        self._untouched: dict[str, Queued] = {}
        self._stopped: dict[int, _Stopped] = {}
        self._predictor: PrefillPredictor | None = None

    def queued(self, *, may_start: bool = True) -> list[Queued]:
        """Everything that could run and is not suspended: between two chunks, or, if it may, not started.

        A prompt that a running step completes is not among it, and the memory of one that it goes on with is
        nobody's to take.
        """
        scheduler, predictor = self._scheduler, self._stepper.rules.predictor
        suspended = {request for step in self._suspensions.steps for request in step.members}
        started = [request for request in scheduler.running if request.request_id not in suspended]
        if self._stepper.running is not None:
            queue = [
                msgspec.structs.replace(self.item(request, has_started=True), held_blocks=0)
                for request in started
                if request.num_computed_tokens < request.num_prompt_tokens
            ]
        else:
            queue = [self.item(request, has_started=True) for request in started]
        if may_start:
            if predictor != self._predictor or len(self._untouched) > 2 * len(scheduler.waiting):
                self._predictor, self._untouched = predictor, {}
            queue += [self._waiting(request) for request in scheduler.waiting]
        return queue

    def shared_blocks(self, item: Queued) -> int:
        """What others hold of the prefix of one that waits to start; 0 where it fits without."""
        request = self._scheduler.requests[item.request]
        return int(self._scheduler.kv_cache_manager.shared_blocks_of(request, item.missing_blocks))

    def freed_blocks(self, holders: Sequence[Holder]) -> list[int]:
        """How many blocks become free as each of these, one after the other, loses what it holds."""
        requests = self._scheduler.requests
        in_turn = [
            [requests[name] for name in (one.step.members if isinstance(one, Suspended) else (one.request,))]
            for one in holders
        ]
        return list(self._scheduler.kv_cache_manager.freed_blocks_of(in_turn))

    def suspended(self, now_s: float) -> list[Suspended]:
        """The suspended steps and what keeps them from going on."""
        return [self._suspended(step, now_s) for step in self._suspensions.steps]

    def suspended_views(self) -> list[SuspendedView]:
        """The suspended steps as they are published."""
        return [self._suspended_view(step) for step in self._suspensions.steps]

    def members(self, tokens: Mapping[str, int]) -> list[Member]:
        """The members of a step that has just been issued, so that its tokens count as computed already."""
        return [
            self._member(request, new)
            for name, new in tokens.items()
            if (request := self._scheduler.requests.get(name)) is not None
        ]

    def job_of(self, request_id: str) -> str:
        """The job of a request; empty when it has none or is gone."""
        request = self._scheduler.requests.get(request_id)
        return "" if request is None else str(argument(request, JOB_XARG) or "")

    def item(self, request: Request, *, has_started: bool = False) -> Queued:
        """A request that is not part of a suspended step."""
        held, missing = self._scheduler.kv_cache_manager.blocks_of(request)
        tokens, context = _left(request)
        pairs = attention_pairs(tokens, context)
        return Queued(self._alone(request), tokens, pairs, missing, held, request.request_id, has_started)

    def arrived(self, request: Request) -> Prefill:
        """A request that has just reached the engine, as the decision rules see it."""
        return self._waiting(request).prefill

    def _alone(self, request: Request) -> Prefill:
        """A request that is in no step: how long it was suspended gives it no place in the queue."""
        left, predictor = _left(request), self._stepper.rules.predictor
        return self._prefill(request, predictor.prefill_s(*left), idle_s=predictor.idle_s(*left))

    def _waiting(self, request: Request) -> Queued:
        """A request that waits to start; as long as it has never been stopped it looks the same each time."""
        request_id = request.request_id
        if request.num_computed_tokens or request_id in self._suspensions.accounts:
            return self.item(request)
        if request_id not in self._untouched:
            self._untouched[request_id] = self.item(request)
        return self._untouched[request_id]

    def _member(self, request: Request, tokens: int) -> Member:
        computed = request.num_computed_tokens
        behind = request.num_tokens - computed
        behind_s = self._stepper.rules.predictor.prefill_s(behind, computed)
        closed_s = self._suspensions.closed_s(request.request_id)
        prefill = self._prefill(request, behind_s, argument(request, JOB_XARG) or "", suspended_s=closed_s)
        pairs = attention_pairs(tokens, computed - tokens)
        return Member(request.request_id, prefill, tokens, pairs, behind)

    def _suspended(self, step: SuspendedStep, now_s: float) -> Suspended:
        stopped = self._members_of(step)
        open_s = now_s - step.since_s
        members = [
            msgspec.structs.replace(prefill, suspended_s=open_s + prefill.suspended_s)
            for prefill in stopped.members
        ]
        awaits = bool(step.preempted_by) and (
            not self._stepper.has_arrived(step.preempted_by) and now_s < step.arrival_by_s
        )
        blocks_of = self._scheduler.kv_cache_manager.blocks_of
        return Suspended(
            step,
            as_one(members, now_s),
            held_blocks=sum([blocks_of(request)[0] for request in stopped.requests]),
            blocked=awaits or must_wait(self._beneficiary(step), now_s),
            awaits_arrival=awaits,
            overdue=self._suspensions.is_overdue(step, now_s),
        )

    def _suspended_view(self, step: SuspendedStep) -> SuspendedView:
        stopped = self._members_of(step)
        beneficiary = self._beneficiary(step)
        until_s = -math.inf if beneficiary is None else beneficiary.deadline_s - beneficiary.remaining_s
        return SuspendedView(
            members=stopped.members,
            tokens=step.tokens,
            done=step.done,
            checkpoint_bytes=step.checkpoint_bytes,
            since_s=step.since_s,
            preempted_by=step.preempted_by,
            protects_until_s=until_s,
            behind_tokens=stopped.behind_tokens,
        )

    def _members_of(self, step: SuspendedStep) -> _Stopped:
        """The members of a suspended step, which stay the same until one leaves or it is resumed."""
        predictor, known = self._stepper.rules.predictor, self._stopped.get(step.step_id)
        if known is not None and known.predictor is predictor and len(known.members) == len(step.members):
            return known
        requests = [self._scheduler.requests[request_id] for request_id in step.members]
        behind = [_behind(request, step) for request in requests]
        remaining_s = predictor.pass_s(step.tokens, step.pairs) * (1.0 - step.done)
        remaining_s += sum([predictor.prefill_s(*left) for left in behind])
        closed_s = self._suspensions.closed_s
        members = tuple(
            [
                self._prefill(request, remaining_s, suspended_s=closed_s(request.request_id))
                for request in requests
            ]
        )
        if len(self._stopped) > 2 * len(self._suspensions.steps):
            self._stopped = {}
        known = _Stopped(predictor, requests, members, sum([tokens for tokens, _ in behind]))
        self._stopped[step.step_id] = known
        return known

    def _beneficiary(self, step: SuspendedStep) -> Prefill | None:
        """The request that a step was preempted for; None when it has ended or was never here."""
        request = self._scheduler.requests.get(self._stepper.jobs.get(step.preempted_by, ""))
        if request is None or request.is_finished():
            return None
        if (its_own := self._suspensions.step_of(request.request_id)) is not None:
            stopped = self._members_of(its_own)
            return stopped.members[stopped.requests.index(request)]
        return self._alone(request)

    def _prefill(
        self,
        request: Request,
        remaining_s: float,
        job: str | None = None,
        idle_s: float = 0.0,
        suspended_s: float = 0.0,
    ) -> Prefill:
        """A request with so much to do; under the engine's name for it when it has no job."""
        given = _arguments(request)
        deadline_s = given.get(DEADLINE_XARG)
        weight = given.get(WEIGHT_XARG)
        arrived_s = given.get(ARRIVED_XARG)
        account = self._suspensions.accounts.get(request.request_id)
        return Prefill(
            JobId((given.get(JOB_XARG) or request.request_id) if job is None else job),
            1.0 if weight is None else float(weight),
            NO_DEADLINE if deadline_s is None else float(deadline_s),
            remaining_s,
            request.arrival_time if arrived_s is None else float(arrived_s),
            0 if account is None else account.preemptions,
            suspended_s,
            tier=given.get(TIER_XARG) or SYSTEM,
            idle_s=idle_s,
            preemptions_before=0 if account is None else account.preemptions_before,
        )


def argument(request: Request, name: str) -> Any:
    """One of the arguments that the replica sent along with a request; None when it did not."""
    return _arguments(request).get(name)


def _arguments(request: Request) -> Mapping[str, Any]:
    sampling = request.sampling_params
    return _NO_ARGUMENTS if sampling is None else sampling.extra_args or _NO_ARGUMENTS


def _left(request: Request) -> tuple[int, int]:
    """(tokens still to compute, tokens before them); what is expected to be cached is not to be computed."""
    done = int(request.num_computed_tokens) or int(argument(request, CACHED_XARG) or 0)
    done = min(done, request.num_tokens - 1)
    return request.num_tokens - done, done


def _behind(request: Request, step: SuspendedStep) -> tuple[int, int]:
    """(tokens of a member that its step, one chunk of its prompt, leaves to do, tokens before them)."""
    computed = request.num_computed_tokens + step.members[request.request_id]
    return request.num_tokens - computed, computed
