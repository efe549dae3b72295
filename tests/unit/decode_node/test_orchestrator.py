"""Until its KV cache is here, a request whose prefill fails is prefilled elsewhere; nothing is repeated."""

import asyncio
import json
import time
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from pydantic import BaseModel
from ray.serve.llm.openai_api_models import ErrorResponse
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.input_processor import InputProcessor

from benchmarks.harness.tiny_models import build_tiny_llama
from decode_node.answers import REQUEST_FAILED, Piece, error_response
from decode_node.carrying import PRESSURE_SCHEDULER, SCHEDULER, WORKERS
from decode_node.orchestrator import Orchestrator
from decode_node.prefill_health import PrefillFailedError, PrefillWatch
from decode_node.rendering import LocalReason
from decode_node.requests import local_decode
from decode_node.requests.dropping import DROPPED, MAY_DROP_XARG
from decode_node.requests.leaving import LEFT, MAY_LEAVE_XARG
from decode_node.requests.local_decode import LocalDecode
from decode_node.requests.local_prefills import LocalPrefills
from decode_node.requests.only_here import admitted
from decode_node.requests.openai_layer import OpenAILayer
from decode_node.requests.placing import Placing
from decode_node.requests.remote_prefill import RemotePrefill
from decode_node.requests.underway import Amount, Call
from decode_node.spans import RequestSpans
from router.core import RouterCore
from router.messages import PlacementRequested
from router.placement.least_harm import LeastHarm
from sampling.carried import CARRIED_XARG, KV_PARAMS, CacheUse, Carried, Prefilled
from slo.errors import Rejected, RejectionReason
from slo.predict.prefill_time import PrefillPredictor
from slo.replacement import (
    FailureCause,
    Replaced,
    ReplacementRules,
)
from slo.reports import AwaitedKv, DecodeReported, PrefillReported, ReplicaGone
from slo.request import (
    ENGINE_DIED,
    FIRST_DUE_XARG,
    TENANT_XARG,
    TIER_XARG,
    TPOT_XARG,
    JobId,
    Party,
    ReplicaId,
    RequestContext,
)
from slo.tiers import BACKGROUND, PREMIUM, STANDARD, TierPolicy

A, B, C, D = (ReplicaId(name) for name in "abcd")
FIRST, SECOND, THIRD = 1, 2, 3
ANSWER = [FIRST, SECOND, THIRD]
STREAMED = ["data: 1", "data: 2", "data: 3", "data: [DONE]"]
FAILED = "the connector could not pull"
LEAVES = "the engine had no memory for it"
DROPS = "the engine had none for it for good"
ABORTS = "the engine is being ended"
REJECTS = "the engine's grammar rejects the token that was sampled"
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
                why = DROPPED if what is DROPS else LEFT
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


def orchestrator(steps, counts=None, limit=2, ask=None, local=None, leaves=False, *, droppable=()):
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
    served = Orchestrator(layer, prefill, decode, placing, counts, leaves, frozenset(droppable))
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


@CASES
async def test_a_request_that_nothing_happens_to_passes_untouched(request_, answer):
    steps, counts = Play({A: ANSWER}), Counts()
    assert await serve(steps, counts, request=request_) == answer
    assert steps.asked == []
    assert steps.released == []
    assert steps.prompts == [PROMPT]
    assert steps.pulls == [{"at": A}]
    assert steps.came == 1
    assert set(steps.cached) == {(64, 32)}, "what prefill found and made, not what was pulled"
    assert counts == ({("seed",): 1} if request_ is RESAMPLED else {})


@pytest.mark.parametrize("local", [None, LocalPrefills(1)], ids=["prefill", "here"])
async def test_what_goes_on_after_a_loss_tells_what_its_first_prefill_found_cached(local):
    """The second one has found what the first has computed, and some of the answer with it."""
    steps = Play({A: [[THIRD]]})
    steps.at_home = [[THIRD]]
    carried = msgspec.to_builtins(Carried([FIRST, SECOND], cache=CacheUse(16, 80)))
    why = "" if local is None else LocalReason.NO_PREFILL_REPLICA.value
    request = Request(vllm_xargs={CARRIED_XARG: carried})
    await serve(steps, request=request, local=local, local_prefill=why, attempt=100)
    assert set(steps.cached) == {(16, 80)}


@pytest.mark.parametrize("local", [None, LocalPrefills(1)], ids=["prefill", "here"])
async def test_the_ingress_hears_what_of_the_prompt_was_cached_for_who_goes_on_after_a_loss(local):
    class Chosen(Play):
        async def completions(self, request, info):
            async for event in super().completions(request, info):
                yield 'data: {"choices":[{"text":"' + event + '"}]}'

    steps = Chosen({A: ANSWER})
    steps.at_home = ANSWER
    why = "" if local is None else LocalReason.NO_PREFILL_REPLICA.value
    served, call = orchestrated(steps, local=local)
    async with aclosing(served.run(call, context(local_prefill=why))) as pieces:
        told = [piece.cache async for piece in pieces if isinstance(piece, Piece)]
    assert told[0] == (CacheUse(len(PROMPT) - 1, 0) if local else CacheUse(64, 32))


