"""Streams that lose their memory on decode go on from KV that prefill has computed; nobody notices."""

import asyncio

import pytest
from engines import whole_prompt
from two_tiers import answer, two_tiers_in
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from waiting import until

from decode_node.engine.setup import DecodeSetup
from decode_node.requests.leaving import LEFT
from decode_node.requests.underway import RefusedError

pytestmark = pytest.mark.long

BLOCKS = 60
"""Of 32 tokens: room for five of these answers at their ends."""
DELTA, WHOLE = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.0, "presence_penalty": 1.0, "repetition_penalty": 1.2},
]


@pytest.fixture(scope="module")
def engines(models, loop):
    sizes = {"max_model_len": 1024, "max_num_batched_tokens": 256, "block_size": 32}
    drops_soon = DecodeSetup(drop_after_s=0.05).encode()  # of those that may be dropped
    short_of_memory = {"num_gpu_blocks_override": BLOCKS + 1, "additional_config": drops_soon}
    with two_tiers_in(loop, models("llama"), pressed=short_of_memory, **sizes) as both:
        yield both


def short():
    return SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, output_kind=WHOLE)


def params(number, **more):
    given = {**SAMPLING[number % len(SAMPLING)], **more}
    kind = DELTA if number % 3 else WHOLE
    return SamplingParams(max_tokens=250, ignore_eos=True, output_kind=kind, **given)


async def short_ones_first(tiers):
    """From a tenant of whom nothing else is known: long ones are not expected, and too many are admitted."""
    tiers.tenant = f"tenant-{len(tiers.asked)}"
    for number in range(4):
        early = [(whole_prompt(20, seed=100 * number + one), short()) for one in range(8)]
        await asyncio.gather(*[answer(tiers.generate(prompt, how), how) for prompt, how in early])


async def all_at_once(tiers, asked):
    """Their answers, and how many prefills there were more than requests."""
    await short_ones_first(tiers)
    before = len(tiers.asked)
    answers = await asyncio.gather(*[answer(tiers.generate(prompt, how), how) for prompt, how in asked])
    return answers, len(tiers.asked) - before - len(asked)


def test_answers_are_those_of_an_engine_with_enough_memory(engines, loop):
    tiers, alone = engines
    asked = [(whole_prompt(90 + 5 * number, seed=number), params(number)) for number in range(12)]
    answers, left = loop.run(all_at_once(tiers, asked))
    assert left > 0, "nobody has left"
    prompts = [prompt for prompt, _ in asked]
    again = [one.token_ids for one in tiers.asked[-left - len(asked) :] if one.token_ids not in prompts]
    assert len(again) == left
    assert all(any(one[: len(prompt)] == prompt for prompt in prompts) for one in again), "with the answer"
    for number, ((prompt, how), actual) in enumerate(zip(asked, answers, strict=True)):
        tokens = {"type": "token", "prompt_token_ids": prompt}
        expected = loop.run(answer(alone.generate(tokens, how, f"alone-{number}"), how))
        assert actual[:4] == expected[:4], f"request {number}"
        if how.logprobs:
            check_logprobs(actual[4], expected[4])
    assert not tiers.released, "all that was prefilled was pulled"


def check_logprobs(actual, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys()
        for token, found in one.items():
            assert found.logprob == pytest.approx(other[token].logprob, abs=1e-4)
            assert found.rank == other[token].rank


def test_what_cannot_be_carried_stays(engines, loop):
    tiers, _ = engines
    asked = [(whole_prompt(100, seed=number), params(number, stop=["\x00 never"])) for number in range(10)]
    answers, left = loop.run(all_at_once(tiers, asked))
    assert left == 0
    assert [len(tokens) for tokens, *_ in answers] == [250] * 10


def test_one_that_is_dropped_ends_with_an_error_and_the_others_are_answered(engines, loop):
    tiers, _ = engines
    asked = [(whole_prompt(100, seed=number), params(number, stop=["\x00 never"])) for number in range(10)]

    async def half_of_them_may_be():
        await short_ones_first(tiers)
        streams = [
            answer(tiers.generate(prompt, how, may_drop=number < 5), how)
            for number, (prompt, how) in enumerate(asked)
        ]
        return await asyncio.gather(*streams, return_exceptions=True)

    for _ in range(3):  # when they come one after the other, those that lose their memory may be the others
        ended = loop.run(half_of_them_may_be())
        if dropped := [one for one in ended[:5] if isinstance(one, RefusedError)]:
            break
    assert dropped, "nobody was"
    assert all("promised nothing" in str(one) for one in dropped)
    assert [len(tokens) for tokens, *_ in (one for one in ended if one not in dropped)] == [250] * (
        10 - len(dropped)
    )
    after = [(whole_prompt(300, seed=number), short()) for number in range(5)]
    answers, _ = loop.run(all_at_once(tiers, after))
    assert [len(tokens) for tokens, *_ in answers] == [4] * 5, "there is memory again"


def test_a_client_that_leaves_meanwhile_leaves_nothing_behind(engines, loop):
    tiers, _ = engines

    async def leaves_with_it():
        waiting = asyncio.Event()

        async def wait():
            waiting.set()
            await asyncio.sleep(0.2)

        asked = [(whole_prompt(100, seed=number), params(3 * number + 1)) for number in range(10)]
        await short_ones_first(tiers)
        before = len(tiers.asked)
        streams = [asyncio.create_task(answer(tiers.generate(prompt, how), how)) for prompt, how in asked]
        await until(lambda: len(tiers.asked) == before + len(asked), within_s=60)
        tiers.before_pull = wait  # of the first that has left
        await asyncio.wait_for(waiting.wait(), 60)
        for stream in streams:
            stream.cancel()
        return await asyncio.gather(*streams, return_exceptions=True)

    ended = loop.run(leaves_with_it())
    assert all(isinstance(one, asyncio.CancelledError | tuple) for one in ended), ended
    after = [(whole_prompt(300, seed=number), short()) for number in range(5)]
    answers, _ = loop.run(all_at_once(tiers, after))
    assert [len(tokens) for tokens, *_ in answers] == [4] * 5
    assert all(stop_reason != LEFT for *_, stop_reason, _ in answers)


def test_one_whose_new_kv_cannot_be_pulled_is_prefilled_once_more(engines, loop):
    tiers, alone = engines
    asked = [(whole_prompt(100 + number, seed=40 + number), params(4 * number)) for number in range(10)]
    no_router = tiers.replace.remote

    async def the_next_address_is_wrong(request):
        tiers.replace.remote, tiers.failing = no_router, 1
        await no_router(request)

    tiers.replace.remote = the_next_address_is_wrong
    counted = len(tiers.counted)
    answers, again = loop.run(all_at_once(tiers, asked))
    causes = [labels["cause"] for labels in tiers.counted[counted:]]
    assert causes.count("pull_failed") == 1
    assert causes.count("left") == again - 1 > 0
    for number, ((prompt, how), actual) in enumerate(zip(asked, answers, strict=True)):
        tokens = {"type": "token", "prompt_token_ids": prompt}
        expected = loop.run(answer(alone.generate(tokens, how, f"wrong-{number}"), how))
        assert actual[:4] == expected[:4], f"request {number}"
