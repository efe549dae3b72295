"""Tokens per byte are learned from traffic, and odd prompts change them little."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.predict.prompt_length import PromptLengthEstimator


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