async def test_the_router_hears_how_much_is_prefilled_of_what_goes_on_after_a_loss():
    steps = Play({A: FailureCause.REPLICA_DIED, B: [[THIRD]]}, [Replaced(B, 0.0)])
    request = Request(vllm_xargs={CARRIED_XARG: msgspec.to_builtins(Carried([FIRST] * 3000))})
    await serve(steps, request=request, attempt=100)
    assert [asked.tokens for asked in steps.asked] == [3099]
    assert [len(prompt) for prompt in steps.prompts] == [3099, 3099]


@pytest.mark.parametrize("why", ["", LocalReason.NO_PREFILL_REPLICA.value])
async def test_what_lacks_no_token_any_more_has_nothing_computed_and_waits_for_no_turn(why):
    """Its decode replica has died between its last token and its end."""
    steps, counts, local = Play({}), Counts(), LocalPrefills(1)
    request = Request(vllm_xargs={CARRIED_XARG: msgspec.to_builtins(Carried(ANSWER, None, "length"))})
    async with local.claimed(Party("other", STANDARD)) as claim, local.turn(claim, 5000), asyncio.timeout(1):
        answer = await serve(steps, counts, request=request, local=local, local_prefill=why, attempt=100)
    assert answer == STREAMED, "the layer leaves out what the client has where it sees choices"
    assert (steps.prompts, counts) == ([], {})


async def test_only_a_kv_cache_that_comes_from_a_prefill_replica_is_told_as_pulled():
    steps = Play({A: [FAILED], B: ANSWER}, [Replaced(B, 0.1)])
    assert await serve(steps) == STREAMED
    assert (len(steps.pulls), steps.came) == (2, 1)
    steps = Play({})
    steps.at_home = ANSWER
    why = LocalReason.NO_PREFILL_REPLICA.value
    assert await serve(steps, local=LocalPrefills(1), local_prefill=why) == STREAMED
    assert steps.came == 0


async def test_with_the_same_model_runner_on_both_tiers_a_seed_carries():
    steps, counts = Play({A: ANSWER}, second_runner=True), Counts()
    assert await serve(steps, counts, request=RESAMPLED) == STREAMED
    assert not counts


async def test_a_seed_that_prefill_draws_otherwise_with_is_counted_once_whatever_fails():
    steps, counts = Play({A: [FAILED], B: ANSWER}, [Replaced(B, 0.1)]), Counts()
    assert await serve(steps, counts, request=RESAMPLED) == STREAMED
    assert counts["seed",] == 1


class Constrained(Play):
    """Asks for answers that a grammar constrains."""

    async def completions(self, request, info):
        params = SamplingParams(
            max_tokens=3,
            extra_args=request.vllm_xargs,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=StructuredOutputsParams(json_object=True),
        )
        async for one in self._engine_client.generate({"prompt_token_ids": PROMPT}, params, "request"):
            for token in tokens_of(one):
                yield f"data: {token}"
        yield "data: [DONE]"


async def test_a_first_token_counts_as_sampled_again_once_prefill_has_sampled_it():
    steps, counts = Constrained({A: FailureCause.REPLICA_DIED, B: [FAILED], C: ANSWER}), Counts()
    steps.places = [Replaced(B, 0.1), Replaced(C, 0.1)]
    assert await serve(steps, counts) == STREAMED
    assert counts["grammar",] == 1


async def test_a_first_token_that_only_decode_samples_does_not_count_as_sampled_again():
    steps, counts = Constrained({}), Counts()
    steps.at_home = ANSWER
    why = LocalReason.CHEAPER_ON_DECODE.value
    assert await serve(steps, counts, local=LocalPrefills(1), local_prefill=why) == STREAMED
    assert counts == {(why,): 1}


@CASES
async def test_the_engines_scheduler_learns_the_objective(request_, answer):
    steps = Play({A: ANSWER})
    await serve(steps, request=request_, tier=PREMIUM, tenant="a", tpot_s=0.03)
    await serve(steps, request=request_)
    with_objective, without = steps.given
    assert with_objective[TIER_XARG] == PREMIUM
    assert with_objective[TENANT_XARG] == "a"
    assert with_objective[TPOT_XARG] == 0.03
    assert without[TIER_XARG] == STANDARD
    assert TPOT_XARG not in without


async def test_the_engines_scheduler_learns_when_the_first_token_is_due_that_it_samples():
    steps, before_s = Play({A: ANSWER}), time.monotonic()
    for request, budget_s in ((RESAMPLED, 2.0), (RESAMPLED, None), (Request(), 2.0)):
        await serve(steps, request=request, ttft_budget_s=budget_s)
    sampled, without, carried = steps.given
    assert before_s + 2.0 <= sampled[FIRST_DUE_XARG] <= time.monotonic() + 2.0
    assert FIRST_DUE_XARG not in without
    assert FIRST_DUE_XARG not in carried, "its client has it already"


@CASES
@pytest.mark.parametrize("lost", [FailureCause.REPLICA_DIED, FailureCause.ENGINE_DIED])
async def test_before_or_during_the_prefill_the_router_finds_another_place(request_, answer, lost):
    counts = Counts()
    steps = Play({A: lost, B: ANSWER}, [Replaced(B, 0.3)])
    assert await serve(steps, counts, request=request_) == answer
    assert [one.prefill_replica for one in steps.contexts] == [A, B]
    assert counts[(lost.value, "router")] == 1
    (asked,) = steps.asked
    assert (asked.failed_replicas, asked.cause, asked.decode_replica, asked.tokens) == ((A,), lost, D, 100)
    assert asked.lost_replica == A
    assert asked.ttft_budget_s == pytest.approx(2.0, abs=0.2)
    again = steps.contexts[1]
    assert (again.handoff_s, again.failed_replicas, again.prompt_bytes) == (0.3, (A,), 0)
    assert again.ttft_budget_s <= asked.ttft_budget_s


