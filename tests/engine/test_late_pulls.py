"""What decode reads after prefill has given the blocks to another prompt is in no answer."""

import asyncio

import pytest
from engines import random_prompt
from two_tiers import two_tiers
from vllm import SamplingParams

from slo.replacement import FailureCause

pytestmark = [pytest.mark.slow, pytest.mark.long]

LEASE_S = 6  # vLLM's least
PROMPT = 900


async def answer(outputs):
    async for output in outputs:
        last = output
    return list(last.outputs[0].token_ids)


async def test_a_pull_after_the_lease_is_none(models):
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    prompts = [random_prompt(PROMPT, seed=seed) for seed in range(8)]
    with two_tiers(
        models("llama"), LEASE_S, max_model_len=1024, max_num_batched_tokens=1024, num_gpu_blocks_override=20
    ) as (tiers, alone):

        async def expected(prompt):
            tokens = {"type": "token", "prompt_token_ids": prompt}
            return await answer(alone.generate(tokens, params, f"alone-{prompts.index(prompt)}"))

        async def reassign():
            """Let the lease end, and others have the blocks."""
            await asyncio.sleep(LEASE_S + 1)
            for prompt in prompts[1:]:
                assert await answer(tiers.generate(prompt, params)) == await expected(prompt)

        tiers.before_pull = reassign
        assert await answer(tiers.generate(prompts[0], params)) == await expected(prompts[0])
        assert [labels["cause"] for labels in tiers.counted if "cause" in labels] == [
            FailureCause.PULL_FAILED.value
        ]
        assert len(tiers.asked) == len(prompts) + 1
