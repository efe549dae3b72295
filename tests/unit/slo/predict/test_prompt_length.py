"""Tokens per byte are learned from traffic, and odd prompts change them little."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.predict.prompt_length import PromptLengthEstimator, PromptLengths


def test_the_ratio_is_learned_from_traffic():
    estimator = PromptLengthEstimator(bytes_per_token=4.0)
    for _ in range(200):
        estimator.observe(1000, 500)
    assert estimator.bytes_per_token == pytest.approx(2.0, rel=0.01)
    assert estimator.tokens(1000) == pytest.approx(500, rel=0.02)
    assert estimator.error == pytest.approx(0.0, abs=0.02)


def test_the_error_reported_is_that_of_the_estimate_before_learning():
    estimator = PromptLengthEstimator(bytes_per_token=4.0)
    assert estimator.error is None
    assert estimator.observe(400, 200) == pytest.approx(-0.5)
    assert estimator.error == pytest.approx(0.5)


def test_one_odd_prompt_pulls_by_no_more_than_its_share():
    estimator = PromptLengthEstimator(bytes_per_token=4.0, learning_rate=0.05)
    estimator.observe(1_000_000, 10)
    assert estimator.bytes_per_token < 4.5


@pytest.mark.parametrize(("size", "tokens"), [(0, 1), (1, 0), (-1, 1)])
def test_impossible_observations_are_refused(size, tokens):
    with pytest.raises(ValueError, match="positive sizes"):
        PromptLengthEstimator().observe(size, tokens)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), max_size=50))
def test_the_ratio_stays_inside_what_was_seen(observations):
    estimator = PromptLengthEstimator()
    for size, tokens in observations:
        estimator.observe(size, tokens)
    ratios = [4.0, *(min(max(size / tokens, 0.5), 16.0) for size, tokens in observations)]
    assert min(ratios) * 0.999 <= estimator.bytes_per_token <= max(ratios) * 1.001
    assert estimator.tokens(0) == 1


def chat(size):
    """A text of four bytes a token, and what a chat template adds."""
    return 30 + size // 4


def observed(lengths, *prompts):
    for size, tokens in prompts:
        lengths.observe(size, tokens)


def test_prompts_of_one_size_say_what_others_have_until_there_are_some():
    lengths = PromptLengths()
    assert lengths.of(1000).tokens(1000) == 250
    observed(lengths, *[(1000, 500)] * 100)
    assert lengths.of(1000).tokens(1000) == pytest.approx(500, rel=0.02)
    assert lengths.of(40_000).tokens(40_000) == pytest.approx(20_000, rel=0.02)
    assert lengths.of(0).tokens(0) == 1


@pytest.mark.parametrize("many", [20, 500])
def test_many_short_prompts_do_not_make_long_ones_seem_longer(many):
    lengths, draws = PromptLengths(), random.Random(1)
    for _ in range(12):
        sizes = [draws.randrange(20, 400) for _ in range(many)]
        observed(lengths, *[(size, chat(size)) for size in sizes], (40_000, chat(40_000)))
    assert lengths.of(40_000).tokens(40_000) == pytest.approx(chat(40_000), rel=0.1)
    assert lengths.of(60).tokens(60) == pytest.approx(chat(60), rel=0.3)
    off = [abs(lengths.of(size).tokens(size) - chat(size)) / chat(size) for size in range(20, 400)]
    assert max(off) < 0.5


def test_few_long_prompts_do_not_make_short_ones_seem_shorter():
    lengths = PromptLengths()
    observed(lengths, *[(60, chat(60))] * 100, *[(40_000, chat(40_000))] * 100)
    assert lengths.of(60).tokens(60) == pytest.approx(chat(60), rel=0.05)


def test_another_script_is_followed_at_each_length_and_left_again():
    lengths, sizes = PromptLengths(), (200, 3000, 40_000)
    observed(lengths, *[(size, size // 4) for size in sizes] * 100)
    for bytes_per_token in (1.5, 4.0):
        observed(lengths, *[(size, round(size / bytes_per_token)) for size in sizes] * 50)
        for size in sizes:
            assert lengths.of(size).tokens(size) == pytest.approx(size / bytes_per_token, rel=0.1)
    observed(lengths, *[(40_000, 26_667)] * 50)
    assert lengths.of(200).tokens(200) == pytest.approx(50, rel=0.1), "others are as they were"


def test_an_odd_prompt_of_a_new_length_counts_no_more_than_what_was_known():
    lengths = PromptLengths()
    observed(lengths, *[(1000, 250)] * 100, (40_000, 40_000))
    assert lengths.of(40_000).bytes_per_token == pytest.approx(2.0, rel=0.01), "the mean of four and one"
    observed(lengths, *[(40_000, 10_000)] * 20)
    assert lengths.of(40_000).bytes_per_token == pytest.approx(4.0, rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), max_size=50))
def test_no_ratio_is_outside_of_what_was_seen(observations):
    lengths = PromptLengths()
    observed(lengths, *observations)
    ratios = [4.0, *(min(max(size / tokens, 0.5), 16.0) for size, tokens in observations)]
    for size, _ in observations:
        assert min(ratios) * 0.999 <= lengths.of(size).bytes_per_token <= max(ratios) * 1.001