@CASES
async def test_once_its_kv_has_come_it_does_not_need_the_prefill_replica_any_more(
    request_, answer, monkeypatch
):
    monkeypatch.setattr(local_decode, "PULLED_S", 0.0)
    asked_for = []

    async def dies(replica):
        asked_for.append(replica)
        return FailureCause.REPLICA_DIED

    own = [[FIRST], [SECOND]] if request_ is RESAMPLED else [[SECOND]]
    steps = Play({A: [*own, 0.2, [THIRD]]})
    assert await serve(steps, request=request_, ask=dies) == answer
    assert steps.asked == []
    assert steps.released == []


@CASES
async def test_an_answer_that_an_ending_engine_aborts_fails_and_is_not_whole(request_, answer):
    steps = Play({A: [[FIRST], ABORTS] if request_ is RESAMPLED else [ABORTS]})
    *_, last = await serve(steps, request=request_)
    assert last.error.type == REQUEST_FAILED


@CASES
async def test_a_failed_pull_is_placed_again_and_repeats_nothing(request_, answer):
    counts = Counts()
    steps = Play({A: [FAILED], B: ANSWER}, [Replaced(B, 0.1)])
    assert await serve(steps, counts, request=request_) == answer
    assert counts[("pull_failed", "router")] == 1
    (asked,) = steps.asked
    assert (asked.lost_replica, asked.failed_replicas, asked.avoided_replicas) == (None, (), (A,))
    assert steps.contexts[1].failed_replicas == (A,), "Serve would rather choose another one, too"
    assert steps.released == [(A, "job")]


@pytest.mark.parametrize("ails", [FailureCause.REPLICA_DIED, RuntimeError("lost"), None], ids=str)
async def test_a_failed_pull_is_the_replicas_fault_if_it_does_not_say_that_it_serves(ails):
    async def ask(replica):
        if replica != A or "failed" not in steps.engine:
            return None
        if ails is None:
            await asyncio.Event().wait()
        if isinstance(ails, Exception):
            raise ails
        return ails

    steps = Play({A: [FAILED], B: ANSWER}, [Replaced(B, 0.1)])
    assert await serve(steps, ask=ask) == STREAMED
    (asked,) = steps.asked
    assert (asked.lost_replica, asked.failed_replicas, asked.avoided_replicas) == (A, (A,), ())


def routed(*prefill):
    """A router that has heard of these replicas, and answers as the real one does."""
    tier = TierPolicy(2.0, None, sheddable=True, weight=1.0)
    core = RouterCore({STANDARD: tier}, LeastHarm())
    for name in prefill:
        core.prefill_reported(PrefillReported(name, PrefillPredictor(1e-4, 0.0), (), None, 0.0), 0.0)
    core.view.decode_reported(DecodeReported(D, 0.0, 0), 0.0)

    class Router(Play):
        async def place(self, request):
            self.asked.append(request)
            if request.lost_replica is not None:
                core.view.replica_gone(ReplicaGone(request.lost_replica))
            placed = core.place(PlacementRequested.again(request), 0.0)
            if isinstance(placed, Rejected):
                return placed
            return Replaced(placed.prefill_replica, placed.handoff_s)

    return core, Router


@CASES
async def test_the_only_prefill_replica_is_used_again_after_one_failed_pull_and_stays_with_the_router(
    request_, answer
):
    core, router = routed(A)
    steps = router({A: [FAILED]})
    steps.again = ANSWER
    assert await serve(steps, request=request_, local=LocalPrefills(1)) == answer
    assert [one.prefill_replica for one in steps.contexts] == [A, A]
    assert list(core.view.prefill) == [A]


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("cause", [FailureCause.ENGINE_DIED, FailureCause.REPLICA_DIED])
async def test_without_a_router_the_dead_replica_that_serve_chooses_again_is_not_the_requests_fault(
    cause, limit
):
    counts, steps = Counts(), Play({A: cause}, [TimeoutError(), TimeoutError()], serve=A)
    steps.at_home = ANSWER
    assert await serve(steps, counts, limit=limit, local=LocalPrefills(1)) == STREAMED
    assert counts == {(cause.value, "serve"): 1, (cause.value, "local"): 1, **counts}
    assert len(steps.asked) == 2


@CASES
async def test_after_two_failed_pulls_from_the_only_prefill_replica_decode_computes_the_prompt(
    request_, answer
):
    core, router = routed(A)
    counts, steps = Counts(), router({A: [FAILED]})
    steps.at_home = ANSWER
    assert await serve(steps, counts, request=request_, local=LocalPrefills(1)) == answer
    assert [one.prefill_replica for one in steps.contexts] == [A, A]
    assert counts["pull_failed", "router"] == counts["pull_failed", "local"] == 1
    assert list(core.view.prefill) == [A]


async def test_another_replica_is_preferred_to_one_that_a_pull_has_failed_from():
    core, router = routed(A, B)
    steps = router({A: [FAILED], B: ANSWER})
    assert await serve(steps) == STREAMED
    assert [one.prefill_replica for one in steps.contexts] == [A, B]
    assert list(core.view.prefill) == [A, B]


