"""vLLM's scheduler for a decode replica whose memory or pace runs short.

Runs in the EngineCore process, in place of `decode_node.scheduler.CarryingScheduler`, when the configuration
says so. Owns in which order a step's decisions are made, and how they are carried out on vLLM's scheduler:
streams lose their memory before vLLM composes a step, and requests that shall not be in it are hidden
meanwhile. What is decided is `slo.decode`'s; its neighbours here ask it. While memory is ample, nobody waits
for it and no objective is in danger, a step is vLLM's alone.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, assert_never

import msgspec
from vllm.v1.request import RequestStatus

from decode_node.engine.admission import Admission
from decode_node.engine.hiding import hidden, in_chunks
from decode_node.engine.last_words import LastWords
from decode_node.engine.leavers import Leavers
from decode_node.engine.pace import Pace
from decode_node.engine.relief import Relief
from decode_node.engine.report import PressureReport
from decode_node.engine.setup import DecodeSetup
from decode_node.engine.step_clock import StepClock
from decode_node.engine.stream_book import StreamBook
from decode_node.engine.view import StreamView
from decode_node.requests.dropping import DROPPED
from decode_node.requests.leaving import LEFT
from decode_node.scheduler import CarryingScheduler
from kv_transfer.cache_groups import keeps_all
from kv_transfer.swap.book import SwapBook
from slo.decode.drop import overdue
from slo.decode.output_length import OutputLengths
from slo.decode.step_time import StepShape, StepTimes
from slo.decode.victims import TakenBy, Victim, VictimReason
from telemetry.pressure import PRESSURE_KEY

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

_ENDED: Final = frozenset(
    {
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_REPETITION,
    }
)
"""Of answers that have ended by themselves."""


class PressureScheduler(CarryingScheduler):
    """`scheduler_cls` of a decode replica that acts under pressure.

    Raises:
        ValueError: when the engine decodes speculatively or keeps its KV cache in several groups of blocks,
            or when requests give back blocks before they end.
    """

    running: list[Request]
    waiting: Any
    skipped_waiting: Any
    max_num_running_reqs: int
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refuse_what_it_cannot_count()
        setup = DecodeSetup.of(self.vllm_config)
        tiers, self._drop_after_s = setup.tiers(), setup.drop_after_s
        threshold = int(self.scheduler_config.long_prefill_token_threshold)
        most_tokens = threshold or self.max_num_scheduled_tokens
        self._swaps: SwapBook | None = getattr(self.connector, "swaps", None)
        self._lengths = OutputLengths()
        self._times = StepTimes()
        self._clock = StepClock(self._times)
        self._leavers = Leavers()
        self._last_words = LastWords()
        self._book = StreamBook()
        self._view = StreamView(self, self._book.accounts, tiers)
        self._pace = Pace(
            self._view, self._book, self._times, self._clock, most_tokens, in_chunks=threshold > 0
        )
        self._relief = Relief(self._view, self._pace, self._times, self._leavers, self._swaps)
        self._admission = Admission(self._view, self._book, self._pace, self._lengths, tiers, self._swaps)
        self._report = PressureReport(
            self._view, self._pace, self._admission, self._lengths, tiers, self._swaps
        )

    def _refuse_what_it_cannot_count(self) -> None:
        if (
            self.num_spec_tokens
            or self.vllm_config.max_concurrent_batches > 1
            or len(self.kv_cache_config.kv_cache_groups) != 1
        ):
            raise ValueError(
                "a decode engine that acts under pressure decodes without speculation, one step at a time, a "
                "model whose KV cache is in one group of blocks; of full and sliding-window attention "
                "disable_hybrid_kv_cache_manager: true in decode.engine_kwargs makes one group, otherwise "
                "leave pressure.enabled off"
            )
        if not keeps_all(self.kv_cache_manager, int(self.max_model_len)):
            raise ValueError(
                "a decode engine that acts under pressure counts what a sequence holds by its length, but "
                "this model's layers give back what their window has passed; leave pressure.enabled off, or "
                f"set max_model_len ({self.max_model_len}) to no more than the window"
            )

    def add_request(self, request: Request) -> None:
        """Queue a request; it brings its tier and its objective."""
        if request.request_id not in self.requests:
            least_s = self._times.at_best_s(StepShape(1, request.num_tokens))
            self._book.open(request, self._leavers, least_s, time.monotonic())
            self._admission.arrives(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Issue the next step: vLLM's, with those that may be in it."""
        now_s, book = time.monotonic(), self._book
        if self.skipped_waiting:
            self._return_skipped()
        self._relieve(now_s)
        shown = self._admitted(now_s) if self.waiting or book.parked else None
        left_out = self._pace.leaves_out(now_s)
        if shown is None and not left_out and not book.restoring:
            output = super().schedule(*args, **kwargs)
        else:
            self._report.figures.skipped += len(left_out)
            chunk_tokens = self._pace.chunk_tokens() if book.parked or book.restoring else None
            with hidden(self, left_out, shown), in_chunks(self, chunk_tokens):
                output = super().schedule(*args, **kwargs)
        if book.parked:
            tokens = book.issued(output.num_scheduled_tokens, self.requests)
            self._report.figures.recomputed_tokens += tokens
        self._clock.issued(output, self.requests, now_s)
        if book.droppable and book.parked and self._drop_after_s is not None:
            self._drop_overdue(self._drop_after_s, now_s)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take in a step that is complete."""
        now_s = time.monotonic()
        self._clock.ends(now_s)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        self._clock.goes_on(is_busy=bool(self.running))
        self._last_words.tell(outputs)
        if self._book.untimed:
            self._book.emitted(self.requests, now_s)
        if self._book.restoring:
            for name in self._book.computed_again(self.requests):
                self._restored(name, now_s)
        return outputs

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Statistics as vLLM keeps them, with what has been done for lack of memory or pace."""
        stats = super().make_stats(*args, **kwargs)
        if stats is None or self.connector is None:
            return stats
        if (figures := self._report.take(self.requests, self._clock.ended_s)) is not None:
            self._tell(stats, PRESSURE_KEY, msgspec.to_builtins(figures))
        return stats

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Forget all KV, that in host memory too; none if vLLM does not, because streams have blocks."""
        with self._relief.forgetting():
            is_reset = bool(super().reset_prefix_cache(*args, **kwargs))
        if is_reset and self._swaps is not None:
            self._swaps.forget_all()
        return is_reset

    def _return_skipped(self) -> None:
        """Queue what vLLM has skipped for another reason than that its KV is on its way or has come."""
        for request in reversed(list(self.skipped_waiting)):
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS or request.num_computed_tokens:
                continue
            blocked = self._is_blocked_waiting_status(request.status)
            if not blocked or self._try_promote_blocked_waiting_request(request):
                self.skipped_waiting.remove_request(request)
                self.waiting.prepend_request(request)

    def _relieve(self, now_s: float) -> None:
        """Take memory from victims when the next step has too little."""
        if not self.running or (self._is_ample() and not self.waiting):
            return
        pace, book = self._pace, self._book
        chunk_tokens = pace.chunk_tokens() if book.parked or book.restoring else pace.most_tokens
        others = [self._view.waiting_to_run(request) for request in self._pulled()]
        newcomers = self._admission.guaranteed(self.waiting, now_s)
        # A newcomer starts beside room for the whole sequences of those that run, see `StreamView.pool`.
        room_tokens = self._view.max_model_len if newcomers else chunk_tokens
        for victim in self._relief.victims([*others, *newcomers], chunk_tokens, room_tokens, now_s):
            self._take(victim, now_s)
        if not self._is_ample():
            self.running.sort(key=self._relief.level, reverse=True)

    def _is_ample(self) -> bool:
        """Whether the next steps have what they need, by a bound that takes no look at each request."""
        streams = len(self.running) + len(self.finished_recving_kv_req_ids)
        needed = streams * self._view.blocks_ahead
        if self._inflight_prefills:
            needed += self._inflight_prefill_reserved_blocks()
        return bool(self._view.free_blocks >= needed)

    def _pulled(self) -> list[Request]:
        """Requests whose KV has come and that have not run since."""
        has_come = self.finished_recving_kv_req_ids
        return [
            request
            for request in self.skipped_waiting
            if request.num_computed_tokens
            and (request.request_id in has_come or not self._is_blocked_waiting_status(request.status))
        ]

    def _admitted(self, now_s: float) -> list[Request] | None:
        """Who of those that wait vLLM may see; None for all."""
        if len(self.running) >= self.max_num_running_reqs:
            return []  # vLLM starts nobody
        return self._admission.admitted(self.waiting, self.max_num_running_reqs, now_s)

    def _take(self, victim: Victim, now_s: float) -> None:
        """Take a running request's memory."""
        request = self.requests[victim.request_id]
        match victim.by:
            case TakenBy.REPREFILL:
                self._let_go(request, victim.reason, now_s)
            case TakenBy.DROP:
                self._drop(request, victim.reason)
            case TakenBy.SWAP | TakenBy.RECOMPUTE:
                self._leavers.stays()
                self.running.remove(request)
                self._preempt_request(request, now_s, drop_stale_output=self.requires_kv_delivery)
            case _:
                assert_never(victim.by)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Take a request's KV blocks as vLLM does, and count it."""
        name, lost_tokens, now_s = request.request_id, request.num_computed_tokens, time.monotonic()
        reason, by = self._relief.preempts(request, now_s)
        super()._preempt_request(request, *args, **kwargs)
        self._count(request, reason, by)
        self._book.preempted(name, lost_tokens, now_s)

    def _let_go(self, request: Request, reason: VictimReason, now_s: float) -> None:
        """End a running request here; it comes back once the prefill tier has computed its KV."""
        account = self._book.accounts[request.request_id]
        self._count(request, reason, TakenBy.REPREFILL)
        self._leavers.leave(request, account, self._view.preemptions(request) + 1, now_s)
        self._last_words.say(request, LEFT)
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)

    def _drop(self, request: Request, reason: VictimReason) -> None:
        """End a request for good; whatever it has, or was to get, is given back."""
        self._book.accounts[request.request_id].pulls = False  # it will not try again
        self._count(request, reason, TakenBy.DROP)
        self._last_words.say(request, DROPPED)
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)

    def _drop_overdue(self, after_s: float, now_s: float) -> None:
        """Drop those that have waited for their memory for too long and are not in this step either."""
        waiting = [self.requests[name] for name in self._book.droppable & self._book.parked]
        without = [self._view.parked(request, now_s) for request in waiting if not self._view.blocks(request)]
        for parked in overdue(without, after_s, now_s):
            self._drop(self.requests[parked.request_id], VictimReason.PARKED)

    def _count(self, request: Request, reason: VictimReason, by: TakenBy) -> None:
        tier = self._book.accounts[request.request_id].tier
        self._report.figures.preempted.append((tier, reason.value, by.value))

    def _restored(self, name: str, now_s: float) -> None:
        """A request has computed again what it lost."""
        account = self._book.accounts[name]
        if account.parked_s is not None:
            away_s, alone_s = now_s - account.parked_s, account.lost_tokens * self._times.prompt_token_s
            self._report.figures.restored.append((account.tier, away_s))
            if account.pulls and self._times.is_known and alone_s > 0:
                self._leavers.took(account, alone_s, now_s)
        self._book.restored(name)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """End a request as vLLM does; blocks that are written to meanwhile are freed later."""
        account = self._book.accounts[request.request_id]
        if request.request_id in self._book.parked and account.pulls:
            # What it was to pull has failed, or was given up; it will try again, unless its client has gone.
            self._leavers.leave_again(account, time.monotonic())
        return super()._free_request(request, *args, **kwargs)

    def _free_blocks(self, request: Request) -> None:
        """Free a request's blocks as vLLM does once it has ended, and close its account."""
        name, book = request.request_id, self._book
        super()._free_blocks(request)
        has_ended = request.status in _ENDED
        if name in book.restoring and has_ended:
            self._restored(name, time.monotonic())
        account = book.close(name)
        if account.is_answer and (has_ended or _may_have_stopped(request)):
            self._lengths.ended(account.tier, account.tenant, request.num_output_tokens)


def _may_have_stopped(request: Request) -> bool:
    """Whether a request has ended with one of its stop strings, for all that the engine knows.

    The client's process finds them and aborts; a client that goes looks the same, and frees its memory too.
    """
    is_aborted = request.status == RequestStatus.FINISHED_ABORTED
    params = request.sampling_params
    return is_aborted and params is not None and bool(params.stop) and request.num_output_tokens > 0
