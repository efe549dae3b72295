"""A decode engine that runs out of memory answers what it would have answered with enough of it.

Room for eleven blocks of 128 tokens. Every request is first run alone, then together with others that push
each other out; their KV is computed again, or waits in host memory that has room for all of it or for little.
"""

import pytest
from decode_engine import BLOCK, OPTIONS, DecodeEngine, asked, check_same, swapping
from engines import random_prompt

from benchmarks.harness.offline_engine import stepped_engine
from slo.decode.victims import VictimReason

pytestmark = [pytest.mark.slow, pytest.mark.long]


HOST_BLOCKS = {"no host memory": None, "host memory": 64, "little host memory": 3}


@pytest.fixture(scope="module", params=HOST_BLOCKS)
def decode(request, models):
    blocks = HOST_BLOCKS[request.param]
    with stepped_engine(models("llama"), **OPTIONS, **({} if blocks is None else swapping(blocks))) as llm:
        yield DecodeEngine(llm)


def test_greedy_answers_are_the_same_around_the_boundary_of_a_block(decode):
    together = {
        f"{length}": asked(random_prompt(length, seed=length), 150)
        for length in (BLOCK - 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1)
    }
    expected = decode.alone(together)
    found = decode.together(together)
    assert decode.preempted, "nothing was pushed out"
    check_same(expected, found)
    assert sum(len(answer.token_ids) for answer in found.values()) == 6 * 150


def test_the_higher_tier_keeps_its_memory_and_all_answers_are_the_same(decode):
    together = {
        "low": asked(random_prompt(250, seed=1), 200, tier="background"),
        "mid": asked(random_prompt(250, seed=2), 200),
        "top": asked(random_prompt(250, seed=3), 200, tier="premium", tpot_s=0.05),
        "also": asked(random_prompt(250, seed=4), 200, tier="background"),
        "more": asked(random_prompt(250, seed=5), 200, tier="background"),
    }
    expected = decode.alone(together)
    before = len(decode.scheduler._report.figures.preempted)
    found = decode.together(together)
    assert decode.preempted
    assert "top" not in decode.preempted
    reasons = {reason for _, reason, _ in decode.scheduler._report.figures.preempted[before:]}
    assert VictimReason.VLLM.value not in reasons
    check_same(expected, found)
