"""First tokens and transfers are told apart, and outliers do not count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.predict.handoff import HandoffSample, fit_transfer, usual_handoff_s


def sample(tokens, latency_s=0.004, per_token_s=2e-6, held_up_s=0.0):
    return HandoffSample(tokens, 0.003 + held_up_s, latency_s + per_token_s * tokens + held_up_s)


def test_first_tokens_and_transfers_are_told_apart():
    samples = [sample(n) for n in (32, 512, 2048)]
    found = fit_transfer(samples)
    assert found.latency_s == pytest.approx(0.004)
    assert found.per_token_s == pytest.approx(2e-6)
    assert found.transfer_s(1000) == pytest.approx(0.006)
    assert usual_handoff_s(samples) == pytest.approx(0.003), "no first token waits for a transfer"


def test_one_handoff_that_was_held_up_does_not_count():
    samples = [sample(n) for n in (32, 512, 2048) for _ in range(3)]
    samples[4] = sample(512, held_up_s=3.0)
    assert fit_transfer(samples).transfer_s(512) == pytest.approx(sample(512).transfer_s)
    assert usual_handoff_s(samples) == pytest.approx(0.003)


@given(st.lists(st.tuples(st.integers(1, 9000), st.floats(-1, 9), st.floats(-1, 9)), min_size=2, max_size=20))
def test_no_longer_prompt_is_predicted_to_come_sooner(points):
    if len({n for n, _, _ in points}) < 2:
        return
    samples = [HandoffSample(*point) for point in points]
    model = fit_transfer(samples)
    assert 0 <= model.transfer_s(1) <= model.transfer_s(10_000)
    assert usual_handoff_s(samples) >= 0


def test_one_length_makes_no_line():
    with pytest.raises(ValueError, match="two different"):
        fit_transfer([sample(5), sample(5)])
