"""What only decode can compute has its turn for each prompt and answer, and is answered as by vLLM itself."""

import asyncio
from contextlib import aclosing
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from waiting import until

from decode_node.requests.local_prefills import LocalPrefills, TooManyPromptsError
from decode_node.requests.only_here import admitted, too_many
from decode_node.requests.underway import Call, RefusedError, Underway
from decode_node.spans import RequestSpans
from slo.request import SEARCH_STEP_XARG, JobId, Party, RequestContext
from slo.tiers import STANDARD

PROMPT = {"type": "token", "prompt_token_ids": list(range(100))}
WHO = Party("a", STANDARD)
CONTEXT = RequestContext(JobId("job"), "request", STANDARD, None, tenant="a")
TOKENS = [11, 12, 13]
WHOLE, DELTA = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA


class Engine:
    """Computes each prompt when it may, and then generates `TOKENS`."""

    def __init__(self):
        self.computes, self.given, self.most = [], [], 0
        self.may = asyncio.Event()
        self.aborted = []

    async def generate(self, params, name):
        self.computes.append(name)
        self.given.append(params)
        self.most = max(self.most, len(self.computes))
        try:
            await self.may.wait()
            self.computes.remove(name)
            for number in range(len(TOKENS)):
                whole = TOKENS[: number + 1]
                tokens = whole[-1:] if params.output_kind is DELTA else whole
                ended = number == len(TOKENS) - 1
                if params.output_kind is not WHOLE or ended:
                    yield output(name, tokens, "length" if ended else None)
                await asyncio.sleep(0)
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(name)
            raise


def output(name, tokens, reason):
    completion = CompletionOutput(0, f"{tokens}", tokens, None, None, finish_reason=reason)
    return RequestOutput(
        name, None, PROMPT["prompt_token_ids"], None, [completion], finished=reason is not None
    )


def under_way():
    return Underway(Call(None, None, is_chat=False, token_ids=[], spans=RequestSpans("")), CONTEXT)


def params(n=1, kind=WHOLE, **given):
    return SamplingParams(n=n, output_kind=kind, max_tokens=3, **given)


async def answer(local, engine, asked, prompts=None, wait_s=60.0, run=None):
    async with admitted(local, CONTEXT, prompts or asked.n, wait_s) as here:
        here.run = run or under_way()
        async with aclosing(here.generate(PROMPT, asked, "name", engine.generate)) as outputs:
            return [each async for each in outputs]


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("kind", [WHOLE, DELTA])
async def test_no_more_prompts_are_computed_at_once_than_may_be(n, kind):
    local, engine = LocalPrefills(2), Engine()
    task = asyncio.create_task(answer(local, engine, params(n, kind)))
    await until(lambda: len(engine.computes) == min(n, 2))
    await asyncio.sleep(0.01)
    assert (engine.most, local.computing, local.outstanding[WHO]) == (min(n, 2), min(n, 2), n)
    engine.may.set()
    await task
    assert (engine.most, local.computing, local.outstanding) == (min(n, 2), 0, {})
    assert [given.n for given in engine.given] == [1] * n


async def test_an_answer_that_does_not_stream_keeps_its_turn_for_its_prompt_alone():
    local, engine = LocalPrefills(1), Engine()
    engine.may.set()
    async with admitted(local, CONTEXT, 1, 60.0) as here:
        here.run = under_way()
        outputs = here.generate(PROMPT, params(), "name", engine.generate)
        waiting = asyncio.create_task(anext(outputs))
        await until(lambda: here.run.call.amount.tokens)
        assert (local.computing, local.outstanding, here.run.has_kv) == (0, {}, True)
        assert (await waiting).outputs[0].token_ids == TOKENS
        await outputs.aclose()


async def test_several_answers_come_as_one_with_their_numbers_and_seeds():
    engine = Engine()
    engine.may.set()
    (whole,) = await answer(LocalPrefills(2), engine, params(3, seed=7))
    assert (whole.request_id, whole.finished) == ("name", True)
    assert [(each.index, each.token_ids) for each in whole.outputs] == [(n, TOKENS) for n in range(3)]
    assert sorted(given.seed for given in engine.given) == [7, 8, 9], "as in vLLM"
    engine.given.clear()
    await answer(LocalPrefills(2), engine, params(2, seed=2**63 - 1))
    assert {given.seed for given in engine.given} == {2**63 - 1, -(2**63)}, (
        "64 bits, as an engine has room for"
    )
    streamed = await answer(LocalPrefills(2), engine, params(3, DELTA))
    assert {each.request_id for each in streamed} == {"name"}
    assert [each.finished for each in streamed] == [False] * 8 + [True]
    for number in range(3):
        of_one = [one for each in streamed for one in each.outputs if one.index == number]
        assert [token for one in of_one for token in one.token_ids] == TOKENS


