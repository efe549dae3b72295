"""The prefill replica: one vLLM engine that computes KV cache and reports what it has to do.

A thin shell around `prefill_node.replica.governing.ledger` and `prefill_node.replica.preemption_controller`.
Runs in the replica process; the engine's scheduler (`prefill_node.engine.scheduler`) runs in EngineCore, its
workers in processes of their own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections import OrderedDict
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.llm.deployment import PDPrefillServer
from ray.serve.llm.openai_api_models import CompletionRequest, ErrorResponse

from prefill_node.board.board import Board, BoardUnavailableError
from prefill_node.board.pass_shape import PassShape
from prefill_node.engine.scheduler import RELEASE_PREFIX
from prefill_node.replica.governing.governor import ForwardProfile, Governor
from prefill_node.replica.governing.ledger import Accepted, PrefillLedger
from prefill_node.replica.governing.snapshot import load, snapshot
from prefill_node.replica.monitor_link import Monitored
from prefill_node.replica.preemption_controller import Watch
from prefill_node.replica.preemption_metrics import METRICS, PreemptionRecord
from prefill_node.replica.warm_up import OtherSubjectError, Probe
from slo.predict.measured_on import UNKNOWN, Measurable, Subject
from slo.predict.prefill_time import PrefillPredictor, fit
from slo.preemption.decide import PreemptionMode
from slo.queue.order import QueueOrder
from slo.queue.slack import NO_DEADLINE
from slo.reports import PrefillReported, ReplicaGone
from slo.request import (
    ARRIVED_XARG,
    CACHED_XARG,
    DEADLINE_XARG,
    ENGINE_DIED,
    JOB_XARG,
    PREDICTOR_XARG,
    REPLICA_PARAM,
    TIER_XARG,
    WEIGHT_XARG,
    JobId,
    ReplicaId,
    RequestContext,
)
from telemetry import logs
from telemetry.catalogue import PREFILL, PREFILL_OUTSTANDING
from telemetry.engine_tap import EngineTap
from telemetry.instruments import Instruments
from telemetry.reporting import monitor_client
from telemetry.reporting.background import Background
from telemetry.reporting.draining import is_draining, until
from telemetry.reporting.reporter import Reporter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from ray.serve.handle import DeploymentHandle
    from ray.serve.llm import LLMConfig

    from prefill_node.board.events import Started
    from prefill_node.engine_setup import EngineSetup
    from slo.preemption.decide import PreemptionRules
    from slo.reports import Report
    from slo.tiers import Tier

_REMEMBER_RELEASED = 4096
CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True, slots=True)
class PrefillNodeConfig:
    """What a prefill replica needs beyond its engine.

    Attributes:
        predictor: From a calibration profile; None lets the warm-up measure one.
        profiled: What that profile was measured on.
        subject: What is served, as far as the configuration says.
        handoff_s: Predicted seconds from the end of prefill to the first token.
        warmup_tokens: Prompt lengths to prefill before reporting ready, each three times.
        weights: Worth of a request on time, by tier.
        rules: When a running prefill makes way.
        setup: The engine's part in that; its board is made by the replica.
        cores: CPU cores by replica rank on its node, as VLLM_CPU_OMP_THREADS_BIND; empty leaves it alone.
        is_monitored: Whether the cluster has an SLO monitor.
        drain_s: How long a replica that is shut down waits for its KV blocks to be pulled.
    """

    predictor: PrefillPredictor | None
    handoff_s: float
    warmup_tokens: tuple[int, ...]
    weights: Mapping[Tier, float]
    rules: PreemptionRules
    setup: EngineSetup
    cores: tuple[str, ...] = ()
    profiled: Subject = UNKNOWN
    subject: Subject = UNKNOWN
    is_monitored: bool = False
    drain_s: float = 30.0


class PrefillServer(PDPrefillServer):  # type: ignore[misc] # Ray ships no types for it
    """Serves prefills by slack and keeps the router informed."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, llm_config: LLMConfig, *, node: PrefillNodeConfig, router: DeploymentHandle
    ) -> None:
        context = serve.get_replica_context()
        self._node = node
        if node.cores:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = node.cores[context.rank.local_rank % len(node.cores)]
        ranks = int(llm_config.engine_kwargs.get("tensor_parallel_size", 1))
        board = _make_board(ranks)
        extra = llm_config.engine_kwargs.get("additional_config") or {}
        setup = replace(node.setup, board=str(board.path))
        llm_config.update_engine_kwargs(additional_config={**extra, **setup.encode()})
        await super().__init__(llm_config)
        board.unlink()  # all have attached; without a name nothing is left behind by a crash
        self._replica_id = ReplicaId(context.replica_id.unique_id)
        self._instruments = Instruments(
            PREFILL, PREFILL_OUTSTANDING, *EngineTap.METRICS, *METRICS, *monitor_client.METRICS
        )
        self._tap = EngineTap("prefill", self._instruments)
        self._tap.attach(self.engine)
        self._released: OrderedDict[JobId, None] = OrderedDict()
        self._computing: dict[JobId, asyncio.Task[Any]] = {}
        self._learned: list[tuple[int, int]] = []
        self._background = Background()
        self._probe = Probe(self.engine, self._llm_config.model_id)
        self._measurable = self._probe.about(node.subject)
        if differences := node.profiled.differences(self._measurable.subject):
            raise OtherSubjectError(differences)
        samples = await self._probe.warm_up(node.warmup_tokens)
        predictor = node.predictor or fit(samples).predictor
        self._ledger = PrefillLedger(replace(predictor, handoff_s=node.handoff_s))
        self._governor = Governor(
            self._ledger,
            node.weights,
            node.rules,
            QueueOrder(setup.order),
            await self._profile_forward(),
            setup.fairness(),
        )
        monitored = Monitored(self._replica_id, self._governor, lambda: self._tap.kv_usage)
        self._hits: list[tuple[JobId, int]] = []
        self._record = PreemptionRecord(self._instruments, self._ledger, monitored.passed, self._note_hit)
        self._watch = Watch(board, self._governor, self._record)
        logs.event(
            "prefill_ready",
            per_token_ms=predictor.per_token_s * 1e3,
            fixed_ms=predictor.fixed_s * 1e3,
            per_million_pairs_ms=predictor.per_pair_s * 1e9,
            measured=node.predictor is None,
        )
        self._reporter = Reporter(self._report, router.report.remote)
        if node.is_monitored:
            monitored.start(self._watch, self._instruments)

    async def completions(
        self, request: CompletionRequest, raw_request_info: Any = None
    ) -> AsyncGenerator[Any, None]:
        """Prefill one prompt of token ids; the decode tier's orchestrator is the only caller."""
        return self._prefill(request, raw_request_info)

    async def release(self, job_id: JobId, pin: ReplicaId | None = None) -> None:
        """Give a job up wherever it is: not yet here, running, or waiting to be pulled.

        Args:
            job_id: The job.
            pin: The replica that has it; read by `router.serve.replica_pinning` on the caller's side. When
                that one is gone the call gets here, where the job may just have been placed again.
        """
        if pin is not None and pin != self._replica_id:
            return
        self._released[job_id] = None
        while len(self._released) > _REMEMBER_RELEASED:
            self._released.popitem(last=False)
        if (work := self._computing.get(job_id)) is not None:
            work.cancel()
            await asyncio.wait([work])
        await self._abandon(job_id)
        self._watch.changed()

    async def measure_prefill(self, tokens: int, context_tokens: int = 0) -> float:
        """See `Probe.prefill_s`."""
        return await self._probe.prefill_s(tokens, context_tokens)

    async def measurable(self) -> Measurable:
        """What is measured here."""
        return self._measurable

    async def timed_prefill(self, request: CompletionRequest) -> tuple[dict[str, Any], float] | None:
        """Prefill for a decode replica that measures the handoff.

        Returns:
            Where the KV blocks are, and the seconds that it took; None when the engine refuses it.
        """
        started_s = time.monotonic()
        params = await self.prewarm_prefill(request)
        return None if params is None else (params, time.monotonic() - started_s)

    async def is_up(self, pin: ReplicaId | None = None) -> ReplicaId | None:  # noqa: ARG002
        """Who answers, for those who wait for it; None from a replica whose engine is dead.

        Args:
            pin: The replica that is asked; read by `router.serve.replica_pinning` on the caller's side.
        """
        return None if self._is_dead() else self._replica_id

    async def snapshot(self, pin: ReplicaId | None = None) -> dict[str, Any]:  # noqa: ARG002
        """What runs, waits and is suspended here, as plain data for `slackserve top`.

        Args:
            pin: The replica that is asked; read by `router.serve.replica_pinning` on the caller's side.
        """
        return snapshot(self._governor, self._watch.view(), self._watch.reached(), time.monotonic())

    async def _profile_forward(self) -> ForwardProfile:
        """Ask the workers where their forward pass can stop; the reason is logged when it cannot."""
        client = self.engine._engine_client  # noqa: SLF001 - no public way in
        answers = await client.collective_rpc("preemption_support")
        done, granularity, why = answers[0]
        shape = PassShape(tuple(done))
        model = client.model_config
        per_token = 2 * model.get_hidden_size() * model.dtype.itemsize  # hidden states and residual
        if self._node.rules.mode is PreemptionMode.OFF:
            logs.event("preemption_off")
        elif not shape.boundaries:
            logs.event("preemption_refused", level=logging.WARNING, why=why)
        else:
            logs.event(
                "preemption_ready",
                boundaries=shape.boundaries,
                granularity=granularity,
                why_not_finer=why or None,
            )
        on_host = client.vllm_config.device_config.device_type == "cpu"
        return ForwardProfile(shape, per_token, 0 if on_host else self._node.setup.launch_ahead)

    async def _prefill(self, request: CompletionRequest, info: Any) -> AsyncGenerator[Any, None]:
        context = RequestContext.from_headers(info.headers) if info is not None else None
        if context is None:
            async for chunk in self.engine.completions(request, info):
                yield chunk
            return
        job_id = context.job_id
        if job_id in self._released:
            yield _gone(job_id)
            return
        arrived_s = time.monotonic()
        deadline_s = NO_DEADLINE if context.ttft_budget_s is None else arrived_s + context.ttft_budget_s
        self._accept(context, len(request.prompt), deadline_s, arrived_s)
        predictor = self._ledger.predictor
        request.vllm_xargs = {
            JOB_XARG: job_id,
            PREDICTOR_XARG: [predictor.per_token_s, predictor.fixed_s, predictor.per_pair_s],
            WEIGHT_XARG: self._node.weights[context.tier],
            TIER_XARG: context.tier,
            ARRIVED_XARG: arrived_s,
        }
        if deadline_s != NO_DEADLINE:
            request.vllm_xargs[DEADLINE_XARG] = deadline_s
        if context.cached_tokens:
            request.vllm_xargs[CACHED_XARG] = context.cached_tokens
        work = asyncio.get_running_loop().create_task(self._compute(request, info))
        self._computing[job_id] = work
        work.add_done_callback(lambda _: self._computing.pop(job_id, None))
        abandoned = True
        try:
            await asyncio.wait([work])
            abandoned = work.cancelled()
            yield _gone(job_id) if abandoned else self._answer(work)
        except (asyncio.CancelledError, GeneratorExit):
            self._background.run("release", self.release(job_id), job_id=job_id)
            raise
        finally:
            self._end(context, arrived_s, abandoned=abandoned)

    def _answer(self, work: asyncio.Task[Any]) -> Any:
        """What the engine said, with the name of this replica; that it is dead, if so."""
        if self._is_dead():
            work.exception()  # it says the same; seen, so that nobody complains that it was not
            message = "the engine of the prefill replica has died"
            error = {"message": message, "type": ENGINE_DIED, "param": self._replica_id, "code": 503}
            return ErrorResponse(error=error)
        answer = work.result()
        if params := getattr(answer, "kv_transfer_params", None):
            params[REPLICA_PARAM] = self._replica_id
        return answer

    def _is_dead(self) -> bool:
        return bool(self.engine._engine_client.errored)  # noqa: SLF001 - no public way in

    async def _compute(self, request: CompletionRequest, info: Any) -> Any:
        """The engine's one answer: a prefill is not streamed."""
        async with aclosing(self.engine.completions(request, info)) as answers:
            async for answer in answers:
                return answer
        raise RuntimeError("the engine ended a prefill without an answer")

    def _accept(self, context: RequestContext, tokens: int, deadline_s: float, now_s: float) -> None:
        self._governor.arrived(
            Accepted(context.job_id, context.tier, tokens, deadline_s, now_s, context.cached_tokens)
        )
        self._record.follow(context.job_id)
        if context.prompt_bytes > 0:
            self._learned.append((context.prompt_bytes, tokens))
        self._instruments.set(PREFILL_OUTSTANDING, len(self._ledger.accepted))
        self._watch.changed()
        self._reporter.changed()
        logs.event(
            "prefill_accepted",
            request_id=context.request_id,
            job_id=context.job_id,
            tier=context.tier,
            tokens=tokens,
            budget_s=context.ttft_budget_s,
        )

    def _end(self, context: RequestContext, arrived_s: float, *, abandoned: bool) -> None:
        now_s = time.monotonic()
        self._ledger.ended(context.job_id, abandoned=abandoned)
        self._watch.changed()
        self._record.leave(context.job_id)
        self._instruments.observe(PREFILL, now_s - arrived_s, tier=context.tier)
        self._instruments.set(PREFILL_OUTSTANDING, len(self._ledger.accepted))
        self._reporter.changed()
        logs.event(
            "prefill_ended", request_id=context.request_id, job_id=context.job_id, seconds=now_s - arrived_s
        )

    async def _abandon(self, job_id: JobId) -> None:
        """Have the engine's scheduler drop the job: abort it, or free the blocks that wait to be pulled."""
        await self.engine._engine_client.engine_core.abort_requests_async(  # noqa: SLF001 - no public way in
            [RELEASE_PREFIX + job_id]
        )

    def _note_hit(self, started: Started) -> None:
        self._hits.append((JobId(started.job), started.cached_tokens))

    def _report(self) -> Report:
        if self._is_dead():
            return ReplicaGone(self._replica_id)
        self._watch.collect()
        now_s = time.monotonic()
        learned, self._learned = tuple(self._learned), []
        hits, self._hits = tuple(self._hits), []
        view = self._watch.view() if self._watch.is_up else None
        work = load(self._governor, view, self._watch.reached(), now_s)
        return PrefillReported(
            replica_id=self._replica_id,
            predictor=self._ledger.predictor,
            jobs=work.jobs,
            running=work.running,
            running_for_s=work.running_for_s,
            preemptible_in_s=work.preemptible_in_s,
            kv_usage=self._tap.kv_usage,
            ended=self._ledger.take_ended(),
            learned=learned,
            hits=hits,
            kv_tokens=self._tap.kv_tokens,
            draining=is_draining(),
        )

    async def __del__(self) -> None:
        """Serve's last call, with no request left: wait until decode has pulled what was computed for it."""
        if hasattr(self, "_tap") and not self._is_dead():
            started_s = time.monotonic()
            is_empty = await until(lambda: self._tap.kv_usage == 0, self._node.drain_s)
            logs.event("prefill_drained", seconds=time.monotonic() - started_s, is_empty=is_empty)
        if hasattr(self, "_reporter"):
            await self._reporter.end(ReplicaGone(self._replica_id))
        await super().__del__()


def _make_board(ranks: int) -> Board:
    """In shared memory, or, where that is full or missing, in the directory for temporary files."""
    try:
        return Board.create(ranks)
    except BoardUnavailableError as error:
        logs.event("board_elsewhere", level=logging.WARNING, why=str(error))
        return Board.create(ranks, Path(tempfile.gettempdir()))


def _gone(job_id: JobId) -> ErrorResponse:
    logs.event("prefill_refused", level=logging.DEBUG, job_id=job_id)
    message = "the client closed the request before its prefill began"
    return ErrorResponse(
        error={"message": message, "type": "client_closed_request", "code": CLIENT_CLOSED_REQUEST}
    )
