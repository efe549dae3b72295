"""An answer whose first token comes from prefill is the one that a single, undisturbed engine gives."""

import asyncio
import random
from collections import Counter

import pytest
from engines import whole_prompt
from two_tiers import answer, two_tiers_in
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from sampling.carried import Carried

pytestmark = pytest.mark.long

REQUESTS = 200
EOS = 257


@pytest.fixture(scope="module", params=[False, True], ids=["one step at a time", "a step ahead"])
def engines(models, loop, request):
    sizes = {"max_model_len": 1024, "max_num_batched_tokens": 256}
    with two_tiers_in(loop, models("llama"), ahead=request.param, **sizes) as both_tiers:
        yield both_tiers
        if request.param:
            (events,) = loop.run(both_tiers[0].engine.collective_rpc("recorded"))
            assert events > 1000, "no step was composed ahead"


def random_params(rng):
    """Any sampling that two engines can agree on: greedy, or with a seed."""
    given = {"max_tokens": rng.choice([1, 2, 3, 8, 20]), "seed": rng.randrange(1000)}
    given["temperature"] = rng.choice([0.0, rng.uniform(0.5, 2.0)])
    sometimes = [
        {"ignore_eos": True},
        {"logprobs": rng.choice([0, 1, 3, 5])},
        {"top_p": rng.uniform(0.5, 1.0), "top_k": rng.choice([0, 5, 40])},
        {"min_p": 0.02},
        {"presence_penalty": rng.uniform(-1, 1), "frequency_penalty": rng.uniform(-1, 1)},
        {"repetition_penalty": rng.uniform(0.8, 1.5)},
        {
            "stop": [chr(rng.randrange(33, 127)) for _ in range(rng.choice([1, 20, 60]))],
            "include_stop_str_in_output": rng.random() < 0.5,
        },
        {"stop_token_ids": rng.sample(range(250), rng.choice([1, 20, 120]))},
        {"min_tokens": rng.randint(0, given["max_tokens"])},
        {"logit_bias": {EOS: rng.choice([2.0, 10.0]), rng.randrange(250): rng.choice([-5.0, 3.0])}},
        {"allowed_token_ids": [*rng.sample(range(250), 30), EOS]},
        {"bad_words": ["a", "the"]},
    ]
    for some in sometimes:
        if rng.random() < 0.3:
            given |= some
    kind = rng.choice([RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE])
    return SamplingParams(**given, output_kind=kind)


async def both(tiers, alone, prompt, params, name):
    tokens = {"type": "token", "prompt_token_ids": prompt}
    expected = await answer(alone.generate(tokens, params.clone(), name), params)
    return await answer(tiers.generate(prompt, params), params), expected


def test_any_sampling_gives_what_one_engine_gives(engines, loop):
    tiers, alone = engines
    rng = random.Random(19)
    ends = Counter()
    for number in range(REQUESTS):
        prompt, params = (
            whole_prompt(rng.choice([1, 5, 60, 127, 128, 129, 400, 700]), seed=number),
            random_params(rng),
        )
        actual, expected = loop.run(both(tiers, alone, prompt, params, f"alone-{number}"))
        assert actual == expected, f"request {number}: {params}"
        ends[actual[2], len(actual[0]) == 1] += 1
    assert not tiers.counted, "none is sampled again"
    assert min(ends[reason, is_first] for reason in ("stop", "length") for is_first in (True, False)) >= 10, (
        ends
    )


def test_many_at_once(engines, loop):
    tiers, alone = engines
    rng = random.Random(7)
    asked = [
        (whole_prompt(rng.choice([5, 128, 500]), seed=number), random_params(rng)) for number in range(32)
    ]

    async def all_at_once():
        return await asyncio.gather(
            *[answer(tiers.generate(prompt, params), params) for prompt, params in asked]
        )

    answers = loop.run(all_at_once())
    for number, ((prompt, params), actual) in enumerate(zip(asked, answers, strict=True)):
        tokens = {"type": "token", "prompt_token_ids": prompt}
        expected = loop.run(answer(alone.generate(tokens, params, f"at-once-{number}"), params))
        assert actual[:4] == expected[:4], params


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
@pytest.mark.parametrize("failures", [1, 2])
def test_a_failed_pull_repeats_nothing(engines, loop, kind, failures):
    tiers, alone = engines
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=2, output_kind=kind
    )
    tiers.failing, before = failures, len(tiers.asked)
    prompt = whole_prompt(300, seed=failures)
    actual, expected = loop.run(both(tiers, alone, prompt, params, f"failed-{failures}-{kind}"))
    assert actual == expected
    assert len(tiers.asked) - before == failures + 1
    assert [count["cause"] for count in tiers.counted[-failures:]] == ["pull_failed"] * failures
    tiers.counted.clear()