async def test_a_request_that_brings_tokens_along_goes_on_from_them():
    steps = Play({A: ANSWER})
    brought = msgspec.to_builtins(Carried([FIRST, SECOND]))
    await serve(steps, request=Request(vllm_xargs={CARRIED_XARG: brought}))
    assert steps.prompts == [[*PROMPT, FIRST]]
    assert steps.carried == [FIRST, SECOND]


async def test_an_answer_that_had_ended_needs_no_prefill():
    steps = Play({A: ANSWER})
    brought = msgspec.to_builtins(Carried(ANSWER, finish_reason="length"))
    assert (await serve(steps, request=Request(vllm_xargs={CARRIED_XARG: brought})))[-1] == STREAMED[-1]
    assert steps.prompts == []
    assert steps.pulls == [None]


@pytest.mark.parametrize("lost", [FailureCause.REPLICA_DIED, [FAILED]])
@pytest.mark.parametrize("place", [Replaced(None, 0.0), Rejected(RejectionReason.NO_REPLICA, 1.0)])
@CASES
async def test_without_another_prefill_replica_decode_computes_the_prompt(request_, answer, lost, place):
    counts, local = Counts(), LocalPrefills(1)
    steps = Play({A: lost}, [place])
    steps.at_home = ANSWER
    assert await serve(steps, counts, request=request_, local=local) == answer
    assert counts[("replica_died" if lost is not None and lost != [FAILED] else "pull_failed", "local")] == 1
    assert counts[("no_prefill_replica",)] == 1
    assert steps.pulls[-1] is None
    assert (local.computing, local.outstanding.total()) == (0, 0)


@CASES
async def test_a_request_that_was_placed_on_decode_alone_asks_for_no_prefill(request_, answer):
    steps = Play({})
    steps.at_home = ANSWER
    places = {"prefill_replica": None, "local_prefill": "cheaper_on_decode"}
    counts = Counts()
    assert await serve(steps, counts, request=request_, local=LocalPrefills(1), **places) == answer
    assert steps.prompts == []
    assert counts[("cheaper_on_decode",)] == 1


@CASES
async def test_attempts_on_one_replica_have_names_of_their_own(request_, answer):
    steps = Play({A: [FAILED]}, [Replaced(A, 0.1), Replaced(B, 0.1)])
    steps.plays[B] = ANSWER
    assert await serve(steps, request=request_) == answer
    assert [one.attempt_id for one in steps.contexts] == ["job", "job#1", "job#2"]
    assert steps.released == [(A, "job"), (A, "job#1")]


@CASES
async def test_a_replica_that_fails_one_request_is_not_lost_to_others(request_, answer):
    counts = Counts()
    steps = Play({A: FailureCause.REQUEST_FAILED, B: ANSWER}, [Replaced(B, 0.1)])
    assert await serve(steps, counts, request=request_) == answer
    (asked,) = steps.asked
    assert (asked.failed_replicas, asked.lost_replica) == ((A,), None)


async def test_after_the_second_token_an_error_ends_the_answer():
    steps = Play({A: [[SECOND], FAILED]})
    *pieces, failed = await serve(steps)
    assert pieces == STREAMED[:2]
    assert (failed.error.type, failed.error.message) == ("engine_error", "Internal server error")
    assert steps.asked == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_first_token_that_ends_the_answer_needs_no_decode(stream):
    steps = Play({A: []}, ended=True)
    answer = await serve(steps, request=Request(stream=stream))
    assert answer == (["data: 1", "data: [DONE]"] if stream else [[FIRST]])
    assert steps.released == []


async def test_when_it_cannot_go_on_a_stream_ends_with_our_error_and_nothing_else():
    steps = Play({A: [FAILED]}, [None])
    pieces = await serve(steps, limit=0)
    assert pieces[0] == STREAMED[0]
    (answer,) = pieces[1:]
    assert (answer.error.code, answer.error.type) == (503, "prefill_failed")


async def test_a_dead_decode_engine_is_not_the_prefills_fault():
    steps = Play({A: [GenerationError("dead")]})
    steps._engine_client.errored = True
    *pieces, failed = await serve(steps)
    assert pieces == STREAMED[:1]
    assert (failed.error.type, failed.error.param) == (ENGINE_DIED, D)
    assert steps.asked == []


async def test_an_engine_that_fails_without_streaming_answers_with_an_error():
    steps = Play({A: [GenerationError("out of memory")]})
    (answer,) = await serve(steps, request=WHOLE)
    assert (answer.error.code, answer.error.type) == (500, "engine_error")


@pytest.mark.slow
async def test_what_vllm_refuses_on_decode_is_refused_before_its_prompt_is_prefilled(tmp_path):
    config = EngineArgs(str(build_tiny_llama(tmp_path / "tiny")), max_model_len=128).create_engine_config()
    steps = Play({A: ANSWER})
    steps._engine_client.input_processor = InputProcessor(config)
    assert await serve(steps) == STREAMED
    for request, match in (
        (Request(thinking_token_budget=5), "thinking_token_budget is set"),
        (Request(logprobs=30), "greater than max allowed: 20"),
    ):
        with pytest.raises(VLLMValidationError, match=match):
            await serve(steps, request=request)
    assert steps.prompts == [PROMPT], "only that of the good one"


