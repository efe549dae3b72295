"""An orchestrator whose prefill tier, engine, OpenAI layer and router are played, failing as a test says."""

import asyncio
import json
from contextlib import aclosing
from types import SimpleNamespace

import pytest
from pydantic import BaseModel
from ray.serve.llm.openai_api_models import ErrorResponse
from vllm import SamplingParams
from vllm.exceptions import GenerationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from decode_node.answers import Piece
from decode_node.carrying import SCHEDULER, WORKERS
from decode_node.grammars.bounded import TOO_SLOW
from decode_node.orchestrator import Orchestrator
from decode_node.prefill_health import PrefillFailedError, PrefillWatch
from decode_node.requests.dropping import DROPPED
from decode_node.requests.leaving import LEFT
from decode_node.requests.local_decode import LocalDecode
from decode_node.requests.local_prefills import LocalPrefills
from decode_node.requests.openai_layer import OpenAILayer
from decode_node.requests.placing import Placing
from decode_node.requests.remote_prefill import RemotePrefill
from decode_node.requests.underway import Amount, Call
from decode_node.spans import RequestSpans
from sampling.carried import KV_PARAMS, CacheUse, Carried, Prefilled
from slo.model_digest import UNTOLD
from slo.replacement import FailureCause, ReplacementRules
from slo.request import JobId, ReplicaId, RequestContext
from slo.tiers import STANDARD

A, B, C, D = (ReplicaId(name) for name in "abcd")
FIRST, SECOND, THIRD = 1, 2, 3
ANSWER = [FIRST, SECOND, THIRD]
STREAMED = ["data: 1", "data: 2", "data: 3", "data: [DONE]"]
FAILED = "the connector could not pull"
LEAVES = "the engine had no memory for it"
DROPS = "the engine had none for it for good"
ABORTS = "the engine is being ended"
REJECTS = "the engine's grammar rejects the token that was sampled"
TAKES_LONG = "the engine's grammar has taken too long"
PROMPT = list(range(100))


class Request(BaseModel):
    """What the orchestrator looks at of a client's request."""

    vllm_xargs: dict | None = None
    stream: bool = True
    seed: int | None = None
    max_tokens: int = 3
    n: int = 1
    json_object: bool | None = None
    thinking_token_budget: int | None = None
    logprobs: int | None = None


def refusal(code=400):
    return ErrorResponse(error={"message": "too long", "type": "BadRequestError", "code": code})


def output(tokens, *, finished=False, error=False, why=None):
    reason = "error" if error else "length" if finished else None
    return SimpleNamespace(
        outputs=[SimpleNamespace(token_ids=tokens, finish_reason=reason, stop_reason=why, logprobs=None)],
        finished=finished or error,
        num_cached_tokens=len(PROMPT) - 1,
        num_cache_creation_tokens=0,
    )


def tokens_of(one):
    if one.outputs[0].finish_reason == "error":
        raise GenerationError("Internal server error")
    return one.outputs[0].token_ids


