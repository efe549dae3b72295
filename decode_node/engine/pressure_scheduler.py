"""vLLM's scheduler for a decode replica whose memory or pace runs short.

Runs in the EngineCore process, in place of `decode_node.scheduler.CarryingScheduler`, when the configuration
says so. Owns how decisions are carried out on vLLM's scheduler: streams lose their memory before vLLM
composes a step, and requests that shall not be in it are hidden meanwhile. What is decided is `slo.decode`'s.
While memory is ample, nobody waits for it and no objective is in danger, a step is vLLM's alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.request import RequestStatus

from decode_node.engine.accounts import StreamAccount
from decode_node.engine.last_words import LastWords
from decode_node.engine.leavers import Leavers
from decode_node.engine.setup import DecodeSetup
from decode_node.engine.step_clock import StepClock
from decode_node.engine.view import StreamView
from decode_node.requests.dropping import DROPPED
from decode_node.requests.leaving import LEFT
from decode_node.scheduler import CarryingScheduler
from kv_transfer.swap.book import SwapBook, SwapFigures
from slo.decode.composition import MARGIN, Composer
from slo.decode.drop import overdue
from slo.decode.headroom import DecodeLoad
from slo.decode.output_length import OutputLengths
from slo.decode.predicted_peak import predicted_peak
from slo.decode.reserve import TopTierReserve
from slo.decode.restore import STARVES_AFTER_S, restore_order
from slo.decode.step_time import StepShape, StepTimes
from slo.decode.victims import HostRoom, Stream, TakenBy, VictimReason, VictimRules
from slo.queue.ageing import Ageing
from telemetry.pressure import PRESSURE_KEY, PressureFigures

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

_STALL: Final = 0.5
"""Part of the tightest TPOT objective that computing a sequence again may add to a step."""
_LEAST_CHUNK: Final = 16
_PUBLISH_S: Final = 0.5
"""Gauges are published so often, events at once."""
_NOBODY: Final[frozenset[str]] = frozenset()


class PressureScheduler(CarryingScheduler):
    """`scheduler_cls` of a decode replica that acts under pressure.

    Raises:
        ValueError: when the engine decodes speculatively or keeps its KV cache in several groups of blocks.
    """

    running: list[Request]
    waiting: Any
    skipped_waiting: Any
    max_num_running_reqs: int
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if (
            self.num_spec_tokens
            or self.vllm_config.max_concurrent_batches > 1
            or len(self.kv_cache_config.kv_cache_groups) != 1
        ):
            raise ValueError(
                "a decode engine that acts under pressure decodes without speculation, one step at a time, a "
                "model whose KV cache is in one group of blocks"
            )
        setup = DecodeSetup.of(self.vllm_config)
        self._tiers, self._drop_after_s = setup.tiers(), setup.drop_after_s
        self._accounts: dict[str, StreamAccount] = {}
        self._view = StreamView(self, self._accounts, self._tiers)
        self._lengths = OutputLengths()
        self._times = StepTimes()
        self._composer = Composer(self._times)
        self._reserve = TopTierReserve()
        self._ageing = Ageing()
        self._figures = PressureFigures()
        self._published_s = 0.0
        self._parked: set[str] = set()
        """Preempted and waiting."""
        self._restoring: set[str] = set()
        """Of those that were preempted, the ones that compute again."""
        self._untimed: set[str] = set()
        """Requests whose first token is to come."""
        self._paced: set[str] = set()
        """Requests with a TPOT objective."""
        self._droppable: set[str] = set()
        """Requests that may be ended for good."""
        self._left_out = _NOBODY
        self._batch: Mapping[str, int] = {}
        """The streams of the latest step."""
        self._reasons: dict[str, tuple[VictimReason, TakenBy]] = {}
        self._leavers = Leavers()
        self._last_words = LastWords()
        self._swaps: SwapBook | None = getattr(self.connector, "swaps", None)
        self._threshold = self.scheduler_config.long_prefill_token_threshold or self.max_num_scheduled_tokens
        self._clock = StepClock(self._times)

    def add_request(self, request: Request) -> None:
        """Queue a request; it brings its tier and its objective."""
        if request.request_id not in self.requests:
            account = StreamAccount.of(request, time.monotonic())
            self._accounts[request.request_id] = account
            if account.first_s is None:
                self._untimed.add(request.request_id)
            if account.tpot_s is not None:
                self._paced.add(request.request_id)
            if account.may_drop:
                self._droppable.add(request.request_id)
            if self._leavers.is_back(account):
                self._parked.add(request.request_id)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Issue the next step: vLLM's, with those that may be in it."""
        now_s = time.monotonic()
        if self.skipped_waiting:
            self._return_skipped()
        self._relieve(now_s)
        shown = self._admitted(now_s) if self.waiting or self._parked else None
        self._left_out = self._leaves_out(now_s) if self._paced else _NOBODY
        if shown is None and not self._left_out and not self._restoring:
            output = super().schedule(*args, **kwargs)
        else:
            with self._hidden(self._left_out, shown), self._in_chunks():
                output = super().schedule(*args, **kwargs)
        self._issue(output, now_s)
        if self._droppable and self._parked and self._drop_after_s is not None:
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
        for name in [*self._untimed] if self._untimed else ():
            request = self.requests.get(name)
            if request is None or request.num_output_tokens:
                self._untimed.discard(name)
                if request is not None:
                    account = self._accounts[name]
                    account.first_s, account.first_tokens = now_s, request.num_output_tokens
        for name in [*self._restoring] if self._restoring else ():
            request = self.requests[name]
            if request.status == RequestStatus.RUNNING and not request.is_prefill_chunk:
                self._restored(request, now_s)
        return outputs

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Statistics as vLLM keeps them, with what has been done for lack of memory or pace."""
        stats = super().make_stats(*args, **kwargs)
        if stats is None or self.connector is None:
            return stats
        if self._clock.ended_s - self._published_s >= _PUBLISH_S or not self.requests:
            self._published_s = self._clock.ended_s
            self._figures.peak, self._figures.reserve = self._peak(), self._reserve.part(self._clock.ended_s)
            self._figures.load = self._load(self._clock.ended_s)
            if self._swaps is not None:
                self._figures.swap_used, moved = self._swaps.used, self._swaps.figures
                self._figures.swapped_out, self._figures.swapped_back = moved.out, moved.back
                self._swaps.figures = SwapFigures()
        if not self._figures.is_empty:
            nothing = self.connector.build_kv_connector_stats().data
            stats.kv_connector_stats = {
                **nothing,
                **(stats.kv_connector_stats or {}),
                PRESSURE_KEY: msgspec.to_builtins(self._figures),
            }
            self._figures = PressureFigures()
        return stats

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Take a request's KV blocks as vLLM does, and count it."""
        name = request.request_id
        account, lost = self._accounts[name], request.num_computed_tokens
        if name in self._reasons:
            reason, by = self._reasons.pop(name)
        else:
            reason, by = VictimReason.VLLM, self._only_here(request)
        if self._swaps is None or by is not TakenBy.SWAP or not self._swap_out(request):
            by = TakenBy.RECOMPUTE
        super()._preempt_request(request, *args, **kwargs)
        self._figures.preempted.append((account.tier, reason.value, by.value))
        self._lengths.preempted()
        account.lost_tokens, account.pulls = lost, False
        if account.parked_s is None:
            account.parked_s = time.monotonic()
        self._restoring.discard(name)
        self._parked.add(name)

    def _only_here(self, request: Request) -> TakenBy:
        """What becomes of the KV of a request that vLLM has chosen in the midst of a step."""
        stream = self._view.stream(request, self._threshold, time.monotonic())
        others_weight = sum([self._view.weight(other) for other in self.running])
        rules = self._victim_rules(self._threshold)
        return rules.taken_by(stream._replace(may_leave=False), others_weight)

    def _let_go(self, request: Request, reason: VictimReason, now_s: float) -> None:
        """End a running request here; it comes back once the prefill tier has computed its KV."""
        account = self._accounts[request.request_id]
        self._figures.preempted.append((account.tier, reason.value, TakenBy.REPREFILL.value))
        self._lengths.preempted()
        self._leavers.leave(request, account, self._view.preemptions(request) + 1, now_s)
        self._last_words.say(request, LEFT)
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)

    def _drop(self, request: Request, reason: VictimReason) -> None:
        """End a request for good; whatever it has, or was to get, is given back."""
        account = self._accounts[request.request_id]
        account.pulls = False  # it will not try again
        self._figures.preempted.append((account.tier, reason.value, TakenBy.DROP.value))
        self._last_words.say(request, DROPPED)
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)

    def _drop_overdue(self, after_s: float, now_s: float) -> None:
        """Drop those that have waited for their memory for too long and are not in this step either."""
        waiting = [self.requests[name] for name in self._droppable & self._parked]
        without = [self._view.parked(request) for request in waiting if not self._view.blocks(request)]
        for parked in overdue(without, after_s, now_s):
            self._drop(self.requests[parked.request_id], VictimReason.PARKED)

    def _swap_out(self, request: Request) -> bool:
        """Have a running request's blocks moved to host memory before somebody else gets them."""
        if self._swaps is None:
            return False
        blocks = [block.block_id for block in self._view.blocks(request)]
        return self._swaps.take(request.request_id, blocks, request.num_computed_tokens)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Forget all KV, that in host memory too."""
        is_reset = bool(super().reset_prefix_cache(*args, **kwargs))
        if self._swaps is not None:
            self._swaps.forget_all()
        return is_reset

    def _free_blocks(self, request: Request) -> None:
        name = request.request_id
        super()._free_blocks(request)
        has_ended = request.status in {RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED}
        if name in self._restoring and has_ended:
            self._restored(request, time.monotonic())
        account = self._accounts.pop(name)
        if name in self._parked and account.pulls and request.status == RequestStatus.FINISHED_ERROR:
            # What it was to pull has failed; it will try again.
            self._leavers.leave_again(account, time.monotonic())
        for names in (self._parked, self._restoring, self._untimed, self._paced, self._droppable):
            names.discard(name)
        if has_ended:
            self._lengths.ended(account.tier, account.tenant, request.num_output_tokens)

    def _relieve(self, now_s: float) -> None:
        """Take memory from victims when the next step has too little."""
        view = self._view
        if not self.running or (self._is_ample() and not self.waiting):
            return
        in_chunks = self._parked or self._restoring
        chunk = self._chunk_tokens() if in_chunks else int(self._threshold)
        others = [view.waiting_to_run(request) for request in self._pulled()]
        others += self._guaranteed(now_s)

        def needed() -> int:
            running = sum([view.next_blocks(request, chunk) for request in self.running])
            return running + sum([stream.next_blocks for stream in others])

        rules: VictimRules | None = None
        while needed() > view.free_blocks:
            rules = rules or self._victim_rules(chunk)
            streams = [view.stream(request, chunk, now_s) for request in self.running]
            if not (victims := rules.choose([*streams, *others], view.free_blocks)):
                break  # vLLM's own rule is what is left; those that it takes first stand last
            for name, reason, by in victims:
                request = self.requests[name]
                if by is TakenBy.REPREFILL:
                    self._let_go(request, reason, now_s)
                    continue
                if by is TakenBy.DROP:
                    self._lengths.preempted()
                    self._drop(request, reason)
                    continue
                self._leavers.stays()
                self._reasons[name] = reason, by
                self.running.remove(request)
                self._preempt_request(request, now_s, drop_stale_output=self.requires_kv_delivery)
        if not self._is_ample():
            ranked = VictimRules(self._tiers.top_rank, 0.0, 0.0, 1)
            self.running.sort(key=lambda request: -ranked.level(self._ranked(request)))

    def _pulled(self) -> list[Request]:
        """Requests whose KV has come and that have not run since."""
        has_come = self.finished_recving_kv_req_ids
        return [
            request
            for request in self.skipped_waiting
            if request.num_computed_tokens
            and (request.request_id in has_come or not self._is_blocked_waiting_status(request.status))
        ]

    def _guaranteed(self, now_s: float) -> list[Stream]:
        """Newcomers of the top tier that start within what is kept for it, if lower tiers can make room."""
        top_rank, view = self._tiers.top_rank, self._view
        tops = [request for request in self.waiting if self._rank(request) == top_rank]
        if not tops or not (kept := self._reserved_tokens(self._holders(), now_s)):
            return []
        lower = [request for request in self.running if self._rank(request) < top_rank]
        room = view.free_blocks + sum([len(view.blocks(request)) for request in lower])
        found = []
        for request in tops:
            blocks = view.blocks_for(request.num_tokens)
            if blocks * view.block_tokens > kept or blocks > room:
                break
            kept, room = kept - blocks * view.block_tokens, room - blocks
            found.append(Stream(request.request_id, top_rank, 0.0, 0, 0, blocks, blocks, 0))
        return found

    def _rank(self, request: Request) -> int:
        return self._tiers.rank(self._accounts[request.request_id].tier)

    def _is_ample(self) -> bool:
        """Whether the next steps have what they need, by a bound that takes no look at each request."""
        streams = len(self.running) + len(self.finished_recving_kv_req_ids)
        needed = streams * self._view.blocks_ahead
        if self._inflight_prefills:
            needed += self._inflight_prefill_reserved_blocks()
        return bool(self._view.free_blocks >= needed)

    def _ranked(self, request: Request) -> Stream:
        return Stream(
            request.request_id, self._rank(request), 0.0, 0, 0, 0, 0, 0, self._view.preemptions(request)
        )

    def _victim_rules(self, chunk: int) -> VictimRules:
        context = sum([request.num_computed_tokens for request in self.running])
        step_s = self._times.predict_s(StepShape(len(self.running), context))
        # Before any step was measured, a victim costs by its tokens.
        token_s = self._times.prompt_token_s or 1e-6
        return VictimRules(self._tiers.top_rank, token_s, step_s, chunk, self._host(), self._leavers.takes)

    def _host(self) -> HostRoom | None:
        """Where KV can wait, once the workers have said how fast it gets there."""
        if self._swaps is None or self._swaps.block_s is None:
            return None
        return HostRoom(self._swaps.free_slots, self._swaps.block_s, self._view.block_tokens)

    def _chunk_tokens(self) -> int:
        """Tokens of a sequence that a step computes again: so many that the tightest pace bears it."""
        token_s = self._times.prompt_token_s if self._times.is_known else 0.0
        objectives = [self._accounts[name].tpot_s or 0.0 for name in self._paced if name not in self._parked]
        if not objectives or not token_s:
            return int(self._threshold)
        return int(max(_LEAST_CHUNK, min(self._threshold, _STALL * min(objectives) / token_s)))

    def _admitted(self, now_s: float) -> list[Request] | None:
        """Who of those that wait for memory may start, in order; None for all, as they stand."""
        if len(self.running) >= self.max_num_running_reqs:
            return []  # vLLM starts nobody
        view, waiting = self._view, list(self.waiting)
        held_by = self._holders()
        holdings = [view.holding(request, self._lengths) for request in held_by]
        reserve = self._reserved_tokens(held_by, now_s)
        kept = len(self.running) * view.blocks_ahead if self._parked else 0
        pool, free = view.pool(held_by, kept), view.pool(held_by).free_tokens
        requests = {request.request_id: request for request in waiting}
        ordered = restore_order(map(view.parked, waiting), self._tiers, self._ageing, now_s)
        shown: list[Request] = []
        restores = bool(self._restoring)
        for parked in ordered:
            request = requests[parked.request_id]
            is_top = self._tiers.rank(parked.tier) == self._tiers.top_rank
            newcomer = view.holding(request, self._lengths)
            fits = pool.fit(holdings, newcomer, 0.0 if is_top else reserve).fits
            if is_top and newcomer.tokens <= min(reserve, free):  # within what is kept for it
                fits, reserve = True, reserve - newcomer.tokens
            computes = not parked.is_newcomer and not self._comes_back(request)
            if not fits or (restores and computes):
                break
            free -= newcomer.tokens
            if not is_top and not self._keeps_pace(request, parked.since_s, now_s):
                break
            restores = restores or computes
            self._accounts[parked.request_id].pulls_since_s = now_s
            holdings.append(newcomer)
            pool = replace(pool, free_tokens=pool.free_tokens - newcomer.tokens)
            shown.append(request)
        if len(shown) == len(waiting) and not self._parked:
            return None
        return shown

    def _comes_back(self, request: Request) -> bool:
        """Whether what a request has lost need not be computed here."""
        is_swapped = self._swaps is not None and self._swaps.tokens_of(request.request_id) > 0
        return is_swapped or self._accounts[request.request_id].pulls

    def _return_skipped(self) -> None:
        """Queue what vLLM has skipped for another reason than that its KV is on its way or has come."""
        for request in reversed(list(self.skipped_waiting)):
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS or request.num_computed_tokens:
                continue
            blocked = self._is_blocked_waiting_status(request.status)
            if not blocked or self._try_promote_blocked_waiting_request(request):
                self.skipped_waiting.remove_request(request)
                self.waiting.prepend_request(request)

    def _reserved_tokens(self, held_by: Sequence[Request], now_s: float) -> float:
        """Memory that is kept for the top tier, in tokens."""
        blocks = 0
        for request in held_by:
            if self._rank(request) == self._tiers.top_rank:
                blocks += len(self._view.blocks(request))
        part = blocks / self._view.pool_blocks
        self._reserve.observe(part, now_s)
        if self._tiers.top_rank == 0:
            return 0.0
        return self._reserve.kept(part, now_s) * self._view.pool_blocks * self._view.block_tokens

    def _keeps_pace(self, request: Request, since_s: float, now_s: float) -> bool:
        if not self._paced or now_s - since_s > STARVES_AFTER_S:
            return True
        paced = [self._view.paced(one, self._clock.ended_s, now_s) for one in self.running]
        tpot_s = self._accounts[request.request_id].tpot_s
        return self._composer.admits(paced, request.num_tokens, tpot_s)

    def _leaves_out(self, now_s: float) -> frozenset[str]:
        """Whom the next step leaves out for the sake of the others' pace."""
        if not self._times.is_known:
            return _NOBODY
        decoding = [request for request in self.running if not request.is_prefill_chunk]
        context = sum([request.num_computed_tokens for request in decoding])
        prompt = self._chunk_tokens() if len(decoding) < len(self.running) else 0
        full_s = self._times.predict_s(StepShape(len(decoding), context, prompt))
        tightest = min([self._accounts[name].tpot_s or 0.0 for name in self._paced])
        if full_s <= MARGIN * tightest and not self._left_out:
            return _NOBODY
        paced = [self._view.paced(request, self._clock.ended_s, now_s) for request in decoding]
        left_out = self._composer.leaves_out(paced, now_s, prompt)
        for one in paced:
            account = self._accounts[one.request_id]
            account.left_out_s = one.token_s if one.request_id in left_out else None
        self._figures.skipped += len(left_out)
        return left_out

    @contextmanager
    def _hidden(self, left_out: frozenset[str], shown: list[Request] | None) -> Iterator[None]:
        """Let vLLM see neither these running requests nor any waiting ones but those shown."""
        hidden = [request for request in self.running if request.request_id in left_out]
        if hidden:
            self.running = [request for request in self.running if request.request_id not in left_out]
        slots, self.max_num_running_reqs = self.max_num_running_reqs, self.max_num_running_reqs - len(hidden)
        others: list[Request] = []
        if shown is not None:
            names = {request.request_id for request in shown}
            others = [request for request in self.waiting if request.request_id not in names]
            self.waiting = create_request_queue(self.policy)
            self.waiting.extend(shown)
        try:
            yield
        finally:
            self.max_num_running_reqs = slots
            self.running += hidden
            self.waiting.extend(others)

    @contextmanager
    def _in_chunks(self) -> Iterator[None]:
        """Bound what a step computes of sequences that lost their memory."""
        config, threshold = self.scheduler_config, self.scheduler_config.long_prefill_token_threshold
        tokens = self.max_num_scheduled_tokens
        if self._parked or self._restoring:
            chunk = self._chunk_tokens()
            # All of them together: whoever stands behind them would have nothing of the step.
            prompts = sum([request.is_prefill_chunk for request in self.running])
            config.long_prefill_token_threshold = max(1, chunk // max(1, prompts))
            others = len(self.running) + len(self.skipped_waiting)
            self.max_num_scheduled_tokens = min(tokens, others + chunk)
        try:
            yield
        finally:
            config.long_prefill_token_threshold, self.max_num_scheduled_tokens = threshold, tokens

    def _issue(self, output: SchedulerOutput, now_s: float) -> None:
        """Note who has started again, and what the step has in it."""
        if self._parked:
            for name in [name for name in self._parked if name in output.num_scheduled_tokens]:
                self._parked.remove(name)
                self._restoring.add(name)
                request, account = self.requests[name], self._accounts[name]
                account.started_tokens = request.num_output_tokens
                new = output.num_scheduled_tokens[name]
                cached = request.num_computed_tokens - new
                self._figures.recomputed_tokens += max(0, account.lost_tokens - cached)
        is_wanted, tokens = self._clock.wants_next(), output.num_scheduled_tokens
        if not tokens:
            return
        before, self._batch = self._batch, tokens
        if not is_wanted:
            return
        if getattr(output.kv_connector_metadata, "swaps", None) is not None:
            return  # blocks that move are no part of a step's own time
        streams = context = 0
        for name, new in tokens.items():
            request = self.requests[name]
            if new == 1:
                streams += 1
            context += request.num_computed_tokens
        moved = len(before.keys() ^ tokens.keys())
        shape = StepShape(streams, context, output.total_num_scheduled_tokens - streams, moved)
        self._clock.begins(shape, now_s)

    def _restored(self, request: Request, now_s: float) -> None:
        """A request has computed again what it lost."""
        name = request.request_id
        account = self._accounts[name]
        self._restoring.discard(name)
        if account.parked_s is not None:
            away_s, alone_s = now_s - account.parked_s, account.lost_tokens * self._times.prompt_token_s
            self._figures.restored.append((account.tier, away_s))
            if account.pulls and self._times.is_known and alone_s > 0:
                self._leavers.took(account, alone_s, now_s)
        account.pulls = False
        account.parked_s, account.lost_tokens = None, 0

    def _load(self, now_s: float) -> DecodeLoad:
        """What the router is told."""
        held_by = self._holders()
        pool, unfinished = (
            self._view.pool(held_by),
            [request for request in self.requests.values() if not request.is_finished()],
        )
        context = sum([request.num_computed_tokens for request in self.running])
        return DecodeLoad(
            pool.tokens,
            pool.shared_tokens,
            int(self._reserved_tokens(held_by, now_s)),
            self._times.predict_s(StepShape(len(self.running), context)),
            {
                self._accounts[request.request_id].job: self._view.holding(request, self._lengths)
                for request in unfinished
            },
            {tier: self._lengths.whole(tier, "", self.max_model_len) for tier in self._tiers.names},
            self._lengths.factor,
        )

    def _peak(self) -> float:
        """The predicted peak of those that have memory, as a part of the pool."""
        held_by = self._holders()
        pool = self._view.pool(held_by)
        peak = predicted_peak([self._view.holding(request, self._lengths) for request in held_by])
        return max(0, peak - pool.shared_tokens) / pool.tokens

    def _holders(self) -> list[Request]:
        """Who has memory: those that run, and those whose KV is on its way or has come."""
        pulled = [request for request in self.skipped_waiting if self._view.blocks(request)]
        return [*self.running, *pulled]
