"""Which way a request goes on a decode replica, and when it has its turn."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from decode_node.answering import Answering, Arrived
from decode_node.answers import error_response
from decode_node.grammars.check import GrammarNotCheckedError, TooManyGrammarsError
from decode_node.rendering import LocalReason, Rendered
from decode_node.requests.local_prefills import LocalPrefills
from decode_node.requests.logprob_limit import LogprobLimit
from decode_node.spans import RequestSpans
from decode_node.tokenizing import turns
from slo.request import JOB_XARG, JobId, Party, ReplicaId, RequestContext
from slo.tiers import STANDARD
from telemetry.reporting.background import Background

TEXT = CompletionRequest(model="m", prompt="hello")
SEVERAL = CompletionRequest(model="m", prompt="hello", n=3)
PICTURE = ChatCompletionRequest(
    model="m",
    messages=[
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}}]}
    ],
)

SCHEMA = StructuredOutputsParams(json={"type": "string"})
LOGPROBS = LogprobLimit(100, vocabulary=200, max_model_len=64)
CONTEXT = RequestContext(JobId("job"), "request", STANDARD, None, tenant="a")
INFO = SimpleNamespace(headers={})


class Replica:
    """The layer, orchestrator, router and metrics of one replica, and what each has been asked."""

    def __init__(self, rendered, local=None, wait_s=60.0, *, is_alone=False, grammar=None, verdict=None):
        self.rendering, self.order, self.told, self.counted = rendered, [], [], []
        self.local = local or LocalPrefills(1, 4)
        router = SimpleNamespace(
            not_for_prefill=SimpleNamespace(remote=self.not_for_prefill),
            held_up=SimpleNamespace(remote=self.held_up),
        )
        self.ran, self.rendered_for = [], []
        self.grammar, self.verdict = grammar, verdict
        self.answering = Answering(
            self, self, self.local, self, router, Background(), self, 64, wait_s, LOGPROBS, lambda: is_alone
        )

    async def grammar_of(self, request, *, max_model_len):
        self.rendered_for.append(turns._FOR.get())
        return self.grammar

    async def check(self, grammar, tenant, allowed):
        self.order.append(("checked", self.local.computing))
        assert (grammar, tenant, allowed) == (self.grammar, "a", None)
        assert self.local.outstanding.total() == 1
        if self.verdict is not None:
            raise self.verdict

    def failed(self, message):
        return error_response(500, "engine_error", message)

    async def rendered(self, request, *, is_chat, max_model_len):
        self.order.append(("rendered", self.local.computing))
        self.rendered_for.append(turns._FOR.get())
        return self.rendering

    async def run(self, call, context):
        self.order.append(("elsewhere", self.local.outstanding.total()))
        self.ran.append(context)
        yield "answer"

    async def run_here(self, call, context, here, bound):
        self.order.append(("here", here.claim.remaining))
        self.ran.append(context)
        yield bound

    async def not_for_prefill(self, job_id):
        self.told.append(job_id)

    async def held_up(self, job_id):
        self.told.append(("held up", job_id))

    def count(self, metric, *, reason):
        self.counted.append(reason)

    async def answer(self, request, **context):
        context = {"tenant": "a", "prefill_replica": None, **context}
        made = RequestContext(JobId("job"), "request", STANDARD, 2.0, **context)
        arrived = Arrived(request, INFO, made, 0.0, is_chat=hasattr(request, "messages"))
        pieces = [piece async for piece in self.answering.answer(arrived)]
        await asyncio.sleep(0.01)
        assert (self.local.computing, self.local.outstanding) == (0, {})
        return pieces


@pytest.mark.parametrize(("request_", "times"), [(TEXT, 1), (PICTURE, 2)], ids=["text", "picture"])
async def test_what_is_rendered_has_the_turns_of_its_request(request_, times):
    replica = Replica(Rendered([1, 2, 3]))
    await replica.answer(request_)
    assert [context.party for context in replica.rendered_for] == [Party("a", STANDARD)] * times
    assert turns._FOR.get() is None


def only_here(reason, prompts=1):
    return Rendered([], reason, None, None, prompts, 7)


async def test_what_prefill_can_take_goes_there():
    replica = Replica(Rendered([1, 2, 3]))
    assert await replica.answer(TEXT) == ["answer"]
    assert replica.order == [("rendered", 0), ("elsewhere", 0)]
    assert (replica.told, replica.counted) == ([], [])


@pytest.mark.parametrize(
    ("request_", "rendered"),
    [
        (TEXT, Rendered([1, 2, 3])),
        (SEVERAL, only_here(LocalReason.SEVERAL_SEQUENCES, 3)),
        (PICTURE, only_here(LocalReason.NOT_TEXT)),
    ],
    ids=["text", "several", "picture"],
)
async def test_what_has_passed_since_a_request_came_is_taken_off_its_budget(request_, rendered):
    replica = Replica(rendered)
    context = replace(CONTEXT, ttft_budget_s=50.0)
    arrived = Arrived(request_, INFO, context, time.monotonic() - 30.0, is_chat=request_ is PICTURE)
    assert [piece async for piece in replica.answering.answer(arrived)]
    assert replica.ran[0].ttft_budget_s == pytest.approx(20.0, abs=5.0)


@pytest.mark.parametrize(
    "rendered", [Rendered(list(range(7)), input_tokens=7), only_here(LocalReason.NOT_TEXT)]
)
async def test_a_trace_says_how_many_tokens_it_was_given(rendered, monkeypatch):
    noted = {}
    monkeypatch.setattr(RequestSpans, "note", lambda _, attributes: noted.update(attributes))
    assert await Replica(rendered).answer(TEXT)
    assert noted == {"gen_ai.usage.input_tokens": 7}


@pytest.mark.parametrize("placed", [None, ReplicaId("prefill")])
async def test_what_it_cannot_take_stays_and_a_router_that_did_not_know_hears_of_it(placed):
    replica = Replica(only_here(LocalReason.SEVERAL_SEQUENCES, 3))
    assert await replica.answer(SEVERAL, prefill_replica=placed) == ["several_sequences"]
    assert replica.order == [("rendered", 0), ("here", 3)]
    assert replica.told == ([] if placed is None else ["job"])
    assert replica.counted == ["several_sequences"]


async def test_what_has_media_waits_for_its_turn_before_it_is_rendered():
    replica = Replica(only_here(LocalReason.NOT_TEXT))
    assert await replica.answer(PICTURE) == ["not_text"]
    assert replica.order == [("rendered", 1), ("here", 1)]
    replica = Replica(Rendered([1, 2, 3]))  # it was text after all
    assert await replica.answer(PICTURE) == ["answer"]
    assert replica.order == [("rendered", 1), ("elsewhere", 0)]
    replica = Replica(only_here(LocalReason.NOT_TEXT))
    search = PICTURE.model_copy(update={"use_beam_search": True, "n": 3})
    assert await replica.answer(search) == ["not_text"]
    assert replica.order == [("rendered", 1), ("here", 1)], "it has one prompt for all of its beams"
    replica = Replica(error_response(400, "BadRequestError", "no picture"))
    (refused,) = await replica.answer(PICTURE)
    assert refused.error.code == 400


@pytest.mark.parametrize("verdict", [None, VLLMValidationError("it does not compile")])
async def test_nobody_has_a_turn_while_its_grammar_is_checked(verdict):
    replica = Replica(only_here(LocalReason.NOT_TEXT), grammar=SCHEMA, verdict=verdict)
    assert await replica.answer(PICTURE) == ["not_text"], "what does not compile, vLLM refuses as it runs"
    assert replica.order == [("checked", 0), ("rendered", 1), ("here", 1)]


@pytest.mark.parametrize(
    ("verdict", "answer"),
    [
        (TooManyGrammarsError(), (429, "grammars")),
        (GrammarNotCheckedError("its child has died"), (500, "engine_error")),
        (RuntimeError("its child does not start"), (500, "engine_error")),
    ],
    ids=["too many", "not checked", "no child"],
)
async def test_what_has_media_and_a_grammar_without_a_verdict_has_no_turn(verdict, answer):
    replica = Replica(only_here(LocalReason.NOT_TEXT), grammar=SCHEMA, verdict=verdict)
    (refused,) = await replica.answer(PICTURE)
    assert (refused.error.code, refused.error.type, refused.error.message) == (*answer, str(verdict))
    assert replica.order == [("checked", 0)]


@pytest.mark.parametrize("request_", [SEVERAL, PICTURE], ids=["several", "picture"])
async def test_one_too_many_is_refused_unless_it_goes_on_after_a_loss(request_):
    local = LocalPrefills(1, 4)
    replica = Replica(only_here(LocalReason.SEVERAL_SEQUENCES, 3), local)
    async with local.claimed(CONTEXT.party, 4):
        arrived = Arrived(request_, INFO, CONTEXT, 0.0, is_chat=request_ is PICTURE)
        (refused,) = [piece async for piece in replica.answering.answer(arrived)]
    assert (refused.error.code, refused.error.type) == (429, "backlog")
    assert not [step for step, _ in replica.order if step == "here"]
    assert await replica.answer(request_, attempt=100) == ["several_sequences"]


@pytest.mark.parametrize("request_", [TEXT, SEVERAL, PICTURE], ids=["text", "several", "picture"])
async def test_one_that_asks_for_too_many_log_probabilities_goes_no_way(request_):
    asked = request_.model_copy(update={"prompt_logprobs": 20})
    replica = Replica(only_here(LocalReason.PROMPT_LOGPROBS))
    (refused,) = await replica.answer(asked)
    assert (refused.error.code, refused.error.param) == (400, "prompt_logprobs")
    assert [step for step, _ in replica.order] == ["rendered"]
    assert (replica.told, replica.counted) == ([], [])


async def test_a_picture_whose_turn_does_not_come_is_refused():
    local = LocalPrefills(1, 4)
    replica = Replica(only_here(LocalReason.NOT_TEXT), local, wait_s=0.01)
    async with local.claimed(CONTEXT.party) as claim, local.turn(claim, 1):
        arrived = Arrived(PICTURE, INFO, CONTEXT, 0.0, is_chat=True)
        (refused,) = [piece async for piece in replica.answering.answer(arrived)]
    assert refused.error.type == "backlog"
    assert replica.order == []


@pytest.mark.parametrize("placed", [None, ReplicaId("prefill")])
async def test_while_no_kv_can_be_pulled_it_computes_prompts_itself_and_the_router_hears_of_it(placed):
    replica = Replica(Rendered([1, 2, 3]), is_alone=True)
    assert await replica.answer(TEXT, prefill_replica=placed) == ["answer"]
    (context,) = replica.ran
    assert (context.local_prefill, context.prefill_replica) == (LocalReason.NOTHING_PULLED, None)
    assert replica.told == ([] if placed is None else ["job"])
    assert replica.counted == [], "counted when it has its turn"


async def test_what_it_computes_anyway_is_not_put_down_to_pulls():
    replica = Replica(Rendered([1, 2, 3]), is_alone=True)
    await replica.answer(TEXT, local_prefill=LocalReason.CHEAPER_ON_DECODE.value)
    assert replica.ran[0].local_prefill == LocalReason.CHEAPER_ON_DECODE


async def test_while_no_kv_can_be_pulled_one_prompt_too_many_is_refused_unless_it_goes_on_after_a_loss():
    local = LocalPrefills(1, 4)
    replica = Replica(Rendered([1, 2, 3]), local, is_alone=True)
    async with local.claimed(CONTEXT.party, 4):
        arrived = Arrived(TEXT, INFO, CONTEXT, 0.0, is_chat=False)
        (refused,) = [piece async for piece in replica.answering.answer(arrived)]
        assert (refused.error.code, refused.error.type) == (429, "backlog")
        goes_on = Arrived(TEXT, INFO, replace(CONTEXT, attempt=100), 0.0, is_chat=False)
        assert [piece async for piece in replica.answering.answer(goes_on)] == ["answer"]


async def test_the_router_hears_who_waits_for_the_check_of_a_grammar():
    replica = Replica(Rendered([1, 2, 3]))
    replica.answering.awaits_verdict(SamplingParams(extra_args={JOB_XARG: "job"}))
    replica.answering.awaits_verdict(SamplingParams())
    await asyncio.sleep(0.01)
    assert replica.told == [("held up", "job")], "it has placed no other"