class Play:
    """Plays what happens at each replica: a cause of failure, an error, or what decode makes of its prefill.

    It is the prefill tier, vLLM's OpenAI layer and engine on the decode replica, and the router. Decode makes
    the second and third tokens, after the first where that is carried; None is a pull without end.
    """

    def __init__(self, plays, places=(), *, serve=B, ended=False, scheduler=SCHEDULER, second_runner=False):
        self.second_runner = second_runner  # on prefill
        self.plays = plays
        self.places = list(places)
        self.serve = serve
        self.first_ends = ended
        self.asked, self.contexts, self.released, self.prompts, self.pulls = [], [], [], [], []
        self.given, self.cached, self.engine = [], [], []
        self.again = None  # what decode makes of every attempt but the first, whatever prefill has done
        self.dead = False
        self.came = 0
        self.replace = SimpleNamespace(remote=self.place)
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(scheduler_cls=scheduler, stream_interval=1),
            parallel_config=SimpleNamespace(worker_cls=WORKERS["cpu"]),
            model_config=SimpleNamespace(enable_return_routed_experts=False, use_fp64_gumbel=False),
            speculative_config=None,
            use_v2_model_runner=True,
        )
        processor = SimpleNamespace(add_request=None)
        self._engine_client = SimpleNamespace(
            vllm_config=config,
            generate=self.generate,
            output_processor=processor,
            errored=False,
            input_processor=SimpleNamespace(process_inputs=lambda *_, **__: None),
            get_supported_tasks=self.supported_tasks,
        )

    async def supported_tasks(self):
        return ("generate",)

    def pulled(self):
        self.came += 1

    async def prefill(self, asked, info, context):
        self.prompts.append(asked.token_ids)
        self.contexts.append(context)
        replica = context.prefill_replica or self.serve
        self.at = self.plays[replica]
        if isinstance(self.at, FailureCause):
            raise PrefillFailedError(self.at, replica)
        if isinstance(self.at, ErrorResponse):
            return self.at
        if self.at is None:
            await asyncio.Event().wait()
        reason = "stop" if self.first_ends else "length"
        token = SimpleNamespace(token_ids=[FIRST], finish_reason=reason, stop_reason=None, logprobs=None)
        if asked.sampled_by("second" if self.second_runner else "first") is None:
            token = None
        return Prefilled(token, None if self.first_ends else {"at": replica}, replica, CacheUse(64, 32))

    async def completions(self, request, info):
        """vLLM's OpenAI layer."""
        kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(
            n=request.n,
            max_tokens=request.max_tokens,
            seed=request.seed,
            extra_args=request.vllm_xargs,
            output_kind=kind,
            structured_outputs=request.json_object and StructuredOutputsParams(json_object=True),
            thinking_token_budget=request.thinking_token_budget,
            logprobs=request.logprobs,
        )
        outputs = self._engine_client.generate(
            {"type": "token", "prompt_token_ids": PROMPT}, params, "request"
        )
        try:
            async for one in outputs:
                tokens = tokens_of(one)
                self.cached.append((one.num_cached_tokens, one.num_cache_creation_tokens))
                if request.stream:
                    for token in tokens:
                        yield f"data: {token}"
                else:
                    yield tokens
        except GenerationError as error:
            if not request.stream:
                raise
            yield "data: " + json.dumps({"error": {"message": str(error), "code": 500}})
        if request.stream:
            yield "data: [DONE]"

    async def generate(self, prompt, params, request_id, **options):  # noqa: C901, PLR0912 - one play
        """vLLM's engine."""
        carried = self.begins(params)
        is_stream = params.output_kind is RequestOutputKind.DELTA
        is_told = params.output_kind is not RequestOutputKind.FINAL_ONLY
        known = self.carried
        if carried is not None and not carried.is_sent and is_told:
            yield output(known, finished=carried.finish_reason is not None)
        if carried is not None and carried.finish_reason is not None:
            if not is_told:
                yield output(known, finished=True)
            return
        given = [[FIRST], [SECOND], [THIRD]][len(known) :] if self.at is ANSWER else self.at
        whole = list(known)
        for number, one in enumerate(given):
            if one is None:
                await asyncio.Event().wait()
            if isinstance(one, float):
                await asyncio.sleep(one)
                continue
            if isinstance(one, Exception):
                raise one
            if one is ABORTS:
                ended = output([] if is_stream else whole, finished=True)
                ended.outputs[0].finish_reason = "abort"
                yield ended
                return
            if one is REJECTS:
                yield output([THIRD] if is_stream else [*whole, THIRD], error=True)
                return
            if one is FAILED:
                self.engine.append("failed")
                yield output([] if is_stream else whole, error=True)
                return
            if isinstance(one, tuple):  # tokens that nobody has taken yet come with the word that it leaves
                what, more = one
                why = {DROPS: DROPPED, TAKES_LONG: TOO_SLOW}.get(what, LEFT)
                yield output(more if is_stream else [*whole, *more], error=True, why=why)
                return
            whole += one
            if is_told:
                yield output(one if is_stream else [*whole], finished=number == len(given) - 1)
        if not is_told:
            yield output(whole, finished=True)

    def begins(self, params):
        carried = Carried.of(params)
        self.carried = [] if carried is None else carried.token_ids
        self.pulls.append(params.extra_args.get(KV_PARAMS))
        self.given.append(params.extra_args)
        if KV_PARAMS not in params.extra_args:
            self.at = self.at_home
        if self.again is not None and len(self.given) > 1:
            self.at = self.again
        return carried

    async def place(self, request):
        self.asked.append(request)
        place = self.places.pop(0)
        if isinstance(place, Exception):
            raise place
        return place

    def release(self, context):
        self.released.append((context.prefill_replica, context.attempt_id))


class Counts(dict):
    def count(self, metric, **labels):
        key = tuple(labels.values())
        self[key] = self.get(key, 0) + 1


def context(**given):
    values = {"tier": STANDARD, "ttft_budget_s": 2.0, "prefill_replica": A, "prompt_bytes": 400, **given}
    return RequestContext(JobId("job"), "request", **values)


def orchestrator(  # noqa: PLR0913 - as `serve`
    steps, counts=None, limit=2, ask=None, local=None, leaves=False, *, droppable=(), digest=UNTOLD
):
    async def nothing_wrong(_):
        return None

    watch = PrefillWatch(ask or nothing_wrong, 0.01, 0.05)
    rules = ReplacementRules(limit, frozenset({STANDARD}))
    counts = Counts() if counts is None else counts
    placing = Placing(D, steps, 1.0, rules, counts, local is not None)
    prefill = RemotePrefill(steps, watch, counts)
    local, may_compute = local or LocalPrefills(1), local is not None
    decode = LocalDecode(steps, watch, counts, local, LocalPrefills(1), may_compute, steps.pulled)
    layer = OpenAILayer(D, steps)
    served = Orchestrator(layer, prefill, decode, placing, counts, leaves, frozenset(droppable), digest)
    served.stand_before(steps._engine_client)
    return served


def orchestrated(  # noqa: PLR0913 - as `serve`
    steps, counts=None, limit=2, ask=None, request=None, local=None, leaves=False, *, droppable=()
):
    return orchestrator(steps, counts, limit, ask, local, leaves, droppable=droppable), called(request)


def called(request=None, amount=None):
    return Call(
        request or Request(),
        None,
        is_chat=False,
        token_ids=PROMPT,
        spans=RequestSpans(""),
        amount=amount or Amount(),
    )


async def read(answer):
    async with aclosing(answer) as pieces:
        return [piece.text if isinstance(piece, Piece) else piece async for piece in pieces]


async def serve(  # noqa: PLR0913 - most have a default
    steps,
    counts=None,
    limit=2,
    ask=None,
    request=None,
    local=None,
    leaves=False,
    *,
    droppable=(),
    amount=None,
    **given,
):
    served = orchestrator(steps, counts, limit, ask, local, leaves, droppable=droppable)
    answer = await read(served.run(called(request, amount), context(**given)))
    assert not served._runs
    return answer


WHOLE = Request(stream=False)
RESAMPLED = Request(seed=1)
"""Not carried: decode has vLLM's second model runner, and prefill the first."""
CASES = pytest.mark.parametrize(
    ("request_", "answer"), [(Request(), STREAMED), (WHOLE, [ANSWER]), (RESAMPLED, STREAMED)], ids=str
)