def test_an_answer_goes_on_after_any_of_its_tokens(engines, loop):
    """On an engine that has not generated them, as if it had; with what the client is sent of the rest."""
    tiers, alone = engines
    rng = random.Random(23)
    went_on = Counter()
    for number in range(REQUESTS):
        length = rng.choice([5, 100, 127, 128, 250, 500])
        prompt, params = whole_prompt(length, seed=1000 + number), random_params(rng)
        tokens = {"type": "token", "prompt_token_ids": prompt}
        expected = loop.run(answer(alone.generate(tokens, params.clone(), f"whole-{number}"), params))
        if len(expected[0]) < 2:
            continue
        known = rng.randrange(1, len(expected[0]))
        outputs = tiers.generate(prompt, params, Carried(expected[0][:known]))
        actual = loop.run(answer(outputs, params))
        assert actual[:4] == expected[:4], f"request {number} after {known}: {params}"
        for mine, theirs in zip(actual[4][known:], expected[4][known:], strict=True):
            assert mine.keys() == theirs.keys()
            assert all(abs(mine[one].logprob - theirs[one].logprob) < 1e-3 for one in mine)
        went_on[known > 1, params.output_kind] += 1
    assert min(went_on[True, kind] for kind in RequestOutputKind) >= 10, went_on


@pytest.mark.parametrize("ends", ["length", "stop_token", "stop_string"])
def test_an_answer_that_had_ended_is_not_gone_on_with(engines, loop, ends):
    tiers, alone = engines
    prompt, asked = whole_prompt(40, seed=71), len(tiers.asked)
    params = SamplingParams(temperature=0.0, max_tokens=9, output_kind=RequestOutputKind.DELTA)
    whole = loop.run(
        answer(alone.generate({"type": "token", "prompt_token_ids": prompt}, params, ends), params)
    )
    carried = Carried(whole[0], finish_reason="length")
    if ends == "stop_token":
        params.stop_token_ids = [whole[0][-1]]
        carried = Carried(whole[0], finish_reason="stop", stop_reason=whole[0][-1])
    if ends == "stop_string":
        params.stop = [whole[1][-2:]]
        carried = Carried(whole[0])
    tokens, text, reason, _, _ = loop.run(answer(tiers.generate(prompt, params, carried), params))
    assert (tokens, reason) == (whole[0], "length" if ends == "length" else "stop")
    assert whole[1].startswith(text)
    assert len(tiers.asked) - asked == (1 if ends == "stop_string" else 0)


def test_a_grammar_is_sampled_again_by_decode(engines, loop):
    tiers, alone = engines
    params = SamplingParams(
        temperature=0.0,
        max_tokens=12,
        structured_outputs=StructuredOutputsParams(regex="[a-c]{4,8}"),
        output_kind=RequestOutputKind.DELTA,
    )
    actual, expected = loop.run(both(tiers, alone, whole_prompt(50, seed=1), params, "grammar"))
    assert actual == expected
    assert tiers.counted == [{"reason": "grammar"}]
    tiers.counted.clear()


def test_nothing_stays_behind(engines, loop):
    """Blocks of prefills that ended with their first token, or whose text did, are free again."""
    tiers, _ = engines

    async def at_rest():
        params = SamplingParams(max_tokens=3, temperature=0.0)
        await answer(tiers.generate(whole_prompt(5), params), params)
        for _ in range(100):
            await asyncio.sleep(0.1)
            # Only possible while no request holds a block.
            if await tiers.prefill_engine.reset_prefix_cache() and await tiers.engine.reset_prefix_cache():
                return
        raise AssertionError("KV blocks are held")

    loop.run(at_rest())
