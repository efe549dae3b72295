"""The jobs of a prefill replica: taken in, computed by the engine, released.

Owns what happens between a request and the engine's answer, and tells everybody who has to know that a job
has come or gone. What is reported of them is `prefill_node.replica.report`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ray.serve.llm.openai_api_models import ErrorResponse

from prefill_node.engine.scheduler import RELEASE_PREFIX
from prefill_node.replica.governing.ledger import Accepted
from slo.queue.slack import NO_DEADLINE
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
    RequestContext,
)
from telemetry import logs
from telemetry.catalogue import PREFILL, PREFILL_OUTSTANDING
from telemetry.reporting.background import Background

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ray.serve.llm.openai_api_models import CompletionRequest

    from prefill_node.replica.governing.governor import Governor
    from prefill_node.replica.preemption_controller import Watch
    from prefill_node.replica.preemption_metrics import PreemptionRecord
    from prefill_node.replica.report import ReportBuilder
    from telemetry.instruments import Instruments
    from telemetry.reporting.reporter import Reporter

_REMEMBER_RELEASED = 4096
CLIENT_CLOSED_REQUEST = 499


class JobTable:
    """The jobs of one replica.

    Args:
        engine: Computes them.
        governor: Learns of each arrival; has the ledger and the weights.
        watch: Decides anew on each change.
        record: Tells the span of a job what happens to it.
        report: What is reported, by whom and of what replica.
        reporter: Sends it on each change.
        instruments: Must have `PREFILL` and `PREFILL_OUTSTANDING`.
    """

    def __init__(
        self,
        engine: Any,
        governor: Governor,
        watch: Watch,
        record: PreemptionRecord,
        report: ReportBuilder,
        reporter: Reporter,
        instruments: Instruments,
    ) -> None:
        self._engine = engine
        self._governor = governor
        self._ledger = governor.ledger
        self._watch = watch
        self._record = record
        self._report = report
        self._reporter = reporter
        self._instruments = instruments
        self._released: OrderedDict[JobId, None] = OrderedDict()
        self._computing: dict[JobId, asyncio.Task[Any]] = {}
        self._background = Background()

    async def prefill(self, request: CompletionRequest, info: Any) -> AsyncGenerator[Any, None]:
        """Compute one prompt of token ids; a request without our headers goes straight to the engine."""
        context = RequestContext.from_headers(info.headers) if info is not None else None
        if context is None:
            async for chunk in self._engine.completions(request, info):
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
            WEIGHT_XARG: self._governor.weights[context.tier],
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

    async def release(self, job_id: JobId) -> None:
        """Release a job wherever it is: not yet here, running, or waiting to be pulled."""
        self._released[job_id] = None
        while len(self._released) > _REMEMBER_RELEASED:
            self._released.popitem(last=False)
        if (work := self._computing.get(job_id)) is not None:
            work.cancel()
            await asyncio.wait([work])
        await self._abandon(job_id)
        self._watch.changed()

    def _answer(self, work: asyncio.Task[Any]) -> Any:
        """What the engine said, with the name of this replica; that it is dead, if so."""
        if self._report.is_dead:
            work.exception()  # it says the same; seen, so that nobody complains that it was not
            message = "the engine of the prefill replica has died"
            error = {"message": message, "type": ENGINE_DIED, "param": self._report.replica_id, "code": 503}
            return ErrorResponse(error=error)
        answer = work.result()
        if params := getattr(answer, "kv_transfer_params", None):
            params[REPLICA_PARAM] = self._report.replica_id
        return answer

    async def _compute(self, request: CompletionRequest, info: Any) -> Any:
        """The engine's one answer: a prefill is not streamed."""
        async with aclosing(self._engine.completions(request, info)) as answers:
            async for answer in answers:
                return answer
        raise RuntimeError("the engine ended a prefill without an answer")

    def _accept(self, context: RequestContext, tokens: int, deadline_s: float, now_s: float) -> None:
        self._governor.arrived(
            Accepted(context.job_id, context.tier, tokens, deadline_s, now_s, context.cached_tokens)
        )
        self._record.follow(context.job_id)
        if context.prompt_bytes > 0:
            self._report.note_length(context.prompt_bytes, tokens)
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
        await self._engine._engine_client.engine_core.abort_requests_async(  # noqa: SLF001 - no public way in
            [RELEASE_PREFIX + job_id]
        )


def _gone(job_id: JobId) -> ErrorResponse:
    logs.event("prefill_refused", level=logging.DEBUG, job_id=job_id)
    message = "the client closed the request before its prefill began"
    return ErrorResponse(
        error={"message": message, "type": "client_closed_request", "code": CLIENT_CLOSED_REQUEST}
    )
