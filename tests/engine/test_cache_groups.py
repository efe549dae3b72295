"""Layers with a window beside others: two engines answer what one does, also after pulls that fail."""

import asyncio
import time

import pytest
from engines import random_prompt
from two_tiers import answer, two_tiers_in
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from sampling.carried import Carried

pytestmark = [pytest.mark.slow, pytest.mark.long]

BLOCK, WINDOW, CHUNK = 32, 128, 256
OPTIONS = {
    "max_model_len": 1024,
    "max_num_batched_tokens": CHUNK,
    "block_size": BLOCK,
    "worker_extension_cls": "failing_pulls.FailingPulls",
}
LENGTHS = sorted(
    {1, 2, 900}
    | {at + off for at in (BLOCK, WINDOW, WINDOW + BLOCK, 2 * CHUNK, 700) for off in (-2, -1, 0, 1, 2)}
)
"""Around the ends of blocks, of the window and of chunks, shorter than the window and many times as long."""
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=2)
"""So long that the window leaves a block behind meanwhile."""
AGAIN = SamplingParams(
    max_tokens=40,
    temperature=0.0,
    ignore_eos=True,
    logprobs=2,
    structured_outputs=StructuredOutputsParams(regex="[a-z]{60}"),
)
"""Its first token is sampled by decode, which computes the prompt's last one again for it."""
CLOSE = 1e-3
HANDSHAKES_S = 90
"""With replicas that do not answer: five seconds each, one after the other, and on a busy machine."""


ENGINES = {
    "one step at a time": {},
    "a step ahead": {"ahead": True},
    "two ranks of prefill": {"prefill_ranks": 2},
}


@pytest.fixture(scope="module", params=ENGINES)
def engines(models, loop, request):
    with two_tiers_in(loop, models("gemma3_text"), **ENGINES[request.param], **OPTIONS) as both_tiers:
        yield both_tiers


@pytest.fixture(autouse=True)
def nothing_stays_behind(engines, loop):
    """Blocks of both groups are free again, on both sides; and no test finds the prompts of another."""
    yield
    tiers, alone = engines

    async def at_rest():
        deadline = time.monotonic() + HANDSHAKES_S
        while time.monotonic() < deadline:
            both = tiers.prefill_engine, tiers.engine
            if all([await engine.reset_prefix_cache() for engine in (*both, alone)]):
                return
            await answer(tiers.generate([1], GREEDY), GREEDY)
        raise AssertionError("KV blocks are held")

    loop.run(at_rest())
    tiers.counted.clear()


def alone_on(alone, loop, prompt, params):
    tokens = {"type": "token", "prompt_token_ids": prompt}
    name = f"alone-{hash((*prompt, id(params)))}"
    return loop.run(answer(alone.generate(tokens, params.clone(), name), params))


def check_same(actual, expected, what, of_the_rest=0):
    """Also the log-probabilities: what was not read of a window shows there, whichever token is the best.

    Which token is second is not compared: two that are as likely change places with how a sum is ordered.
    """
    assert actual[0] == expected[0], what
    for mine, theirs in zip(actual[4][of_the_rest:], expected[4][of_the_rest:], strict=True):
        both = zip(*(sorted(one.logprob for one in each.values()) for each in (mine, theirs)), strict=True)
        assert all(abs(one - other) < CLOSE for one, other in both), what


def failures(tiers):
    """Pulls that have failed; with a grammar it could be that, too, to decode."""
    return sum("cause" in labels for labels in tiers.counted)


@pytest.mark.parametrize("params", [GREEDY, AGAIN], ids=["prefill samples", "decode samples"])
def test_prompts_of_any_length(engines, loop, params):
    tiers, alone = engines
    for length in LENGTHS:
        prompt = random_prompt(length, seed=length)
        expected = alone_on(alone, loop, prompt, params)
        check_same(loop.run(answer(tiers.generate(prompt, params), params)), expected, length)
    assert not failures(tiers)


@pytest.mark.parametrize("params", [GREEDY, AGAIN], ids=["prefill samples", "decode samples"])
def test_prompts_of_which_decode_has_a_part(engines, loop, params):
    tiers, alone = engines
    whole = random_prompt(900, seed=1)
    loop.run(answer(tiers.generate(whole, params), params))
    lengths = BLOCK - 1, BLOCK, WINDOW, WINDOW + 1, 5 * BLOCK, 700, 800, 896, 899, 900
    for number, shared in enumerate(lengths):
        prompt = whole[:shared] + random_prompt(number * 13 % 60, seed=shared)
        expected = alone_on(alone, loop, prompt, params)
        check_same(loop.run(answer(tiers.generate(prompt, params), params)), expected, shared)


@pytest.mark.parametrize("failing", [0, 5])
def test_many_at_once(engines, loop, failing):
    tiers, alone = engines
    prompts = [random_prompt(length, seed=length + 1) for length in LENGTHS]
    asked = [(prompt, params) for prompt in prompts for params in (GREEDY, AGAIN)]
    tiers.failing = failing

    async def all_at_once():
        return await asyncio.gather(*[answer(tiers.generate(*one), one[1]) for one in asked])

    answers = loop.run(all_at_once())
    assert failures(tiers) == failing
    for (prompt, params), actual in zip(asked, answers, strict=True):
        check_same(actual, alone_on(alone, loop, prompt, params), len(prompt))


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("params", [GREEDY, AGAIN], ids=["prefill samples", "decode samples"])
def test_a_failed_pull_is_no_answer(engines, loop, params, times):
    tiers, alone = engines
    for length in (20, WINDOW, WINDOW + BLOCK + 3, 700):
        prompt = random_prompt(length, seed=length + times)
        tiers.failing, before = times, failures(tiers)
        check_same(
            loop.run(answer(tiers.generate(prompt, params), params)),
            alone_on(alone, loop, prompt, params),
            length,
        )
        assert failures(tiers) - before == times


@pytest.mark.parametrize("engines", ["one step at a time"], indirect=True)
@pytest.mark.parametrize("group", [0, 1])
def test_a_failed_block_of_either_group_is_no_answer(engines, loop, group):
    """One block is as good as all: the others are not used either."""
    tiers, alone = engines
    for length in (20, WINDOW, WINDOW + BLOCK + 3, 700):
        prompt = random_prompt(length, seed=length + 10 * group)
        other = random_prompt(300, seed=length + 500)
        loop.run(tiers.engine.collective_rpc("fail_pull", args=(group,)))

        async def both(prompt=prompt, other=other):
            first = asyncio.create_task(answer(tiers.generate(prompt, GREEDY), GREEDY))
            return await first, await answer(tiers.generate(other, GREEDY), GREEDY)

        before, answers = failures(tiers), loop.run(both())
        assert failures(tiers) - before == 1
        for actual, asked in zip(answers, (prompt, other), strict=True):
            check_same(actual, alone_on(alone, loop, asked, GREEDY), length)


def test_an_answer_goes_on_after_any_of_its_tokens(engines, loop):
    tiers, alone = engines
    for length in (BLOCK - 3, WINDOW - 20, 500):
        prompt = random_prompt(length, seed=length + 2)
        expected = alone_on(alone, loop, prompt, GREEDY)
        for known in (1, 2, 3, 4, 19, 20, 21, 39):
            outputs = tiers.generate(prompt, GREEDY, Carried(expected[0][:known]))
            check_same(loop.run(answer(outputs, GREEDY)), expected, (length, known), known)