@pytest.mark.parametrize("kind", [WHOLE, DELTA])
async def test_what_was_generated_is_counted_whoever_leaves(kind):
    local, engine, run = LocalPrefills(4), Engine(), under_way()
    task = asyncio.create_task(answer(local, engine, params(4, kind), run=run))
    await until(lambda: len(engine.computes) == 4)
    engine.may.set()
    await until(lambda: run.call.amount.tokens >= 4)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: local.computing == 0)
    assert 4 <= run.call.amount.tokens <= 12
    run = under_way()
    assert await answer(local, engine, params(4, kind), run=run)
    assert run.call.amount.tokens == 12


async def test_who_leaves_leaves_nothing_in_the_engine_and_no_turn():
    local, engine = LocalPrefills(2), Engine()
    task = asyncio.create_task(answer(local, engine, params(4)))
    await until(lambda: len(engine.computes) == 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: len(engine.aborted) == 2)
    assert (local.computing, local.outstanding) == (0, {})


async def test_who_waits_too_long_is_refused_and_told_when_to_come_again():
    local, engine, run = LocalPrefills(1), Engine(), under_way()
    async with local.claimed(WHO) as claim, local.turn(claim, 1):
        with pytest.raises(RefusedError):
            await answer(local, engine, params(3), wait_s=0.02, run=run)
    assert (run.refusal.error.code, run.refusal.error.type) == (429, "backlog")
    assert int(run.refusal.error.param) >= 1
    assert engine.given == []
    assert (local.computing, local.outstanding) == (0, {})


async def test_of_a_beam_search_the_first_step_has_a_turn():
    local, engine, run = LocalPrefills(1), Engine(), under_way()
    step = SamplingParams(max_tokens=1)
    async with admitted(local, CONTEXT, 1, 60.0) as here:
        here.run = run
        first = asyncio.create_task(anext(here.in_a_search(PROMPT, step, "1", engine.generate)))
        await until(lambda: engine.computes)
        assert (local.computing, run.has_kv) == (1, False)
        engine.may.set()
        await first
        assert run.has_kv
        assert (local.computing, local.outstanding) == (0, {})
        async with local.claimed(WHO) as claim, local.turn(claim, 1):  # of another one
            beams = [here.in_a_search(PROMPT, step, f"2-{beam}", engine.generate) for beam in range(2)]
            assert [len([each async for each in beam]) for beam in beams] == [3, 3]
    assert run.call.amount.tokens == 1 + 2 * 3


async def test_all_but_the_first_step_of_a_beam_search_are_later_ones_however_many_beams_it_has():
    local, engine, run = LocalPrefills(1), Engine(), under_way()
    engine.may.set()
    step = SamplingParams(max_tokens=1)
    async with admitted(local, CONTEXT, 1, 60.0) as here:
        here.run = run
        await here.begin()  # as what has media does
        for beams in (1, 3, 3):
            steps = [here.in_a_search(PROMPT, step, f"{beam}", engine.generate) for beam in range(beams)]
            await asyncio.gather(*[anext(each) for each in steps])
    assert [given.extra_args[SEARCH_STEP_XARG] for given in engine.given] == [False, *[True] * 6]


async def test_what_has_media_has_its_turn_before_it_is_rendered():
    """The engine is given images in the order of their rendering: only the first time has one its data."""
    local, engine = LocalPrefills(1), Engine()
    engine.may.set()
    order = []

    async def one(name):
        async with admitted(local, CONTEXT, 2, 60.0) as here:
            await here.begin()
            order.append(f"{name} rendered")
            here.run = under_way()
            outputs = here.generate(PROMPT, params(2), "name", engine.generate)
            assert len([each async for each in outputs]) == 1
            order.append(f"{name} answered")

    async with local.claimed(WHO) as claim, local.turn(claim, 1):
        tasks = [asyncio.create_task(one(name)) for name in "ab"]
        await asyncio.sleep(0.01)
        assert order == []
    await asyncio.gather(*tasks)
    assert order[:2] == ["a rendered", "b rendered"] or order[:2] == ["a rendered", "a answered"]
    async with admitted(local, CONTEXT, 1, 60.0) as here:
        assert local.computing == 0
        await here.begin()
        assert local.computing == 1
    assert (local.computing, local.outstanding) == (0, {})


def test_nobody_is_told_to_come_later_than_in_a_minute():
    refused = too_many(TooManyPromptsError(1e6))
    assert refused.error.param == "60"
    assert SimpleNamespace(**refused.error.model_dump()).code == 429


@pytest.mark.parametrize(("n", "prompts", "told"), [(1, 1, TOKENS), (1, 2, []), (2, 2, [])])
async def test_the_events_of_an_only_answer_say_its_tokens(n, prompts, told):
    """The ingress counts them; those of several answers would not be told apart."""
    engine, run = Engine(), under_way()
    engine.may.set()
    await answer(LocalPrefills(2), engine, params(n, DELTA), prompts, run=run)
    assert run.progress.piece('data: {"choices":[{"index":0,"text":"a"}]}').token_ids == told
