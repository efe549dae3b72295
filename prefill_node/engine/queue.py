"""The engine's requests as the decision rules see them.

Reads vLLM's scheduler and changes nothing in it. Requests without a job, such as warm-up prefills, have no
deadline and the weight 1.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from prefill_node.board.messages import JobAccount, SchedulerView, SuspendedView
from prefill_node.engine.stepping.step_choice import Queued, Suspended
from slo.predict.prefill_time import attention_pairs
from slo.preemption.decide import as_one, must_wait
from slo.queue.prefill import Prefill
from slo.queue.slack import NO_DEADLINE
from slo.request import ARRIVED_XARG, CACHED_XARG, DEADLINE_XARG, JOB_XARG, TIER_XARG, WEIGHT_XARG, JobId
from slo.tiers import SYSTEM, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from prefill_node.board.messages import StepView
    from prefill_node.engine.stepping.suspension import Account, SuspendedStep, Suspensions
    from slo.predict.prefill_time import PrefillPredictor


_REMEMBER_DONE = 128
_NO_ARGUMENTS: Mapping[str, Any] = {}


class QueueView:
    """Looks at a scheduler's queues.

    Args:
        scheduler: The scheduler.
        jobs: Engine request ids by job, of all jobs that it has not forgotten.
        suspensions: Its suspended steps.
    """

    def __init__(self, scheduler: Scheduler, jobs: Mapping[str, str], suspensions: Suspensions) -> None:
        self._scheduler = scheduler
        self._jobs = jobs
        self._suspensions = suspensions
        self._done: deque[str] = deque(maxlen=_REMEMBER_DONE)
        self._untouched: dict[str, Queued] = {}
        self._predictor: PrefillPredictor | None = None

    def completed(self, request: Request) -> None:
        """A step that a request was in is complete."""
        if request.num_computed_tokens >= request.num_prompt_tokens and (job := argument(request, JOB_XARG)):
            self._done.append(job)

    def queued(self, predictor: PrefillPredictor, *, may_start: bool) -> list[Queued]:
        """Everything that could run and is not suspended: between two chunks, or, if it may, not started."""
        scheduler = self._scheduler
        suspended = {request for step in self._suspensions.steps for request in step.members}
        queue = [
            self._queued(request, predictor)
            for request in scheduler.running
            if request.request_id not in suspended
        ]
        if may_start:
            if predictor != self._predictor or len(self._untouched) > 2 * len(scheduler.waiting):
                self._predictor, self._untouched = predictor, {}
            queue += [self._waiting(request, predictor) for request in scheduler.waiting]
        return queue

    def suspended(
        self, predictor: PrefillPredictor, now_s: float, has_arrived: Callable[[str], bool]
    ) -> list[Suspended]:
        """The suspended steps and what keeps them from going on."""
        return [self._suspended(step, predictor, now_s, has_arrived) for step in self._suspensions.steps]

    def published(self, step: StepView | None) -> SchedulerView:
        """What the governor needs to know: the step that runs, what is suspended, who has been stopped."""
        suspended = tuple(
            SuspendedView(
                jobs=tuple(map(self.job_of, item.members)),
                tokens=item.tokens,
                pairs=item.pairs,
                done=item.done,
                boundary=item.boundary,
                checkpoint_bytes=item.checkpoint_bytes,
                since_s=item.since_s,
                preempted_by=item.preempted_by,
            )
            for item in self._suspensions.steps
        )
        return SchedulerView(step, suspended, self._accounts(), tuple(self._done))

    def _accounts(self) -> dict[str, JobAccount]:
        accounts: dict[str, JobAccount] = {}
        for request in self._scheduler.running:
            account = self._suspensions.accounts.get(request.request_id)
            if (account is not None or request.num_computed_tokens) and (
                job := self.job_of(request.request_id)
            ):
                preemptions = 0 if account is None else account.preemptions
                suspended_s = 0.0 if account is None else account.suspended_s
                accounts[job] = JobAccount(preemptions, suspended_s, request.num_computed_tokens)
        return accounts

    def job_of(self, request_id: str) -> str:
        """The job of a request; empty when it has none or is gone."""
        request = self._scheduler.requests.get(request_id)
        return "" if request is None else str(argument(request, JOB_XARG) or "")

    def _waiting(self, request: Request, predictor: PrefillPredictor) -> Queued:
        """A request that waits to start; as long as it has never been stopped it looks the same each time."""
        request_id = request.request_id
        if request.num_computed_tokens or request_id in self._suspensions.accounts:
            return self._queued(request, predictor)
        if request_id not in self._untouched:
            self._untouched[request_id] = self._queued(request, predictor)
        return self._untouched[request_id]

    def _queued(self, request: Request, predictor: PrefillPredictor) -> Queued:
        held, missing = self._blocks(request)
        tokens, context = _left(request)
        return Queued(self.alone(request, predictor), tokens, attention_pairs(tokens, context), missing, held)

    def alone(self, request: Request, predictor: PrefillPredictor) -> Prefill:
        """A request that is not part of a suspended step."""
        account = self._suspensions.accounts.get(request.request_id)
        return _prefill(request.request_id, request, predictor.prefill_s(*_left(request)), account)

    def _suspended(
        self,
        step: SuspendedStep,
        predictor: PrefillPredictor,
        now_s: float,
        has_arrived: Callable[[str], bool],
    ) -> Suspended:
        requests = [self._scheduler.requests[request_id] for request_id in step.members]
        remaining_s = predictor.pass_s(step.tokens, step.pairs) * (1.0 - step.done)
        remaining_s += sum([_behind_s(request, step, predictor) for request in requests])
        accounts = self._suspensions.accounts
        open_s = now_s - step.since_s
        members = [
            _prefill(f"step:{step.step_id}", request, remaining_s, accounts.get(request.request_id), open_s)
            for request in requests
        ]
        awaits = (
            not has_arrived(step.preempted_by) and now_s < step.arrival_by_s if step.preempted_by else False
        )
        return Suspended(
            step,
            as_one(members, now_s),
            held_blocks=sum([self._blocks(request)[0] for request in requests]),
            blocked=awaits or must_wait(self._beneficiary(step, predictor), now_s),
            awaits_arrival=awaits,
            overdue=self._suspensions.is_overdue(step, now_s),
        )

    def _beneficiary(self, step: SuspendedStep, predictor: PrefillPredictor) -> Prefill | None:
        """The request that a step made way for; None when it has ended or was never here."""
        request = self._scheduler.requests.get(self._jobs.get(step.preempted_by, ""))
        if request is None or request.is_finished():
            return None
        return self.alone(request, predictor)

    def _blocks(self, request: Request) -> tuple[int, int]:
        """(held, missing) KV blocks, prefix cache hits not foreseen."""
        groups = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        held = sum(map(len, groups))
        needed = -(-request.num_tokens // self._scheduler.block_size) * len(groups)
        return held, max(0, needed - held)


def argument(request: Request, name: str) -> Any:
    """One of the arguments that the replica sent along with a request; None when it did not."""
    return _arguments(request).get(name)


def tier_of(request: Request) -> Tier:
    """The class of a request; the server's own without one."""
    return argument(request, TIER_XARG) or SYSTEM