@pytest.mark.parametrize("request_", [Request(), WHOLE])
async def test_what_the_engines_refuse_is_refused(request_):
    steps = Play({A: refusal()})
    (answer,) = await serve(steps, request=request_)
    assert answer.error.code == 400
    assert steps.asked == []


@CASES
async def test_without_the_router_serve_chooses_and_avoids_the_lost_replica(request_, answer):
    counts = Counts()
    steps = Play({A: FailureCause.REPLICA_DIED, B: ANSWER}, [RuntimeError("the router has died")])
    assert await serve(steps, counts, request=request_) == answer
    again = steps.contexts[1]
    assert (again.prefill_replica, again.failed_replicas) == (None, (A,))
    assert counts[("replica_died", "serve")] == 1


async def test_a_router_that_has_just_started_or_would_let_nobody_in_does_not_end_an_admitted_request():
    for reason in (RejectionReason.NOT_SETTLED, RejectionReason.OVER_SHARE):
        steps = Play({A: FailureCause.REPLICA_DIED, B: ANSWER}, [Rejected(reason, 1.0)])
        assert await serve(steps) == STREAMED


@pytest.mark.parametrize("limit", [0, 1, 2])
async def test_it_is_placed_again_so_many_times_and_then_refused(limit):
    counts = Counts()
    dying = dict.fromkeys((A, B, C), FailureCause.REPLICA_DIED)
    steps = Play(dying, [Replaced(B, 0.1), Replaced(C, 0.1)])
    (refused,) = await serve(steps, counts, limit=limit)
    assert (refused.error.code, refused.error.type) == (503, "prefill_failed")
    assert "try again" in refused.error.message
    assert len(steps.contexts) == limit + 1
    assert counts[("replica_died", "limit")] == 1
    assert [request.failed_replicas for request in steps.asked] == [(A,), (A, B)][:limit]


@pytest.mark.parametrize(
    ("reason", "code", "kind"),
    [
        (RejectionReason.NO_REPLICA, 503, "no_replica"),
        (RejectionReason.DEADLINE_INFEASIBLE, 429, "deadline_passed"),
    ],
)
async def test_it_is_refused_for_what_the_router_says(reason, code, kind):
    steps = Play({A: FailureCause.REPLICA_DIED}, [Rejected(reason, 1.0)])
    (refused,) = await serve(steps)
    assert (refused.error.code, refused.error.type) == (code, kind)


async def test_with_a_first_token_no_deadline_for_it_ends_the_answer():
    steps = Play({A: [FAILED], B: ANSWER}, [Rejected(RejectionReason.DEADLINE_INFEASIBLE, 1.0)])
    assert await serve(steps, ttft_budget_s=-1.0, explicit_deadline=True) == STREAMED


async def test_a_named_deadline_that_has_passed_is_not_even_asked_for():
    steps = Play({A: FailureCause.REPLICA_DIED})
    (refused,) = await serve(steps, ttft_budget_s=-1.0, explicit_deadline=True)
    assert "x-slo-ttft-ms" in refused.error.message
    assert steps.asked == []


@pytest.mark.parametrize("given", [{"tier": PREMIUM, "ttft_budget_s": -1.0}, {"ttft_budget_s": None}])
async def test_those_who_may_not_be_shed_or_have_no_deadline_are_always_placed_again(given):
    steps = Play({A: FailureCause.REPLICA_DIED, B: ANSWER}, [Replaced(B, 0.1)])
    assert await serve(steps, explicit_deadline=True, **given) == STREAMED


@pytest.mark.parametrize("stuck", [None, [None]])
async def test_a_replica_that_falls_silent_in_prefill_or_pull_is_left(stuck):
    async def silent(replica):
        if replica == A:
            await asyncio.Event().wait()

    counts = Counts()
    steps = Play({A: stuck, B: ANSWER}, [Replaced(B, 0.1)])
    assert await asyncio.wait_for(serve(steps, counts, ask=silent), 3) == STREAMED
    assert counts == {("silent", "router"): 1}
    assert steps.released == [(A, "job")], "it may live, and then has the work for nothing"


async def test_nobody_there_at_all():
    async def nobody(_):
        return FailureCause.NO_REPLICA

    steps = Play({B: None}, [None])
    (refused,) = await serve(steps, ask=nobody, prefill_replica=None)
    assert "no prefill replica is running" in refused.error.message


@pytest.mark.parametrize("where", [None, [None]])
async def test_a_client_that_leaves_releases_the_prefill(where):
    steps = Play({A: where})
    task = asyncio.create_task(serve(steps))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps.released == [(A, "job")]


LEAVING = pytest.mark.parametrize("more", [[], [SECOND]], ids=["alone", "with a token"])


