"""The prefill replica: one vLLM engine that computes KV cache and reports what it has to do.

A thin shell around `prefill_node.replica.jobs`, `prefill_node.replica.report` and
`prefill_node.replica.preemption_controller`.
Runs in the replica process; the engine's scheduler (`prefill_node.engine.scheduler`) runs in EngineCore, its
workers in processes of their own.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.llm.deployment import PDPrefillServer

from engine_host.cores import bind_engine
from engine_host.places import Places
from engine_host.processes import unlink_shared_memory
from engine_host.watchdog import EngineWatchdog
from kv_transfer.side_channel import take_port
from prefill_node.board.board import Board, BoardUnavailableError
from prefill_node.engine_setup import EngineSetup, PreemptionSupport
from prefill_node.replica.engine import PrefillEngine
from prefill_node.replica.governing.governor import ForwardProfile, Governor
from prefill_node.replica.governing.ledger import PrefillLedger
from prefill_node.replica.governing.snapshot import snapshot
from prefill_node.replica.job_history import ReplicaPast
from prefill_node.replica.jobs import JobTable
from prefill_node.replica.monitor_link import Monitored
from prefill_node.replica.preemption_controller import Watch
from prefill_node.replica.preemption_metrics import METRICS, PreemptionRecord
from prefill_node.replica.report import ReportBuilder
from prefill_node.replica.warm_up import OtherSubjectError, Probe
from sampling.carried import Prefilled, PrefillRequest
from slo.liveness import HUNG_AFTER_S
from slo.model_digest import UNTOLD, ModelDigest
from slo.predict.measured_on import UNKNOWN, Measurable, Subject
from slo.predict.prefill_time import PrefillPredictor, fit
from slo.preemption.types import PreemptionMode, PreemptionRules
from slo.queue.order import QueueOrder
from slo.reports import ReplicaGone, who_is_up
from slo.request import ARRIVED_XARG, DEADLINE_XARG, HANDSHAKE_DUE_S, JobId, ReplicaId
from slo.tiers import TierSet
from telemetry import logs, tracing
from telemetry.catalogue import PREFILL, PREFILL_OUTSTANDING
from telemetry.engine_tap import EngineTap
from telemetry.instruments import Instruments
from telemetry.reporting import monitor_client
from telemetry.reporting.draining import until
from telemetry.reporting.of_model import OfModel
from telemetry.reporting.reporter import Reporter
from telemetry.tracing import TracingOptions

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from ray.serve.llm import LLMConfig
    from ray.serve.llm.openai_api_models import CompletionRequest, ErrorResponse


@dataclass(frozen=True, slots=True)
class PrefillNodeConfig:
    """What a prefill replica needs beyond its engine.

    Attributes:
        predictor: From a calibration profile; None lets the warm-up measure one.
        profiled: What that profile was measured on.
        subject: What is served, as far as the configuration says.
        handoff_s: Predicted seconds from the end of prefill to the first token.
        warmup_tokens: Prompt lengths to prefill before reporting ready, each twice or three times.
        tiers: Value of a request on time, and rank of each tier.
        setup: The engine's part in that; its board is made by the replica.
        cores: VLLM_CPU_OMP_THREADS_BIND by the replica's place on its node; empty leaves it alone.
        is_monitored: Whether the cluster has an SLO monitor.
        drain_s: How long a replica that is shut down waits for its KV blocks to be pulled.
        tracing: Where spans go; None for nowhere.
        max_ongoing_requests: How many it has at once. Serve's own limit is out of the way: a replica that is
            full would not say that it is there, nor be told that a job is not wanted any more.
        hung_after_s: Seconds without progress before which its engine does not count as hung.
        digest: Of the model that it serves.
    """

    predictor: PrefillPredictor | None
    handoff_s: float
    warmup_tokens: tuple[int, ...]
    tiers: TierSet
    rules: PreemptionRules
    setup: EngineSetup
    cores: tuple[str, ...] = ()
    profiled: Subject = UNKNOWN
    subject: Subject = UNKNOWN
    is_monitored: bool = False
    drain_s: float = 30.0
    tracing: TracingOptions | None = None
    max_ongoing_requests: int = 4096
    hung_after_s: float = HUNG_AFTER_S
    digest: ModelDigest = UNTOLD


class PrefillServer(PDPrefillServer):  # type: ignore[misc] # Ray ships no types for it
    """Serves prefills by slack and keeps the router informed."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, llm_config: LLMConfig, *, node: PrefillNodeConfig, router: DeploymentHandle
    ) -> None:
        context = serve.get_replica_context()
        self._node = node
        tracing.start(node.tracing, "prefill")  # before vLLM, which would export by itself
        bind_engine(node.cores, take_port(llm_config))
        ranks = int(llm_config.engine_kwargs.get("tensor_parallel_size", 1))
        board = _make_board(ranks)
        extra = llm_config.engine_kwargs.get("additional_config") or {}
        setup = replace(node.setup, board=str(board.path))
        llm_config.update_engine_kwargs(additional_config={**extra, **setup.encode()})
        try:
            with logs.kept():
                await super().__init__(llm_config, engine_cls=PrefillEngine)
        finally:
            board.unlink()  # all have attached; without a name nothing is left behind by a crash
        unlink_shared_memory(self.engine._engine_client)  # noqa: SLF001 - no public way in
        self._replica_id = ReplicaId(context.replica_id.unique_id)
        self._instruments = Instruments(
            PREFILL,
            PREFILL_OUTSTANDING,
            *EngineTap.METRICS,
            *METRICS,
            *monitor_client.METRICS,
        )
        self._tap = EngineTap("prefill", self._instruments)
        self._tap.attach(self.engine)
        self._probe = Probe(self.engine, self._llm_config.model_id)
        self._measurable = self._probe.about(node.subject)
        if differences := node.profiled.differences(self._measurable.subject):
            raise OtherSubjectError(differences)
        samples = await self._probe.warm_up(node.warmup_tokens)
        profile = await self._profile_forward()
        predictor = node.predictor
        if predictor is None:
            has_floor = not self._on_host
            predictor = fit(samples, pair_work=profile.shape.pair_work, has_floor=has_floor).predictor
        ledger = PrefillLedger(replace(predictor, handoff_s=node.handoff_s))
        self._governor = Governor(
            ledger,
            node.tiers.weights,
            node.rules,
            QueueOrder(setup.order),
            profile,
            setup.fairness(),
        )
        self._reports = reports = ReportBuilder(
            self._replica_id, self.engine, self._governor, self._tap, self._instruments, node.digest
        )
        monitored = Monitored(self._replica_id, self._governor, [sample.tokens for sample in samples])
        record = PreemptionRecord(self._instruments, ledger, monitored.passed, reports.note_hit)
        self._history = record.history
        self._watch = watch = Watch(board, self._governor, record)
        report = OfModel(router, llm_config.model_id).report.remote
        client = self.engine._engine_client  # noqa: SLF001 - no public way in
        self._watchdog = watchdog = EngineWatchdog(client, self._progress, watch.pass_s, node.hung_after_s)
        self._reporter = Reporter(lambda: reports.build(watch, watchdog), report, reports.delivered)
        self._jobs = JobTable(
            self.engine,
            self._governor,
            watch,
            record,
            reports,
            self._reporter,
            self._instruments,
            places=Places(node.max_ongoing_requests, node.tiers),
        )
        logs.event(
            "prefill_ready",
            per_token_ms=predictor.per_token_s * 1e3,
            fixed_ms=predictor.fixed_s * 1e3,
            per_million_pairs_ms=predictor.per_pair_s * 1e9,
            floor_ms=predictor.floor_s * 1e3,
            measured=node.predictor is None,
        )
        if node.is_monitored:
            monitored.start(self._watch, self._instruments, llm_config.model_id)
        self._watchdog.start()

    async def prefill(
        self, request: PrefillRequest, info: Any
    ) -> AsyncGenerator[Prefilled | ErrorResponse, None]:
        """See `JobTable.prefill`; the decode tier's orchestrator is the only caller."""
        async with aclosing(self._jobs.prefill(request, info)) as answers:
            async for answer in answers:
                yield answer

    async def release(self, attempt_id: JobId, pin: ReplicaId | None = None) -> None:
        """Release an attempt at a job wherever it is: not yet here, running, or waiting to be pulled.

        Args:
            attempt_id: See `RequestContext.attempt_id`.
            pin: The replica that has it; read by `router.serve.replica_pinning` on the caller's side. When
                that one is gone the call gets here, where the job may just have been placed again.
        """
        if pin is not None and pin != self._replica_id:
            return
        await self._jobs.release(attempt_id)

    async def measure_prefill(self, tokens: int, context_tokens: int = 0) -> float:
        """See `Probe.prefill_s`."""
        return await self._probe.prefill_s(tokens, context_tokens)

    async def measurable(self) -> Measurable:
        """What is measured here."""
        return self._measurable

    async def prewarm_prefill(self, prefill_request: CompletionRequest) -> dict[str, Any] | None:
        """A prompt of a token or two, with which a decode replica shakes hands before it is ready.

        Without a deadline it would wait behind all that has none and has waited for longer.
        """
        now_s = time.monotonic()
        due = {ARRIVED_XARG: now_s, DEADLINE_XARG: now_s + HANDSHAKE_DUE_S}
        given = {**(prefill_request.vllm_xargs or {}), **due}
        params: dict[str, Any] | None = await super().prewarm_prefill(
            prefill_request.model_copy(update={"vllm_xargs": given})
        )
        return params

    async def timed_prefill(self, request: CompletionRequest) -> tuple[dict[str, Any], float] | None:
        """Prefill for a decode replica that measures the handoff.

        Returns:
            Where the KV blocks are, and the seconds that it took; None when the engine refuses it.
        """
        started_s = time.monotonic()
        params = await super().prewarm_prefill(request)
        return None if params is None else (params, time.monotonic() - started_s)

    async def is_up(self, pin: ReplicaId | None = None) -> ReplicaId | None:
        """Who answers, for those who wait for `pin`; see `slo.reports.who_is_up`.

        `router.serve.replica_pinning` reads `pin`, too, on the caller's side.
        """
        return who_is_up(self._replica_id, pin, is_dead=self._reports.is_dead)

    async def snapshot(self, pin: ReplicaId | None = None) -> dict[str, Any]:  # noqa: ARG002
        """What runs, waits and is suspended here, as plain data for `slackserve top`.

        `pin` is read by `router.serve.replica_pinning` on the caller's side.
        """
        return snapshot(self._governor, self._watch.view(), self._watch.reached(), time.monotonic())

    async def _start_engine(self) -> None:
        """Start it, without the report of what is used, for which Ray starts an actor."""
        await self.engine.start()

    async def past(self, last_s: float, pin: ReplicaId | None = None) -> ReplicaPast:  # noqa: ARG002
        """What its jobs did in the last seconds, for `slackserve timeline`; `pin` as in `snapshot`."""
        self._watch.collect()
        return self._history.recent(last_s, time.monotonic())

    def _progress(self) -> tuple[int, ...]:
        """Steps that have ended, and boundaries that each rank has reached within them."""
        return self._tap.steps, *self._watch.boundaries_reached()

    @property
    def _on_host(self) -> bool:
        """Whether the engine computes on CPUs."""
        config = self.engine._engine_client.vllm_config  # noqa: SLF001 - no public way in
        return bool(config.device_config.device_type == "cpu")

    async def _profile_forward(self) -> ForwardProfile:
        """Ask the workers where their forward pass can stop; the reason is logged when it cannot."""
        client = self.engine._engine_client  # noqa: SLF001 - no public way in
        answers = await client.collective_rpc("preemption_support")
        support = PreemptionSupport(*answers[0])
        shape = support.shape()
        if self._node.rules.mode is PreemptionMode.OFF:
            logs.event("preemption_off")
        elif not shape.boundaries:
            logs.event("preemption_refused", level=logging.WARNING, why=support.why_not)
        else:
            logs.event(
                "preemption_ready",
                boundaries=shape.boundaries,
                granularity=support.granularity,
                why_not_finer=support.why_not or None,
            )
        setup = self._node.setup
        ahead_s = 0.0 if self._on_host else setup.launch_ahead_s
        kept_bytes, *_ = await client.collective_rpc("kept_bytes")
        return ForwardProfile(shape, tuple(kept_bytes), ahead_s, setup.stop_within_s)

    async def __del__(self) -> None:
        """Serve's last call, with no request left: wait until decode has pulled what was computed for it."""
        if hasattr(self, "_reports") and not self._reports.is_dead:
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