def _arguments(request: Request) -> Mapping[str, Any]:
    sampling = request.sampling_params
    return _NO_ARGUMENTS if sampling is None else sampling.extra_args or _NO_ARGUMENTS


def _left(request: Request) -> tuple[int, int]:
    """(tokens still to compute, tokens before them); what is expected to be cached is not to be computed."""
    done = int(request.num_computed_tokens) or int(argument(request, CACHED_XARG) or 0)
    done = min(done, request.num_tokens - 1)
    return request.num_tokens - done, done


def _behind_s(request: Request, step: SuspendedStep, predictor: PrefillPredictor) -> float:
    """Work of a member that its step, one chunk of its prompt, leaves to do."""
    computed = request.num_computed_tokens + step.members[request.request_id]
    return predictor.prefill_s(request.num_tokens - computed, computed)


def _prefill(
    key: str, request: Request, remaining_s: float, account: Account | None, open_s: float = 0.0
) -> Prefill:
    """A request by the name `key`; `open_s` is how long it has been suspended this time."""
    given = _arguments(request)
    deadline_s = given.get(DEADLINE_XARG)
    weight = given.get(WEIGHT_XARG)
    arrived_s = given.get(ARRIVED_XARG)
    return Prefill(
        JobId(key),
        1.0 if weight is None else float(weight),
        NO_DEADLINE if deadline_s is None else float(deadline_s),
        remaining_s,
        request.arrival_time if arrived_s is None else float(arrived_s),
        0 if account is None else account.preemptions,
        open_s + (0.0 if account is None else account.suspended_s),
        tier=given.get(TIER_XARG) or SYSTEM,
    )