@LEAVING
@pytest.mark.parametrize(("request_", "answer"), [(Request(), STREAMED), (WHOLE, [ANSWER])], ids=str)
async def test_one_that_leaves_the_engine_goes_on_after_its_last_token(request_, answer, more):
    counts = Counts()
    plays = {A: [[SECOND], (LEAVES, [])] if not more else [(LEAVES, more)], B: ANSWER}
    steps = Play(plays, [Replaced(B, 0.2)], scheduler=PRESSURE_SCHEDULER)
    assert await serve(steps, counts, request=request_, leaves=True, ttft_budget_s=2.0) == answer
    assert steps.prompts == [PROMPT, [*PROMPT, FIRST]], "all but the token that is computed next"
    assert steps.carried == [FIRST, SECOND]
    (asked,) = steps.asked
    assert (asked.cause, asked.failed_replicas, asked.lost_replica) == (FailureCause.LEFT, (), None)
    assert (asked.tokens, asked.ttft_budget_s, asked.explicit_deadline) == (101, 2.0, False)
    assert len(steps.prompts[-1]) == 101, "decode computes the last token that it carries"
    assert [one.attempt_id for one in steps.contexts] == ["job", "job#1"]
    assert steps.pulls == [{"at": A}, {"at": B}]
    assert steps.released == [], "it had been pulled"
    assert counts == {("left", "router"): 1}


async def test_leaving_is_no_failure_and_may_happen_more_often_than_one_is_placed_again():
    leaves = [(LEAVES, [])]
    steps = Play({A: leaves, B: leaves, C: leaves}, [Replaced(B, 0.1), Replaced(C, 0.1), Replaced(D, 0.1)])
    steps.plays[D] = ANSWER
    assert await serve(steps, limit=1, leaves=True) == STREAMED


@pytest.mark.parametrize("place", [Rejected(RejectionReason.NO_REPLICA, 1.0), Replaced(None, 0.0)])
@pytest.mark.parametrize("local", [None, LocalPrefills(1)], ids=["may not", "may"])
async def test_one_that_leaves_and_that_nobody_takes_is_computed_here(place, local):
    counts = Counts()
    steps = Play({A: [(LEAVES, [])]}, [place])
    steps.again = ANSWER
    assert await serve(steps, counts, leaves=True, local=local) == STREAMED
    assert steps.pulls[-1] is None
    assert steps.prompts == [PROMPT], "no prefill replica was asked"
    assert counts["left", "local"] == 1


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never is so")


@pytest.mark.parametrize("request_", [Request(), WHOLE], ids=str)
async def test_one_that_has_left_counts_as_computed_here_until_its_first_token(request_):
    steps, local = Play({A: [(LEAVES, [])]}, [Rejected(RejectionReason.NO_REPLICA, 1.0)]), LocalPrefills(1)
    steps.again = [1.0, [SECOND], None]
    task = asyncio.create_task(serve(steps, request=request_, leaves=True, local=local))
    await until(lambda: len(steps.pulls) == 2)
    assert (local.computing, local.outstanding.total()) == (1, 0)
    await until(lambda: local.computing == 0)
    assert not task.done(), "its answer goes on"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert local.computing == 0


