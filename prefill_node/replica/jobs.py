"""The jobs of a prefill replica: taken in, computed by the engine, released.

Owns what happens between a request and the engine's answer, and tells everybody who has to know that a job
has come or gone. What is reported of them is `prefill_node.replica.report`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.serve.llm.openai_api_models import ErrorResponse
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.tracing import extract_trace_headers

from engine_host.places import Places
from prefill_node.release import Release
from prefill_node.replica.governing.governor import Governor
from prefill_node.replica.governing.ledger import Accepted
from prefill_node.replica.job_spans import JobSpans
from prefill_node.replica.preemption_controller import Watch
from prefill_node.replica.report import ReportBuilder
from sampling.carried import Adapter, CacheUse, Prefilled, PrefillRequest, draws_of, nothing_but_kv
from slo.model_digest import OTHER_MODEL, is_same_model
from slo.queue.slack import NO_DEADLINE
from slo.request import (
    ARRIVED_XARG,
    BEGUN_XARG,
    CACHED_XARG,
    CONTEXT_HEADER,
    DEADLINE_XARG,
    ENGINE_DIED,
    JOB_XARG,
    PREDICTOR_XARG,
    STOP_BOUND_XARG,
    TIER_XARG,
    WEIGHT_XARG,
    JobId,
    RequestContext,
    attempt_of,
    job_of,
)
from slo.tiers import weight_of
from telemetry import logs
from telemetry.catalogue import PREFILL
from telemetry.instruments import Instruments
from telemetry.reporting.background import Background
from telemetry.reporting.reporter import Reporter

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

    from prefill_node.replica.preemption_metrics import PreemptionRecord

_REMEMBER_RELEASED = 4096
_ENGINE_ID_PREFIX = "prefill-"
"""How an engine's ids begin, because a job's begins with what the client calls its request: vLLM takes NIXL's
notification that blocks were read for a heartbeat when their id begins with `HB:`."""
CLIENT_CLOSED_REQUEST = 499


@dataclass(slots=True, eq=False)
class _Attempt:
    """What is computed of an attempt at a job, once: Serve calls once more where it cannot know that it had.

    Attributes:
        work: The engine's on it.
        is_told: Whether a call has handed its answer on.
        dropping: What ends it, once no call is here for it.
    """

    work: asyncio.Task[RequestOutput]
    is_told: bool = False
    dropping: asyncio.Task[None] | None = None


class JobTable:
    """The attempts of one replica, from the first call for each to its end.

    An attempt is called for (once, or more often when Serve repeats the call) and waits for a place; its
    first call with a place has the engine begin it, and the others wait for the same work. It ends when the
    engine answers; when its last call leaves without having been answered; when it is released; or when a
    later attempt at its job comes. One that was released is not begun afterwards.

    Args:
        governor: Learns of each arrival; has the ledger and the weights.
        watch: Decides anew on each change.
        record: Tells the span of a job what happens to it.
        report: What is reported, by whom and of what replica.
        reporter: Sends it on each change.
        instruments: Must have `PREFILL`.
        places: As many jobs as it has at once; others wait before they are accepted, and are reported, too.
    """

    def __init__(  # noqa: PLR0913 - a job concerns all of them
        self,
        engine: Any,
        governor: Governor,
        watch: Watch,
        record: PreemptionRecord,
        report: ReportBuilder,
        reporter: Reporter,
        instruments: Instruments,
        *,
        places: Places,
    ) -> None:
        self._places = places
        self._engine = engine
        self._governor = governor
        self._ledger = governor.ledger
        self._watch = watch
        self._record = record
        self._report = report
        self._reporter = reporter
        self._instruments = instruments
        self._released: OrderedDict[JobId, None] = OrderedDict()
        self._computing: dict[JobId, _Attempt] = {}
        self._begun = 0
        """How many attempts the engine was given, see `prefill_node.release`."""
        self._calls: Counter[JobId] = Counter()
        """By attempt, how many calls for it are here, with or without a place."""
        self._background = Background()

    async def prefill(
        self, request: PrefillRequest, info: Any
    ) -> AsyncGenerator[Prefilled | ErrorResponse, None]:
        """Compute one prompt and sample a token; the only piece says where the KV blocks wait, or why not."""
        context = RequestContext.decode(info.headers[CONTEXT_HEADER])
        if (unlike := self._unlike(request)) is not None:
            yield self._failed(OTHER_MODEL, unlike)
            return
        attempt_id, tokens, arrived_s = context.attempt_id, len(request.token_ids), time.monotonic()
        deadline_s = NO_DEADLINE if context.ttft_budget_s is None else arrived_s + context.ttft_budget_s
        if not self._takes_over(context):
            yield _gone(attempt_id)
            return
        job = Accepted(attempt_id, context.tier, tokens, deadline_s, arrived_s, context.cached_tokens)
        if not self._calls[attempt_id] and attempt_id not in self._released:
            self._ledger.came(job)
        self._calls[attempt_id] += 1
        self._reporter.changed()
        try:
            work = self._prefill(request, info, context, job)
            async with self._places.one(context.tier), aclosing(work) as answers:
                async for answer in answers:
                    yield answer
        finally:
            self._calls[attempt_id] -= 1
            if not self._calls[attempt_id]:
                self._last_call_left(attempt_id)

    async def _prefill(
        self, request: PrefillRequest, info: Any, context: RequestContext, job: Accepted
    ) -> AsyncGenerator[Prefilled | ErrorResponse, None]:
        attempt_id = job.job_id
        sampled = request.sampled_by(draws_of(self._engine._engine_client.vllm_config))  # noqa: SLF001 - no public way in
        if (left := self._computing.get(attempt_id)) is not None and left.dropping is not None:
            await asyncio.wait([left.dropping])  # the engine would take what comes now for what is dropped
        if attempt_id in self._released:
            yield _gone(attempt_id)
            return
        attempt = self._computing.get(attempt_id) or self._begin(request, info, context, job, sampled)
        await asyncio.wait([work := attempt.work])
        yield _gone(attempt_id) if work.cancelled() else self._answer(work, counts=sampled is not None)
        attempt.is_told = True

    def _takes_over(self, context: RequestContext) -> bool:
        """Whether an attempt is the latest at its job here; the earlier ones are released then.

        Nobody waits for these: a decode replica that hangs, or whose host is gone, cannot say so of what was
        taken from it.
        """
        there = (*self._computing, *self._ledger.without_place)
        others = {attempt_of(one): one for one in there if job_of(one) == context.job_id}
        if max(others, default=-1) > context.attempt:
            return False
        for number, earlier in others.items():
            if number < context.attempt:
                self._never_begins(earlier)  # at once: one of its calls may be about to get a place
                self._background.run("release", self._cancel_and_free(earlier), job_id=context.job_id)
        return True

    def _begin(
        self,
        request: PrefillRequest,
        info: Any,
        context: RequestContext,
        job: Accepted,
        sampled: SamplingParams | None,
    ) -> _Attempt:
        """Have the engine compute an attempt."""
        self._accept(context, job)
        self._begun += 1
        params = self._params(sampled or nothing_but_kv(), context, job)
        work = asyncio.get_running_loop().create_task(self._compute(request, params, info))
        work.add_done_callback(
            lambda work: self._work_ended(context, job.arrived_s, abandoned=work.cancelled())
        )
        attempt = self._computing[job.job_id] = _Attempt(work)
        return attempt

    def _last_call_left(self, attempt_id: JobId) -> None:
        """No call is here for an attempt any more; where none was answered nobody will pull its blocks."""
        del self._calls[attempt_id]
        self._stops_waiting(attempt_id)
        if (attempt := self._computing.get(attempt_id)) is None or attempt.dropping is not None:
            return
        if attempt.is_told:
            del self._computing[attempt_id]
            return
        attempt.dropping = self._background.run(
            "release", self._cancel_and_free(attempt_id), job_id=job_of(attempt_id)
        )
        attempt.dropping.add_done_callback(lambda _: self._computing.pop(attempt_id, None))

    async def release(self, attempt_id: JobId) -> None:
        """Release an attempt at a job wherever it is: not yet here, running, or waiting to be pulled."""
        self._never_begins(attempt_id)
        await self._cancel_and_free(attempt_id)

    def _never_begins(self, attempt_id: JobId) -> None:
        """Begin nothing of an attempt from now on."""
        self._released[attempt_id] = None
        while len(self._released) > _REMEMBER_RELEASED:
            self._released.popitem(last=False)
        self._stops_waiting(attempt_id)

    async def _cancel_and_free(self, attempt_id: JobId) -> None:
        """Cancel the engine's work on an attempt, and have its blocks freed."""
        if (attempt := self._computing.get(attempt_id)) is not None and attempt.work.cancel():
            await asyncio.wait([attempt.work])
        await self._abort_in_engine(attempt_id)
        self._watch.changed()

    def _params(self, asked: SamplingParams, context: RequestContext, job: Accepted) -> SamplingParams:
        """As asked for, with what the scheduler has to know of the job."""
        predictor = self._ledger.predictor
        xargs = {
            **(asked.extra_args or {}),
            JOB_XARG: job.job_id,
            PREDICTOR_XARG: predictor.encode(),
            WEIGHT_XARG: weight_of(self._governor.weights, context.tier),
            TIER_XARG: context.tier,
            ARRIVED_XARG: job.arrived_s,
            BEGUN_XARG: self._begun,
        }
        if job.deadline_s != NO_DEADLINE:
            xargs[DEADLINE_XARG] = job.deadline_s
        if (bound := self._governor.profile.bound) is not None:
            xargs[STOP_BOUND_XARG] = bound.encode()
        if context.cached_tokens:
            xargs[CACHED_XARG] = context.cached_tokens
        params = asked.clone()
        params.extra_args = xargs
        return params

    def _answer(self, work: asyncio.Task[Any], *, counts: bool) -> Prefilled | ErrorResponse:
        """What the engine said, with the name of this replica; that it is dead, if so.

        Args:
            work: The engine's work on the prompt.
            counts: Whether the token that it has sampled does.
        """
        if self._report.is_dead:
            work.exception()  # it says the same; seen, so that nobody complains that it was not
            return self._failed(ENGINE_DIED, "the engine of the prefill replica has died")
        try:
            output = work.result()
        except (ValueError, VLLMClientError) as error:
            refused = self._engine._oai_serving_completion.create_error_response(error)  # noqa: SLF001
            return ErrorResponse(error=refused.error.model_dump())
        if output.outputs[0].finish_reason == "abort":  # nobody asked for that: the engine is being ended
            return self._failed(ENGINE_DIED, "the engine of the prefill replica is ending")
        token = output.outputs[0] if counts else None
        return Prefilled(token, output.kv_transfer_params, self._report.replica_id, CacheUse.of(output))

    def _unlike(self, request: PrefillRequest) -> str | None:
        """Why only a replica that is configured as who asks can compute a prompt; None when this one can."""
        if not is_same_model(request.digest, self._report.digest):
            return "the prefill replica serves another model of that name"
        most = self._engine._engine_client.vllm_config.model_config.max_model_len  # noqa: SLF001 - no public way in
        if len(request.token_ids) >= most:  # decode has held it against its own
            return f"the prefill replica takes prompts of less than {most} tokens"
        return None

    def _failed(self, kind: str, message: str) -> ErrorResponse:
        """The answer to a job that another replica may compute; `kind` is its type."""
        error = {"message": message, "type": kind, "param": self._report.replica_id, "code": 503}
        return ErrorResponse(error=error)

    async def _compute(self, request: PrefillRequest, params: SamplingParams, info: Any) -> RequestOutput:
        """The engine's one output: a prefill is not streamed."""
        client = self._engine._engine_client  # noqa: SLF001 - no public way in
        headers = extract_trace_headers(info.headers) if await client.is_tracing_enabled() else None
        prompt = tokens_input(request.token_ids, cache_salt=request.cache_salt)
        engine_id = _ENGINE_ID_PREFIX + params.extra_args[JOB_XARG]
        adapter = self._adapter(request.adapter)
        answer = client.generate(prompt, params, engine_id, lora_request=adapter, trace_headers=headers)
        async with aclosing(answer) as outputs:
            async for output in outputs:
                return output
        raise RuntimeError("the engine ended a prefill without an answer")

    def _adapter(self, adapter: Adapter | None) -> LoRARequest | None:
        """What the engine knows a LoRA adapter by.

        Raises:
            RuntimeError: It has another one of that name, or none: its configuration is not decode's.
        """
        if adapter is None:
            return None
        known: dict[str, LoRARequest] = self._engine._oai_models.lora_requests  # noqa: SLF001 - no public way in
        if (found := known.get(adapter.name)) is None or found.lora_path != adapter.path:
            raise RuntimeError(f"the prefill replica has no LoRA adapter {adapter.name!r} of {adapter.path}")
        return found

    def _stops_waiting(self, attempt_id: JobId) -> None:
        """An attempt does not wait for a place any more, if it did."""
        self._ledger.stopped_waiting(attempt_id)
        self._reporter.changed()

    def _accept(self, context: RequestContext, job: Accepted) -> None:
        self._governor.arrived(job, time.monotonic())
        self._record.follow(job.job_id, JobSpans(context.traceparent, job.arrived_s))
        if context.prompt_bytes > 0 and job.tokens > 0:
            self._report.note_length(context.tenant, context.prompt_bytes, job.tokens)
        self._watch.changed()
        self._reporter.changed()
        logs.event(
            "prefill_accepted",
            request_id=context.request_id,
            job_id=context.job_id,
            tier=context.tier,
            tokens=job.tokens,
            budget_s=context.ttft_budget_s,
        )

    def _work_ended(self, context: RequestContext, arrived_s: float, *, abandoned: bool) -> None:
        now_s = time.monotonic()
        self._ledger.ended(context.attempt_id, abandoned=abandoned)
        self._watch.changed()
        self._record.leave(context.attempt_id)
        self._instruments.observe(PREFILL, now_s - arrived_s, tier=context.tier)
        self._reporter.changed()
        logs.event(
            "prefill_ended", request_id=context.request_id, job_id=context.job_id, seconds=now_s - arrived_s
        )

    async def _abort_in_engine(self, job_id: JobId) -> None:
        """Have the engine's scheduler drop the job: abort it, or free the blocks that wait to be pulled."""
        await self._engine._engine_client.engine_core.abort_requests_async(  # noqa: SLF001 - no public way in
            [Release(job_id, self._begun).encode()]
        )


def _gone(job_id: JobId) -> ErrorResponse:
    logs.event("prefill_refused", level=logging.DEBUG, job_id=job_id)
    message = "the client closed the request before its prefill began"
    return ErrorResponse(
        error={"message": message, "type": "client_closed_request", "code": CLIENT_CLOSED_REQUEST}
    )
