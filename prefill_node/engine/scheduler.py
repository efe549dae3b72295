"""vLLM's scheduler with the prefill queue in order of slack and steps that can be suspended.

Runs in the EngineCore process. Owns what a stopped step means to the engine: it is rolled back, its KV blocks
stay, and the very same step is issued again later. What runs next is decided by
`prefill_node.engine.stepping.stepper`; whether a running step stops, by the governor in the replica process.
What was computed in vain is `prefill_node.engine.wasted_work`'s. Everything else is vLLM's scheduler.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler

from kv_transfer.cache_groups import keep_for_last_token
from prefill_node.board.events import DropReason, Resumed, Started, Stopped
from prefill_node.engine.board_writer import Bulletin
from prefill_node.engine.commit_on_completion import CommitOnCompletion
from prefill_node.engine.queue import QueueView, argument
from prefill_node.engine.stepping.memory import Memory
from prefill_node.engine.stepping.step_choice import ChoiceRules, Resume, Start, Wait
from prefill_node.engine.stepping.stepper import StartOver, Stepper
from prefill_node.engine.stepping.suspension import SuspendedStep
from prefill_node.engine.wasted_work import WastedWork
from prefill_node.engine_setup import EngineSetup
from prefill_node.release import Release
from prefill_node.step_order import PreemptedOutput, StepOrder
from slo.predict.prefill_time import PrefillPredictor, attention_pairs
from slo.queue.arrival_forecast import Forecast
from slo.queue.chunks import StopBound
from slo.queue.order import QueueOrder
from slo.request import BEGUN_XARG, JOB_XARG, PREDICTOR_XARG, STOP_BOUND_XARG

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus


class SlackScheduler(Scheduler):  # type: ignore[misc] # vLLM ships no types for it
    """Runs prefills in order of slack, and can suspend them."""

    running: list[Request]
    waiting: Any
    skipped_waiting: Any
    max_num_running_reqs: int
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_ahead = bool(self.scheduler_config.async_scheduling)
        """Whether a step may be issued while one runs; then none is ever stopped."""
        CommitOnCompletion.adopt(self.kv_cache_manager, delays=not self._is_ahead)
        keep_for_last_token(self.kv_cache_manager)
        self._setup = EngineSetup.of(self.vllm_config)
        self._stepper = _stepper(self._setup, self.max_num_running_reqs, self.max_num_scheduled_tokens)
        self._suspensions = self._stepper.suspensions
        self._queue = QueueView(self, self._stepper)
        self._bulletin = Bulletin(self._setup.board)
        self._wasted = WastedWork(self._suspensions, self._queue.job_of, self._bulletin)
        self._memory_refused = False
        self._holds_slots = bool(self.vllm_config.use_v2_model_runner)
        """Whether the model runner keeps a place for each request that has started until it ends."""

    def add_request(self, request: Request) -> None:
        """Queue a request; it brings its job, the replica's latest predictor and how soon steps must stop."""
        super().add_request(request)
        if (curve := argument(request, PREDICTOR_XARG)) is not None:
            self._stepper.predicts(PrefillPredictor.decode(curve))
        if (bound := argument(request, STOP_BOUND_XARG)) is not None:
            self._stepper.must_stop(StopBound.of(bound))
        if (job := argument(request, JOB_XARG)) is not None:
            prefill = self._queue.arrived(request)
            self._stepper.job_arrived(job, request.request_id, prefill, time.monotonic())

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Issue the next step: waiting prefills in order of slack, or a suspended step exactly as it was."""
        now_s = time.monotonic()
        self._return_skipped()
        shown: Sequence[str] = ()
        most_tokens = math.inf
        match command := self._next(now_s):
            case Start(shown, drop_steps=steps, drop_requests=requests, most_tokens=most_tokens):
                members = [request for step in steps for request in step.members]
                self._start_over((*members, *requests), now_s)
            case Resume(step=step):
                shown, most_tokens = tuple(step.members), step.tokens
            case Wait():
                pass
        with self._only(shown, most_tokens):
            output = super().schedule(*args, **kwargs)
        self._memory_refused = bool(shown) and not output.total_num_scheduled_tokens
        if output.total_num_scheduled_tokens:
            self._issue(output, command, now_s)
        else:
            StepOrder(0, None, self._suspensions.take_discarded()).attach(output)
            self._bulletin.show(self._stepper.view(self._queue.suspended_views()))
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take in a step that is complete, or one that stopped."""
        ended = self._stepper.running
        if scheduler_output.total_num_scheduled_tokens:
            self._bulletin.ended()
            self._stepper.step_ended(time.monotonic())
            if self._is_ahead:
                self._bulletin.show(self._stepper.view(self._queue.suspended_views()))
        if isinstance(model_runner_output, PreemptedOutput):
            assert ended is not None
            self._suspend(scheduler_output, model_runner_output, ended.pairs)
            # To vLLM it was a step without requests, so that transfers and statistics are still handled.
            scheduler_output = dataclasses.replace(
                scheduler_output, num_scheduled_tokens={}, total_num_scheduled_tokens=0
            )
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            if (request := self._unfinished(request_id)) is not None:
                computed = request.num_computed_tokens - (request.num_in_flight_tokens - tokens)
                if not self._is_ahead:
                    self.kv_cache_manager.cache_blocks(request, computed)
                self._note_done(request, computed)
            else:
                self._wasted.step_over(request_id, tokens, 1.0, time.monotonic())
        return dict(super().update_from_output(scheduler_output, model_runner_output))

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """Abort requests, and those of jobs that are released."""
        if request_ids is not None:
            names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
            request_ids = [to_abort for name in names if (to_abort := self._abort_of(name)) is not None]
        ending = self.requests.keys() if request_ids is None else request_ids
        # The client, the replica and decode may all have named the same one.
        for request_id in dict.fromkeys(ending):
            if (request := self._unfinished(request_id)) is not None:
                computed = request.num_computed_tokens - request.num_in_flight_tokens
                self._wasted.dropped(request_id, DropReason.ABANDONED, computed, time.monotonic())
                if request.num_in_flight_tokens and not request.num_stale_output_tokens:
                    self._wasted.left_in_flight(request_id, computed, request.num_in_flight_tokens)
        return list(super().finish_requests(request_ids, finished_status))

    def shutdown(self) -> None:
        """Let go of the board, then stop as vLLM does."""
        self._bulletin.close()
        super().shutdown()

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)
        job = argument(request, JOB_XARG) or ""
        self._stepper.job_left(job, request.request_id)
        self._wasted.forget(request.request_id)
        if job not in self._stepper.jobs:
            self._bulletin.forget(job)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Take a request's KV blocks as vLLM does; what they held has been computed in vain."""
        computed = request.num_computed_tokens
        self._wasted.dropped(request.request_id, DropReason.MEMORY, computed, time.monotonic())
        super()._preempt_request(request, *args, **kwargs)
        self._stepper.started_over(self._queue.item(request))

    def _note_done(self, request: Request, computed_tokens: int) -> None:
        if computed_tokens >= request.num_prompt_tokens and (job := argument(request, JOB_XARG)):
            self._stepper.job_done(job, time.monotonic())

    def _abort_of(self, name: str) -> str | None:
        """The request that an abort of this name ends; None for the release of a job that has none to end.

        If it has one that waits to be pulled, the lease of that ends now.
        """
        if (release := Release.of(name)) is None:
            return name
        engine_id = self._stepper.jobs.get(release.job, "")
        request = self.requests.get(engine_id)
        if request is None or (argument(request, BEGUN_XARG) or 0) > release.begun:
            return None
        if request.is_finished():
            self.connector.release(engine_id)
            return None
        return engine_id

    def _unfinished(self, request_id: str) -> Request | None:
        request = self.requests.get(request_id)
        return None if request is None or request.is_finished() else request

    def _jobs_of(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        return tuple(self._queue.job_of(request_id) for request_id in request_ids)

    def _next(self, now_s: float) -> Start | Resume | Wait:
        if self.pause_state == PauseState.PAUSED_ALL:
            return Wait()
        may_start = self.pause_state == PauseState.UNPAUSED
        while True:
            pool = self.kv_cache_manager.block_pool
            free_blocks = pool.get_num_free_blocks()
            used_blocks = pool.num_gpu_blocks - 1 - free_blocks
            free_places = self.max_num_running_reqs - len(self.running) if self._holds_slots else math.inf
            memory = Memory(
                used_blocks, self._queue.shared_blocks, self._queue.freed_blocks, free_places=free_places
            )
            queue, suspended = self._queue.queued(may_start=may_start), self._queue.suspended(now_s)
            refused = self._memory_refused
            command = self._stepper.next_step(
                queue, suspended, free_blocks, now_s, refused=refused, memory=memory
            )
            if not isinstance(command, StartOver):
                return command
            self._start_over(command.requests, now_s)

    def _return_skipped(self) -> None:
        """Queue what vLLM has skipped, for a grammar that was not compiled say, and what could run by now."""
        for request in list(self.skipped_waiting):
            blocked = self._is_blocked_waiting_status(request.status)
            if not blocked or self._try_promote_blocked_waiting_request(request):
                self.skipped_waiting.remove_request(request)
                self.waiting.add_request(request)

    @contextmanager
    def _only(self, shown: Sequence[str], most_tokens: float) -> Iterator[None]:
        """Let vLLM see only these requests, in this order, while it composes a step of so many tokens."""
        running = {request.request_id: request for request in self.running}
        waiting = {request.request_id: request for request in self.waiting}
        skipped, self.skipped_waiting = self.skipped_waiting, create_request_queue(self.policy)
        self.running = [running.pop(request_id) for request_id in shown if request_id in running]
        self.waiting.clear()
        self.waiting.extend(waiting.pop(request_id) for request_id in shown if request_id in waiting)
        slots, budget = self.max_num_running_reqs, self.max_num_scheduled_tokens
        if self.scheduler_config.enable_chunked_prefill:  # else vLLM passes over a prompt that is longer
            most_tokens = int(min(budget, most_tokens))
            self.max_num_scheduled_tokens = self.kv_cache_manager.tokens_with_room(self.running, most_tokens)
        if self._holds_slots:
            self.max_num_running_reqs = slots - len(running)
        try:
            yield
        finally:
            self.max_num_running_reqs, self.max_num_scheduled_tokens = slots, budget
            self.running = [*running.values(), *self.running]
            self.waiting.extend(waiting.values())
            skipped.extend(self.skipped_waiting)
            self.skipped_waiting = skipped

    def _start_over(self, request_ids: Sequence[str], now_s: float) -> None:
        """Take the KV blocks of requests that have started."""
        for request_id in request_ids:
            request = self.requests[request_id]
            self.running.remove(request)
            self._preempt_request(request, now_s)

    def _issue(self, output: SchedulerOutput, command: Start | Resume | Wait, now_s: float) -> None:
        """Give a step its identity; tell the workers how to run it and the governor that it runs."""
        notice, checkpoint = None, None
        if isinstance(command, Resume):
            resumed = command.step
            checkpoint = resumed.step_id if resumed.boundary else None
            jobs = self._jobs_of(resumed.members)
            notice = Resumed(jobs, resumed.boundary, now_s - resumed.since_s, now_s, now_s)
        members = self._queue.members(output.num_scheduled_tokens)
        view = self._stepper.step_issued(command, members, now_s)
        predicted_s = self._stepper.rules.predictor.kinds_s(view.tokens, view.pairs)
        StepOrder(view.step_id, checkpoint, self._suspensions.take_discarded(), predicted_s).attach(output)
        self._bulletin.issued(self._stepper.view(self._queue.suspended_views()), notice)
        started = [new.req_id for new in output.scheduled_new_reqs]
        # Those that start over; the second model runner is sent them as new ones.
        started += output.scheduled_cached_reqs.resumed_req_ids
        for request_id in started:
            request = self.requests[request_id]
            cached_tokens = request.num_computed_tokens - output.num_scheduled_tokens[request_id]
            self._wasted.started(request_id, cached_tokens)
            if job := self._queue.job_of(request_id):
                is_first = not request.num_preemptions
                self._bulletin.notice(Started(job, cached_tokens, now_s, is_first))

    def _suspend(self, scheduled: SchedulerOutput, stopped: PreemptedOutput, pairs: float) -> None:
        """Roll a stopped step back, and keep it to be issued again; `pairs` are those of all its members."""
        members: dict[str, int] = {}
        left_pairs = self._pairs(scheduled.num_scheduled_tokens)
        for request_id, tokens in scheduled.num_scheduled_tokens.items():
            self.prev_step_scheduled_req_ids.discard(request_id)
            if (request := self._unfinished(request_id)) is not None:
                self._roll_back(request, tokens)
                members[request_id] = tokens
        stopped_order = StepOrder.of(scheduled)
        assert stopped_order is not None
        step_id = stopped_order.step_id
        order = self._bulletin.stop_order(step_id)
        beneficiary = "" if order is None else order.beneficiary
        computed, done = self._fractions(stopped, scheduled.total_num_scheduled_tokens, pairs)
        now_s = time.monotonic()
        boundary, kept = (stopped.resumes_at, done) if stopped.is_kept else (0, 0.0)
        for request_id, tokens in scheduled.num_scheduled_tokens.items():
            # Only who has left is dropped here, and of what is not kept the notice of the stop tells.
            self._wasted.step_over(request_id, tokens, kept if members else 0.0, now_s)
        kept_bytes, at_s = stopped.checkpoint_bytes, stopped.stopped_s
        step = SuspendedStep(step_id, members, left_pairs, boundary, kept, kept_bytes, at_s, beneficiary)
        self._stepper.step_preempted(step, now_s)
        if beneficiary:
            self._bulletin.preempted(beneficiary, stopped.stopped_s)
        self._bulletin.notice(
            Stopped(
                step_id=step_id,
                jobs=self._jobs_of(members),
                beneficiary=beneficiary,
                reason="" if order is None else order.reason,
                boundary=stopped.boundary,
                boundaries=stopped.boundaries,
                computed=computed,
                done=done,
                tokens=scheduled.total_num_scheduled_tokens,
                pairs=pairs,
                is_kept=stopped.is_kept,
                checkpoint_bytes=kept_bytes,
                ordered_s=stopped.stopped_s if order is None else order.ordered_s,
                stopped_s=stopped.stopped_s,
            )
        )

    def _fractions(self, stopped: PreemptedOutput, tokens: int, pairs: float) -> tuple[float, float]:
        """How much of a stopped step's time lies before where it stopped, and before where it goes on."""
        fraction = self._stepper.rules.predictor.fraction
        return fraction(stopped.computed, tokens, pairs), fraction(stopped.done, tokens, pairs)

    def _pairs(self, scheduled: Mapping[str, int]) -> float:
        """The attention of those in an issued step that are still here: its tokens count as computed."""
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


class AsyncSlackScheduler(SlackScheduler, AsyncScheduler):  # type: ignore[misc] # the same
    """The same where nothing is stopped and vLLM composes a step while the one before it runs."""


def _stepper(setup: EngineSetup, most_members: int, most_tokens: int) -> Stepper:
    nothing_known = PrefillPredictor(0.0, 0.0)
    rules = ChoiceRules(
        QueueOrder(setup.order),
        nothing_known,
        min(setup.join_tokens, most_tokens),
        Forecast(),
        setup.fairness(),
        targets=setup.class_targets(),
        most_members=most_members,
    )
    return Stepper(rules, setup.limits, setup.arrival_wait_s)