async def test_one_that_has_left_and_whose_client_leaves_does_not_count_any_more():
    steps, local = Play({A: [(LEAVES, [])]}, [Rejected(RejectionReason.NO_REPLICA, 1.0)]), LocalPrefills(1)
    steps.again = [None]
    task = asyncio.create_task(serve(steps, leaves=True, local=local))
    await until(lambda: local.computing == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert local.computing == 0


@pytest.mark.parametrize(
    "fails", [FailureCause.REPLICA_DIED, FailureCause.REQUEST_FAILED, refusal(404)], ids=str
)
async def test_whatever_fails_after_it_has_left_decode_computes_it(fails):
    counts = Counts()
    steps = Play({A: [(LEAVES, [])], B: fails}, [Replaced(B, 0.1)])
    steps.again = ANSWER
    assert await serve(steps, counts, limit=0, leaves=True) == STREAMED
    assert steps.pulls[-1] is None
    assert counts[("left",)] == 1


async def test_only_what_can_be_carried_may_leave():
    for asked, scheduler, leaves, expected in (
        (Request(), PRESSURE_SCHEDULER, True, True),
        (Request(), PRESSURE_SCHEDULER, False, False),
        (Request(), SCHEDULER, True, False),
    ):
        steps = Play({A: ANSWER}, scheduler=scheduler)
        await serve(steps, request=asked, leaves=leaves)
        assert bool(steps.given[0].get(MAY_LEAVE_XARG)) is expected


@CASES
async def test_the_router_is_told_what_kv_is_awaited_until_it_is_there(request_, answer):
    seen = []

    class Watched(Play):
        async def prefill(self, *given):
            seen.append(served.awaited())
            return await super().prefill(*given)

        async def generate(self, *given, **options):
            async for one in super().generate(*given, **options):
                seen.append(served.awaited())
                yield one
                await asyncio.sleep(0)
                seen.append(served.awaited())

    steps = Watched({A: [FAILED], B: ANSWER}, [Replaced(B, 0.1)])
    served, call = orchestrated(steps, request=request_)
    pieces = [one async for one in served.run(call, context())]
    assert pieces
    waits = AwaitedKv("job", STANDARD, 100)
    carried = AwaitedKv("job", STANDARD, 101)
    assert seen[0] == (waits,)
    assert set(seen) <= {(waits,), (carried,), ()}
    assert seen[-1] == ()
    first = seen.index(())
    assert all(one == () for one in seen[first:])
    assert served.awaited() == ()


async def test_one_that_has_come_is_named_until_its_run_names_it():
    steps = Play({A: None})
    served, call = orchestrated(steps)
    with served.expects(context()):
        assert served.awaited() == (AwaitedKv("job", STANDARD, 0),)
        task = asyncio.create_task(anext(served.run(call, context())))
        await until(lambda: steps.contexts)
        assert served.awaited() == (AwaitedKv("job", STANDARD, 100),)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert served.awaited() == ()
    with served.expects(context()):
        with served.expects(context()):
            pass
        assert served.awaited() == (), "the same job that has come once more is the one that counts"
    assert served.awaited() == ()


async def test_one_that_has_left_awaits_its_kv_again():
    steps = Play({A: [[SECOND], (LEAVES, [])], B: None}, [Replaced(B, 0.2)], scheduler=PRESSURE_SCHEDULER)
    served, call = orchestrated(steps, leaves=True)

    async def answer():
        return [one async for one in served.run(call, context())]

    task = asyncio.create_task(answer())
    await until(lambda: len(steps.contexts) == 2)
    assert served.awaited() == (AwaitedKv("job", STANDARD, 102),)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert served.awaited() == ()


async def test_one_whose_prompt_is_computed_here_at_once_is_awaited_until_its_first_piece():
    steps = Play({})
    steps.at_home = [1.0, [FIRST], None]
    served, call = orchestrated(steps)
    async with admitted(LocalPrefills(1), context(), 1, 60.0) as here:
        pieces = served.run_here(replace(call, token_ids=[]), context(), here, "several_sequences")
        first = asyncio.create_task(anext(pieces))
        await until(lambda: steps.given)
        assert served.awaited() == (AwaitedKv("job", STANDARD, 0),)
        await first
        assert served.awaited() == ()
        await pieces.aclose()


LOW = {"tier": BACKGROUND, "ttft_budget_s": None, "droppable": {BACKGROUND}}


@pytest.mark.parametrize(
    ("plays", "streamed"),
    [
        ([[SECOND], (DROPS, [])], STREAMED[:2]),
        ([(DROPS, [SECOND])], STREAMED[:2]),
        ([(DROPS, [])], STREAMED[:1]),
    ],
    ids=["later", "with a token", "at once"],
)
async def test_one_that_the_engine_drops_ends_with_our_error_after_what_it_has(plays, streamed):
    counts = Counts()
    steps = Play({A: plays}, scheduler=PRESSURE_SCHEDULER)
    *pieces, refused = await serve(steps, counts, leaves=True, **LOW)
    assert pieces == streamed, "no [DONE]"
    assert (refused.error.code, refused.error.type) == (429, "dropped")
    assert "promised nothing" in refused.error.message
    (whole,) = await serve(Play({A: plays}), request=WHOLE, **LOW)
    assert (whole.error.code, whole.error.type) == (429, "dropped")
    assert steps.asked == [], "it is not placed again"
    assert counts == {}


async def test_one_that_is_dropped_before_its_kv_was_pulled_releases_it():
    steps = Play({A: [(DROPS, [])]})
    await serve(steps, **LOW)
    assert steps.released == [(A, "job")]


async def test_one_whose_prompt_the_engine_computes_may_be_dropped_too():
    steps, local = Play({}), LocalPrefills(1)
    steps.at_home = [[FIRST], (DROPS, [])]
    here = {"prefill_replica": None, "local_prefill": "cheaper_on_decode", "local": local}
    *pieces, refused = await serve(steps, **here, **LOW)
    assert pieces == STREAMED[:1]
    assert (refused.error.code, refused.error.type) == (429, "dropped")
    assert (local.computing, local.outstanding.total()) == (0, 0)


@pytest.mark.parametrize(("scheduler", "waits"), [(PRESSURE_SCHEDULER, False), (SCHEDULER, True)])
async def test_a_prompt_that_the_engine_holds_back_keeps_no_other_tier_from_being_computed(scheduler, waits):
    held, other = [Play({}, scheduler=scheduler) for _ in range(2)]
    held.at_home, other.at_home = [None], ANSWER
    here = {"prefill_replica": None, "local_prefill": "no_prefill_replica", "local": LocalPrefills(1)}
    low = asyncio.create_task(serve(held, tier=BACKGROUND, **here))
    await until(lambda: held.given)
    top = asyncio.create_task(serve(other, tier=PREMIUM, **here))
    same = asyncio.create_task(serve(peer := Play({}, scheduler=scheduler), tier=BACKGROUND, **here))
    await asyncio.sleep(0.05)
    assert here["local"].outstanding.total() == (3 if waits else 2)
    assert not peer.given
    if not waits:
        assert await top == STREAMED
    for task in (low, top, same):
        task.cancel()
    await asyncio.gather(low, top, same, return_exceptions=True)
    assert (here["local"].computing, here["local"].outstanding.total()) == (0, 0)


async def test_the_engine_is_told_who_may_be_dropped():
    for given, expected in (
        (LOW, True),
        ({**LOW, "droppable": ()}, False),
        ({**LOW, "tier": STANDARD}, False),
        ({**LOW, "ttft_budget_s": 9.0}, False),
        ({**LOW, "tpot_s": 0.5}, False),
    ):
        steps = Play({A: ANSWER})
        assert await serve(steps, **given) == STREAMED
        assert bool(steps.given[0].get(MAY_DROP_XARG)) is expected, given


@pytest.mark.parametrize("request_", [Request(), WHOLE], ids=str)
@pytest.mark.parametrize("is_here", [False, True])
async def test_what_stands_before_the_engine_can_answer_a_request_itself(request_, is_here):
    steps = Play({A: ANSWER})
    served = orchestrator(steps)

    async def refused(prompt, params, request_id, **options):
        assert params.extra_args[TENANT_XARG] == "acme"
        raise served.refuse(params, error_response(429, "grammars", "too many"))
        yield

    steps._engine_client.generate = refused
    call, asked = called(request_), context(tenant="acme")
    if is_here:
        async with admitted(LocalPrefills(1), asked, 1, 60.0) as here:
            (piece,) = await read(served.run_here(call, asked, here, "several_prompts"))
    else:
        (piece,) = await read(served.run(call, asked))
    assert (piece.error.code, piece.error.type) == (429, "grammars")
    assert steps.prompts == []


@pytest.mark.parametrize("stream", [True, False])
async def test_what_only_decode_can_compute_waits_for_its_turn(stream):
    local, who = LocalPrefills(1), Party("", STANDARD)
    steps = Play({})
    steps.at_home = ANSWER
    served, pieces = orchestrator(steps, local=local), []

    async def answer():
        async with admitted(local, context(), 1, 60.0) as here:
            call = called(Request(stream=stream))
            answered = served.run_here(call, context(), here, "several_sequences")
            pieces.extend([piece.text if isinstance(piece, Piece) else piece async for piece in answered])

    async with local.claimed(who) as claim, local.turn(claim, 1):
        task = asyncio.create_task(answer())
        await asyncio.sleep(0.01)
        assert steps.given == [], "the engine has not heard of it"
    await task
    assert pieces == (STREAMED if stream else [ANSWER])
    assert (local.computing, local.outstanding, served._here) == (0, {}, {})


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_what_only_decode_can_compute_fails_with_the_engine_that_gives_it_up(stream, n):
    """And is no answer that was cut: another replica begins it anew."""
    steps = Play({})
    steps.at_home = [[FIRST], ABORTS]
    served = orchestrator(steps, local=LocalPrefills(n))
    async with admitted(LocalPrefills(n), context(), n, 60.0) as here:
        call = called(Request(stream=stream, n=n))
        pieces = await read(served.run_here(call, context(), here, "several_sequences"))
    assert set(pieces[:-1]) == ({STREAMED[0]} if stream else set())
    assert pieces[-1].error.type == REQUEST_FAILED


@pytest.mark.parametrize("first", [[], [[FIRST]]], ids=str)
@pytest.mark.parametrize("way", ["prefilled elsewhere", "computed here", 1, 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_its_own_grammar_ends_is_the_requests_fault_and_not_placed_again(
    stream, way, first
):
    """As where `allowed_token_ids` has nothing that the grammar allows: no other replica has either."""
    plays = [*first, REJECTS]
    steps, local, n = Play({A: plays}), LocalPrefills(2), way if isinstance(way, int) else 1
    steps.at_home = plays
    asked = Request(stream=stream, n=n, json_object=True)
    if way == "prefilled elsewhere":
        *pieces, refused = await serve(steps, request=asked)
    elif way == "computed here":
        place = {"prefill_replica": None, "local_prefill": "cheaper_on_decode"}
        *pieces, refused = await serve(steps, request=asked, local=local, **place)
    else:
        served = orchestrator(steps, local=local)
        async with admitted(local, context(), n, 60.0) as here:
            answer = served.run_here(called(asked), context(), here, "several_sequences")
            *pieces, refused = await read(answer)
    assert set(pieces) == ({STREAMED[0]} if stream and first else set())
    error = refused.error
    assert (error.code, error.type, error.param) == (400, "BadRequestError", "structured_outputs")
    assert steps.asked == []


async def test_the_steps_of_a_beam_search_are_known_without_a_name():
    """vLLM's search asks its engine with parameters of its own, in tasks of its own."""
    local, heard, steps = LocalPrefills(1), [], Play({})
    steps.at_home = ANSWER
    served = orchestrator(steps, local=local)

    async def collected(outputs):
        return [each async for each in outputs]

    async def search(request, info):
        for beams in (1, 2):
            made = [
                steps._engine_client.generate(
                    {"prompt_token_ids": PROMPT}, SamplingParams(extra_args={}), "step"
                )
                for _ in range(beams)
            ]
            await asyncio.gather(*(asyncio.create_task(collected(one)) for one in made))
            heard.append((local.computing, local.outstanding.total()))
        yield ANSWER

    steps.completions = search
    request, amount = Request(stream=False), Amount()
    async with admitted(local, context(), 1, 60.0) as here:
        call = called(request.model_copy(update={"use_beam_search": True}), amount)
        assert [piece async for piece in served.run_here(call, context(), here, "several_sequences")] == [
            ANSWER
        ]
    assert heard == [(1, 0), (1, 0)], "the search counts as computing to its end"
    assert amount.tokens >= 3
    assert (local.computing, local.outstanding) == (0, {})
    assert (
        len(await collected(steps._engine_client.generate({}, SamplingParams(extra_args={}), "other"))) == 3
    )


@CASES
async def test_how_much_was_generated_is_known_when_the_client_leaves(request_, answer):
    steps, amount = Play({A: [[SECOND], 0.0, [THIRD], None]}), Amount()
    task = asyncio.create_task(serve(steps, request=request_, amount=amount))
    await until(lambda: amount.tokens >= 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert amount.tokens in {2, 3}
    amount = Amount()
    assert await serve(Play({A: ANSWER}), request=request_, amount=amount) == answer
    assert amount.tokens == 3
