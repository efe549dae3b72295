"""What decode engines that are stepped are asked for, and what their steps take."""

from argparse import Namespace
from collections import Counter

import pytest

from benchmarks.engines.decode.stepped_run import KINDS, MAX_TOKENS, arrivals, settings, step_times


def test_arrivals_are_the_same_for_a_seed_in_order_and_of_all_tiers():
    first, again = arrivals(60, 4.0, seed=3), arrivals(60, 4.0, seed=3)
    assert first == again
    assert first != arrivals(60, 4.0, seed=4)
    assert [one.at_s for one in first] == sorted(one.at_s for one in first)
    assert Counter(one.tier for one in first).keys() == KINDS.keys()
    assert all(2 <= one.answer < MAX_TOKENS for one in first)
    assert len({one.name for one in first}) == len(first)


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
