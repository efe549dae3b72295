"""A seed gives the same tokens however a prompt is computed: at once, in chunks, or again."""

import pytest
from engines import engine, random_prompt

pytestmark = pytest.mark.long

SEEDED = {"temperature": 1.0, "seed": 7}
PROMPT = random_prompt(700, seed=1)


@pytest.fixture(scope="module")
def expected(models):
    with engine(models("llama"), max_model_len=1024) as running:
        return {
            prompts: [
                running.prefill(
                    f"{prompts}", random_prompt(length, seed=length), max_tokens=tokens, **SEEDED
                ).tokens
                for length in range(prompts, prompts + 5)
            ]
            for prompts, tokens in ((700, 4), (250, 150))
        }


def test_in_chunks(models, expected):
    with engine(models("llama"), max_num_batched_tokens=256, max_model_len=1024) as running:
        for length, tokens in zip(range(700, 705), expected[700], strict=True):
            assert (
                running.prefill("chunked", random_prompt(length, seed=length), max_tokens=4, **SEEDED).tokens
                == tokens
            )


def test_after_losing_its_memory_in_the_middle(models, expected):
    """Room for eleven blocks of 128 tokens: five requests that end with four each push each other out."""
    options = {"max_model_len": 1024, "num_gpu_blocks_override": 12, "max_num_batched_tokens": 256}
    with engine(models("llama"), **options) as running:
        for length in range(250, 255):
            running.add(f"{length}", random_prompt(length, seed=length), max_tokens=150, **SEEDED)
        preempted = running.scheduler._preempt_request
        lost = []
        running.scheduler._preempt_request = lambda request, *args: (
            lost.append(request),
            preempted(request, *args),
        )
        running.finish(within_s=300)  # the second runner's kernels may be interpreted
        assert lost, "nothing was pushed out"
        assert [running.answers[f"{length}"].tokens for length in range(250, 255)] == expected[250]
