"""vLLM's scheduler with the prefill queue in order of slack and steps that can be suspended.

Runs in the EngineCore process. Owns what a stopped step means to the engine: it is rolled back, its KV blocks
stay, and the very same step is issued again later. What runs next is decided by
`prefill_node.engine.stepping.step_choice`; whether a running step stops, by the governor in the replica
process. Everything else is vLLM's scheduler.
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler

from prefill_node.board.events import Dropped, DropReason, Resumed, Started, Stopped
from prefill_node.board.messages import StepView
from prefill_node.engine.board_writer import Bulletin
from prefill_node.engine.kv_commit import CommitOnCompletion
from prefill_node.engine.queue import QueueView, argument, tier_of
from prefill_node.engine.stepping.lost_steps import SuspensionRoom, in_excess
from prefill_node.engine.stepping.step_choice import Choice, ChoiceRules, Resume, Start, Wait, choose
from prefill_node.engine.stepping.suspension import SuspendedStep, Suspensions
from prefill_node.engine_setup import EngineSetup
from prefill_node.step_order import PreemptedOutput, StepOrder
from slo.predict.prefill_time import PrefillPredictor, attention_pairs
from slo.queue.arrival_forecast import Forecast
from slo.queue.order import QueueOrder
from slo.request import JOB_XARG, PREDICTOR_XARG

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

    from slo.queue.fairness import Boost
    from slo.tiers import Tier

RELEASE_PREFIX = "slackserve-release:"
"""An abort of this prefix plus a job id gives up the job, whether it still runs or waits to be pulled."""
_REMEMBER_JOBS = 8192


class _Issued(NamedTuple):
    """The running step: when it was issued, its tokens by tier, and the right that it runs by."""

    at_s: float
    tokens: dict[Tier, int]
    boost: Boost | None


class SlackScheduler(Scheduler):  # type: ignore[misc] # vLLM ships no types for it
    """Prefills in order of slack, and yields."""

    running: list[Request]
    waiting: Any
    skipped_waiting: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        CommitOnCompletion.adopt(self.kv_cache_manager)
        self._setup = EngineSetup.of(self.vllm_config)
        self._predictor = PrefillPredictor(0.0, 0.0)
        self._forecast = Forecast()
        self._fairness = self._setup.fairness()
        self._issued: _Issued | None = None
        self._jobs: dict[str, str] = {}
        self._arrived: OrderedDict[str, None] = OrderedDict()
        self._suspensions = Suspensions(self._setup.max_suspended_s)
        self._room = SuspensionRoom(self._setup.max_suspended_steps, self._setup.max_suspended_bytes)
        self._view = QueueView(self, self._jobs, self._suspensions)
        self._bulletin = Bulletin(self._setup.board)
        self._step_id = 0
        self._memory_refused = False

    def add_request(self, request: Request) -> None:
        """Queue a request; it brings its job and the replica's latest predictor."""
        super().add_request(request)
        if (curve := argument(request, PREDICTOR_XARG)) is not None:
            per_token_s, fixed_s, per_pair_s = curve
            self._predictor = PrefillPredictor(per_token_s, fixed_s, per_pair_s=per_pair_s)
        if (job := argument(request, JOB_XARG)) is not None:
            self._jobs[job] = request.request_id
            self._arrived[job] = None
            while len(self._arrived) > _REMEMBER_JOBS:
                self._arrived.popitem(last=False)
            prefill = self._view.alone(request, self._predictor)
            self._forecast.arrived(prefill.remaining_s, prefill.weight, time.monotonic())

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Issue the next step: waiting prefills in order of slack, or a suspended step exactly as it was."""
        now_s = time.monotonic()
        shown: Sequence[str] = ()
        resumed: SuspendedStep | None = None
        boost: Boost | None = None
        match choice := self._choose(now_s):
            case Start(requests=shown, boost=boost):
                self._make_room(choice, now_s)
            case Resume(step=resumed, boost=boost):
                shown = tuple(resumed.members)
            case Wait():
                pass
        with self._only(shown, exactly=resumed is not None):
            output = super().schedule(*args, **kwargs)
        self._memory_refused = bool(shown) and not output.total_num_scheduled_tokens
        if output.total_num_scheduled_tokens:
            self._issue(output, resumed, boost, now_s)
        else:
            StepOrder(0, None, self._suspensions.take_discarded()).attach(output)
            self._bulletin.idle(self._view.published(None))
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take in a step that is complete, or one that stopped."""
        if scheduler_output.total_num_scheduled_tokens:
            self._bulletin.ended()
            self._account(time.monotonic())
        if isinstance(model_runner_output, PreemptedOutput):
            self._suspend(scheduler_output, model_runner_output)
            # To vLLM it was a step without requests, so that transfers and statistics are still handled.
            scheduler_output = dataclasses.replace(
                scheduler_output, num_scheduled_tokens={}, total_num_scheduled_tokens=0
            )
        for request_id in scheduler_output.num_scheduled_tokens:
            if (request := self._unfinished(request_id)) is not None:
                self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
                self._view.completed(request)
        return dict(super().update_from_output(scheduler_output, model_runner_output))

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """Abort requests, and give up jobs named with `RELEASE_PREFIX`."""
        if request_ids is not None:
            ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
            request_ids = [request_id for request_id in ids if not request_id.startswith(RELEASE_PREFIX)]
            for request_id in ids:
                if request_id.startswith(RELEASE_PREFIX):
                    engine_id = self._jobs.get(request_id.removeprefix(RELEASE_PREFIX))
                    if engine_id is not None and not self._end_lease(engine_id):
                        request_ids.append(engine_id)
        ending = self.requests.keys() if request_ids is None else request_ids
        for request_id in list(ending):
            if (request := self._unfinished(request_id)) is not None:
                self._leave_suspended_step(request, DropReason.ABANDONED)
        return list(super().finish_requests(request_ids, finished_status))

    def shutdown(self) -> None:
        """Let go of the board, then stop as vLLM does."""
        self._bulletin.close()
        super().shutdown()

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)
        self._suspensions.ended(request.request_id)
        if (job := argument(request, JOB_XARG)) is not None:
            self._jobs.pop(job, None)
            self._bulletin.forget(job)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Take a request's KV blocks as vLLM does; what was suspended of it is worth nothing any more."""
        self._leave_suspended_step(request, DropReason.MEMORY)
        super()._preempt_request(request, *args, **kwargs)

    def _leave_suspended_step(self, request: Request, reason: DropReason) -> None:
        if (step := self._suspensions.step_of(request.request_id)) is None:
            return
        tokens = step.members[request.request_id]
        dropped = Dropped(
            jobs=self._jobs_of([request.request_id]),
            reason=reason,
            done=step.done,
            tokens=tokens,
            pairs=attention_pairs(tokens, request.num_computed_tokens),
        )
        self._suspensions.forget(request.request_id, time.monotonic())
        self._bulletin.notice(dropped)

    def _end_lease(self, engine_id: str) -> bool:
        """Whether the request was finished and waiting to be pulled; if so its lease ends now."""
        request = self.requests.get(engine_id)
        if request is None or not request.is_finished():
            return False
        self.connector.release(engine_id)
        return True

    def _unfinished(self, request_id: str) -> Request | None:
        request = self.requests.get(request_id)
        return None if request is None or request.is_finished() else request

    def _jobs_of(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        return tuple(self._view.job_of(request_id) for request_id in request_ids)

    def _choose(self, now_s: float) -> Choice:
        if self.pause_state == PauseState.PAUSED_ALL:
            return Wait()
        suspended = self._view.suspended(self._predictor, now_s, self._arrived.__contains__)
        if excess := in_excess(suspended, now_s, self._room):
            self._start_over([request for step in excess for request in step.members], now_s)
            suspended = [item for item in suspended if item.step not in excess]
        # What looked as if it would fit and did not: only what holds its memory already can run.
        free_blocks = 0 if self._memory_refused else self.kv_cache_manager.block_pool.get_num_free_blocks()
        return choose(
            self._view.queued(self._predictor, may_start=self.pause_state == PauseState.UNPAUSED),
            suspended,
            free_blocks,
            now_s,
            ChoiceRules(
                QueueOrder(self._setup.order),
                self._predictor,
                self._setup.join_tokens,
                self._forecast,
                self._fairness,
            ),
        )

    @contextmanager
    def _only(self, shown: Sequence[str], *, exactly: bool) -> Iterator[None]:
        """Let vLLM see only these requests, in this order, while it composes a step.

        Args:
            shown: Engine request ids.
            exactly: Hide also those that vLLM has skipped before and would try again.
        """
        running = {request.request_id: request for request in self.running}
        waiting = {request.request_id: request for request in self.waiting}
        skipped = self.skipped_waiting
        self.running = [running.pop(request_id) for request_id in shown if request_id in running]
        self.waiting.clear()
        self.waiting.extend(waiting.pop(request_id) for request_id in shown if request_id in waiting)
        if exactly:
            self.skipped_waiting = create_request_queue(self.policy)
        try:
            yield
        finally:
            self.running = [*running.values(), *self.running]
            self.waiting.extend(waiting.values())
            if exactly:
                skipped.extend(self.skipped_waiting)
                self.skipped_waiting = skipped

    def _make_room(self, choice: Start, now_s: float) -> None:
        """Take the KV blocks of those that the choice gives up; they start over."""
        members = [request for step in choice.drop_steps for request in step.members]
        self._start_over((*members, *choice.drop_requests), now_s)

    def _start_over(self, request_ids: Sequence[str], now_s: float) -> None:
        """Take the KV blocks of requests that have started."""
        for request_id in request_ids:
            request = self.requests[request_id]
            self.running.remove(request)
            self._preempt_request(request, now_s)

    def _issue(
        self, output: SchedulerOutput, resumed: SuspendedStep | None, boost: Boost | None, now_s: float
    ) -> None:
        """Give a step its identity; tell the workers how to run it and the governor that it runs."""
        self._step_id += 1
        notice, checkpoint, from_boundary = None, None, 0
        if resumed is not None:
            if resumed.checkpoint_bytes:
                checkpoint, from_boundary = resumed.step_id, resumed.boundary
            jobs = self._jobs_of(resumed.members)
            notice = Resumed(jobs, from_boundary, now_s - resumed.since_s, now_s, now_s)
            self._suspensions.resume(resumed, now_s)
        StepOrder(self._step_id, checkpoint, self._suspensions.take_discarded()).attach(output)
        step = StepView(
            step_id=self._step_id,
            jobs=self._jobs_of(output.num_scheduled_tokens),
            tokens=output.total_num_scheduled_tokens,
            pairs=self._pairs(output.num_scheduled_tokens),
            from_boundary=from_boundary,
            started_s=now_s,
            guard=0.0 if boost is None else boost.guard,
        )
        tokens: dict[Tier, int] = {}
        for request_id, new in output.num_scheduled_tokens.items():
            tier = tier_of(self.requests[request_id])
            tokens[tier] = tokens.get(tier, 0) + new
        self._issued = _Issued(now_s, tokens, boost)
        self._bulletin.issued(self._view.published(step), notice)
        for new in output.scheduled_new_reqs:
            if job := self._view.job_of(new.req_id):
                self._bulletin.notice(Started(job, new.num_computed_tokens))

    def _account(self, now_s: float) -> None:
        """Charge a step that has ended or stopped to the classes of its members."""
        if (issued := self._issued) is not None:
            self._issued = None
            self._fairness.step_ended(issued.tokens, now_s - issued.at_s, now_s, issued.boost)

    def _suspend(self, scheduled: SchedulerOutput, stopped: PreemptedOutput) -> None:
        """Roll a stopped step back, and keep it to be issued again."""
        members: dict[str, int] = {}
        pairs = self._pairs(scheduled.num_scheduled_tokens)
        for request_id, tokens in scheduled.num_scheduled_tokens.items():
            self.prev_step_scheduled_req_ids.discard(request_id)
            if (request := self._unfinished(request_id)) is not None:
                self._roll_back(request, tokens)
                members[request_id] = tokens
        order = self._bulletin.stop_order(self._step_id)
        beneficiary = "" if order is None else order.beneficiary
        step = SuspendedStep(
            step_id=self._step_id,
            members=members,
            pairs=pairs,
            boundary=stopped.resumes_at if stopped.checkpoint_bytes else 0,
            done=stopped.done if stopped.checkpoint_bytes else 0.0,
            checkpoint_bytes=stopped.checkpoint_bytes,
            since_s=stopped.stopped_s,
            preempted_by=beneficiary,
            arrival_by_s=time.monotonic() + self._setup.arrival_wait_s,
        )
        if members:
            self._suspensions.suspend(step)
        elif stopped.checkpoint_bytes:
            self._suspensions.discard(step.step_id)
        if beneficiary:
            self._bulletin.preempted(beneficiary, stopped.stopped_s)
        self._bulletin.notice(
            Stopped(
                step_id=step.step_id,
                jobs=self._jobs_of(members),
                beneficiary=beneficiary,
                reason="" if order is None else order.reason,
                boundary=stopped.boundary,
                boundaries=stopped.boundaries,
                computed=stopped.computed,
                done=stopped.done,
                tokens=scheduled.total_num_scheduled_tokens,
                pairs=pairs,
                checkpoint_bytes=stopped.checkpoint_bytes,
                ordered_s=stopped.stopped_s if order is None else order.ordered_s,
                stopped_s=stopped.stopped_s,
            )
        )

    def _pairs(self, scheduled: Mapping[str, int]) -> float:
        """The attention of an issued step: its tokens count as computed already."""
        return sum(
            attention_pairs(tokens, self.requests[request_id].num_computed_tokens - tokens)
            for request_id, tokens in scheduled.items()
            if request_id in self.requests
        )

    def _roll_back(self, request: Request, tokens: int) -> None:
        """Undo what issuing a step advanced in a request; its KV blocks stay allocated."""
        request.num_computed_tokens -= tokens
        request.num_in_flight_tokens -= tokens
        request.is_prefill_chunk = True
        self._inflight_prefills.add(request)
