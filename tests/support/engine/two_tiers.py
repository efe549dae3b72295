"""A prefill and a decode engine that pull over NIXL, with the real orchestrator between them, without Ray."""

from __future__ import annotations

import asyncio
import os
from contextlib import contextmanager
from types import SimpleNamespace

from ports import free_port
from steps_ahead import steps_ahead_on_cpu
from vllm.sampling_params import RequestOutputKind

from benchmarks.harness.offline_engine import async_engine
from decode_node.carrying import ASYNC_SCHEDULER, PRESSURE_SCHEDULER, SCHEDULER, WORKERS
from decode_node.orchestrator import Orchestrator
from decode_node.prefill_health import PrefillWatch
from decode_node.requests.local_decode import LocalDecode
from decode_node.requests.local_prefills import LocalPrefills
from decode_node.requests.openai_layer import OpenAILayer
from decode_node.requests.placing import Placing
from decode_node.requests.remote_prefill import RemotePrefill
from decode_node.requests.underway import Call, Underway
from decode_node.spans import RequestSpans
from kv_transfer.connector import KVRole, kv_transfer_config
from prefill_node.engine_setup import EngineSetup
from prefill_node.release import Release
from sampling.carried import Prefilled
from slo.replacement import ReplacementRules
from slo.request import JOB_XARG, WEIGHT_XARG, JobId, ReplicaId, RequestContext
from slo.tiers import PREMIUM


class Tiers:
    """Both engines; it is the prefill tier, the router and the metrics of the orchestrator as well.

    Attributes:
        asked: Each prefill that was asked for.
        failing: So many of the next prefills are answered with an address where nobody is.
        before_pull: Awaited once, between the next prefill and its pull.
        released: Jobs whose KV blocks nobody will pull.
        counted: What was counted, with its labels.
        tenant: Whose the next requests are.
    """

    def __init__(self, prefill, decode, *, leaves=False):
        self.prefill_engine, self.engine = prefill, decode
        self.asked, self.released, self.counted = [], [], []
        self.failing = 0
        self.before_pull = None
        self.tenant = ""
        self.replace = SimpleNamespace(remote=self._no_router)
        self._client = decode
        self._jobs = 0
        self._releasing = []
        rules = ReplacementRules(3, frozenset())
        watch = PrefillWatch(self._is_well)
        self.orchestrator = Orchestrator(
            OpenAILayer(ReplicaId("decode"), SimpleNamespace(_engine_client=decode)),
            RemotePrefill(self, watch, self),
            LocalDecode(self, watch, self, LocalPrefills(1), LocalPrefills(1)),
            Placing(ReplicaId("decode"), self, 1.0, rules, self),
            self,
            leaves=leaves,
        )
        self.orchestrator.stand_before(decode)

    async def generate(self, prompt, params, carried=None, *, may_drop=False):
        """The outputs that vLLM's OpenAI layer gets for a request, which may bring tokens along.

        If it may be dropped and is, they end with the exception that the layer gets.
        """
        self._jobs += 1
        job = JobId(f"job-{self._jobs}")
        context = RequestContext(
            job, job, PREMIUM, None, tenant=self.tenant, prefill_replica=ReplicaId("prefill")
        )
        call = Call(SimpleNamespace(), None, is_chat=False, token_ids=prompt, spans=RequestSpans(""))
        self.orchestrator._runs[job] = Underway(call, context, carried=carried, may_drop=may_drop)
        params = params.clone()
        params.extra_args = {**(params.extra_args or {}), JOB_XARG: job}
        tokens = {"type": "token", "prompt_token_ids": prompt}
        try:
            async for output in self._client.generate(tokens, params, job):
                yield output
        finally:
            del self.orchestrator._runs[job]

    async def prefill(self, request, info, context):
        self.asked.append(request)
        tokens = {"type": "token", "prompt_token_ids": request.token_ids}
        params = request.params.clone()
        params.extra_args = {**params.extra_args, JOB_XARG: context.attempt_id, WEIGHT_XARG: 1.0}
        outputs = self.prefill_engine.generate(tokens, params, context.attempt_id)
        (output,) = [output async for output in outputs]
        params = output.kv_transfer_params
        if self.failing and params is not None:
            self.failing -= 1
            nobody = {"remote_port": free_port(), "remote_engine_id": f"nobody-{self.failing}"}
            params = {**params, **nobody}
        if (wait := self.before_pull) is not None:
            self.before_pull = None
            await wait()
        return Prefilled(output.outputs[0], params, "prefill")

    def release(self, context):
        self.released.append(context.attempt_id)
        core = self.prefill_engine.engine_core
        release = core.abort_requests_async([Release(context.attempt_id, 0).encode()])
        self._releasing.append(asyncio.get_running_loop().create_task(release))

    def count(self, metric, amount=1.0, **labels):
        self.counted.append(labels)

    async def _is_well(self, replica):
        return None

    async def _no_router(self, request):
        raise RuntimeError("there is none")


@contextmanager
def two_tiers(model, lease_s=60, pressed=None, *, ahead=False, prefill_ranks=1, **options):
    """Both, and a stock engine that does all by itself; that one computes a prompt at once.

    On CPU a stock engine ends with a chunk of a prompt that has a seed. With `pressed`, arguments of its
    engine, decode acts when memory runs short, and prefill computes the KV of streams that have lost it. If
    `ahead`, decode composes a step while the one before it runs, as on a GPU. Prefill has so many ranks.
    """
    scheduler = ASYNC_SCHEDULER if ahead else SCHEDULER
    own = {"scheduler_cls": scheduler if pressed is None else PRESSURE_SCHEDULER, **(pressed or {})}
    with (
        steps_ahead_on_cpu(),
        _engine(
            model, KVRole.PREFILL, lease_s, setup=EngineSetup(mode="resume"), ranks=prefill_ranks, **options
        ) as prefill,
        _engine(model, KVRole.DECODE, lease_s, **{"worker_cls": WORKERS["cpu"], **options, **own}) as decode,
        async_engine(model, **options | {"max_num_batched_tokens": options["max_model_len"]}) as (alone, _),
    ):
        yield Tiers(prefill, decode, leaves=pressed is not None), alone


@contextmanager
def two_tiers_in(runner, model, **options):
    """`two_tiers`, whose clients live in the loop of this `asyncio.Runner`."""

    async def enter():
        return manager.__enter__()

    manager = two_tiers(model, **options)
    try:
        yield runner.run(enter())
    finally:
        manager.__exit__(None, None, None)


@contextmanager
def _engine(model, role, lease_s, **options):
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
    with async_engine(model, kv_transfer_config=kv_transfer_config(role, "cpu", lease_s), **options) as (
        engine,
        _,
    ):
        yield engine


async def answer(outputs, params):
    """Token ids, text, why it ended, and log-probabilities, put together from what came."""
    tokens, text, logprobs, pieces = [], "", [], 0
    async for output in outputs:
        (completion,) = output.outputs
        pieces += 1
        if params.output_kind is RequestOutputKind.DELTA:
            tokens += completion.token_ids
            text += completion.text
            logprobs += completion.logprobs or []
        else:
            tokens, text = list(completion.token_ids), completion.text
            logprobs = list(completion.logprobs or [])
    return tokens, text, completion.finish_reason, completion.stop_reason, logprobs
