"""Pulls that fail, and pulls that only seem to be too late, between a prefill and a decode engine."""

import asyncio
import json
import shutil

import pytest
from engines import random_prompt
from two_tiers import answer as all_of
from two_tiers import two_tiers
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from slo.replacement import FailureCause

pytestmark = [pytest.mark.slow, pytest.mark.long]

LEASE_S = 6  # vLLM's least
WINDOW, BLOCK = 256, 128
OPTIONS = {"max_model_len": 1024, "max_num_batched_tokens": 1024}


async def answer(outputs):
    async for output in outputs:
        last = output
    return list(last.outputs[0].token_ids)


def pull_failures(tiers):
    return [labels["cause"] for labels in tiers.counted].count(FailureCause.PULL_FAILED.value)


@pytest.fixture(scope="module")
def only_windows(models, tmp_path_factory):
    """A model all of whose layers look back so far only; vLLM marks no block of its failed pulls."""
    directory = tmp_path_factory.mktemp("windows") / "mistral"
    shutil.copytree(models("mistral"), directory)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sliding_window": WINDOW}))
    return directory


async def test_a_failed_pull_of_a_model_with_windows_is_no_answer(only_windows):
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    with two_tiers(only_windows, LEASE_S, **OPTIONS) as (tiers, alone):
        for number, failures in enumerate([0, 1, 2, 0]):
            tiers.failing = failures
            prompt = random_prompt(700, seed=number)
            tokens = {"type": "token", "prompt_token_ids": prompt}
            expected = await answer(alone.generate(tokens, params, f"alone-{number}"))
            before = pull_failures(tiers)
            assert await answer(tiers.generate(prompt, params)) == expected
            assert pull_failures(tiers) - before == failures


async def test_decode_samples_first_tokens_of_a_model_with_windows(only_windows):
    """It computes the last token again then, which attends to one before the next one's window."""
    grammar = StructuredOutputsParams(regex="[a-z]{60}")
    params = SamplingParams(max_tokens=16, temperature=0.0, logprobs=2, structured_outputs=grammar)
    with two_tiers(only_windows, LEASE_S, **OPTIONS) as (tiers, alone):
        for length in (WINDOW + BLOCK - 2, WINDOW + BLOCK - 1, WINDOW + BLOCK):
            prompt = random_prompt(length, seed=length)
            tokens = {"type": "token", "prompt_token_ids": prompt}
            expected = await all_of(alone.generate(tokens, params, f"alone-{length}"), params)
            found = await all_of(tiers.generate(prompt, params), params)
            assert found[0] == expected[0]
            for ours, theirs in zip(found[4], expected[4], strict=True):
                assert all(abs(ours[token].logprob - one.logprob) < 1e-3 for token, one in theirs.items())


async def test_a_request_may_wait_for_decode_longer_than_its_lease(models):
    """Heartbeats lengthen it meanwhile."""
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    long = SamplingParams(max_tokens=3900, temperature=0.0, ignore_eos=True)
    prompt = random_prompt(700, seed=2)
    with two_tiers(models("llama"), LEASE_S, {"max_num_seqs": 1}, **OPTIONS | {"max_model_len": 4096}) as (
        tiers,
        alone,
    ):
        expected = await answer(
            alone.generate({"type": "token", "prompt_token_ids": prompt}, params, "alone")
        )
        in_the_way = []
        for seed in range(3):
            outputs = tiers.generate(random_prompt(100, seed=seed), long)
            in_the_way.append(asyncio.create_task(answer(outputs)))
            await asyncio.sleep(0.3)
        waiting = asyncio.create_task(answer(tiers.generate(prompt, params)))
        await asyncio.sleep(1.5 * LEASE_S)
        assert not any(task.done() for task in (waiting, in_the_way[-1]))
        for task in in_the_way:
            task.cancel()
        assert await waiting == expected
        assert pull_failures(tiers) == 0
        assert len(tiers.asked) == 4
