"""What the benchmark of decode under pressure asks for, and how it judges."""

from argparse import Namespace
from collections import Counter

import pytest

from benchmarks.engines.decode.pressure import (
    KINDS,
    MAX_TOKENS,
    PREMIUM,
    arrivals,
    settings,
    step_times,
    summary,
)


def test_arrivals_are_the_same_for_a_seed_in_order_and_of_all_tiers():
    first, again = arrivals(60, 4.0, seed=3), arrivals(60, 4.0, seed=3)
    assert first == again
    assert first != arrivals(60, 4.0, seed=4)
    assert [one.at_s for one in first] == sorted(one.at_s for one in first)
    assert Counter(one.tier for one in first).keys() == KINDS.keys()
    assert all(2 <= one.answer < MAX_TOKENS for one in first)
    assert len({one.name for one in first}) == len(first)


def one(tier, at_s, *token_s, preemptions=0):
    times = {"at_s": at_s, "token_s": list(token_s)}
    return {"tier": tier, "answer": len(token_s), "preemptions": preemptions, **times}


def test_a_run_is_summed_up_by_tier():
    kind = KINDS[PREMIUM]
    asked = [
        one(PREMIUM, 1.0, 0.9 + kind.ttft_s, 0.9 + kind.ttft_s + 0.9 * kind.tpot_s),
        one(PREMIUM, 1.0, 1.1 + kind.ttft_s, 1.1 + kind.ttft_s + kind.tpot_s),
        one(PREMIUM, 1.0, 1.1, 1.1 + 2 * kind.tpot_s, preemptions=2),
        one("standard", 1.0, 1.1, 1.12),
        one("background", 1.0, 60.0, 90.0, preemptions=1),
    ]
    counted = {"computed": 200, "again": 10, "took_s": 5.0, "steps": 50, "fullest": 0.9}
    row = summary({"asked": asked, "step_times": {"step fixed s": 0.003}, **counted})
    assert row["premium met"] == pytest.approx(1 / 3)
    assert row["premium preempted"] == pytest.approx(1 / 3)
    assert (row["standard met"], row["background met"], row["background preempted"]) == (1.0, 1.0, 1.0)
    assert row["again"] == 0.05
    assert row["tokens/s"] == 2.0
    assert row["gap max s"] == 30.0
    assert row["step fixed s"] == 0.003


def test_what_a_step_takes_is_found_whatever_another_process_took():
    composed = [(streams, prompt) for streams in range(20) for prompt in (0, 0, 0, 64, 128)]
    timed = [(*each, 3e-3 + 2e-4 * each[0] + 3e-5 * each[1]) for each in composed if any(each)]
    found = step_times([*timed, (0, 0, 1.0), (3, 0, 0.5)])
    assert [*found.values()] == pytest.approx([3e-3, 2e-4, 3e-5], rel=0.01)


def test_a_result_says_with_what_options_every_engine_ran():
    told = settings(Namespace(rate=6.0))
    assert told["rate"] == 6.0
    assert told["engine"]["max_num_batched_tokens"] == 1024
    assert told["engine"]["long_prefill_token_threshold"] == 128
    assert told["kinds"].keys() == KINDS.keys()
