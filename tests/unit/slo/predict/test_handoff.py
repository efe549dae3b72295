import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.predict.handoff import HandoffModel, HandoffSample, fit_handoff


def sample(tokens, latency_s=0.004, per_token_s=2e-6, step_s=0.02, step_per_token_s=1e-6, held_up_s=0.0):
    step = step_s + step_per_token_s * tokens
    return HandoffSample(tokens, latency_s + per_token_s * tokens + step + held_up_s, step)


def test_transfer_and_first_step_are_told_apart():
    found = fit_handoff([sample(n) for n in (32, 512, 2048)])
    assert found.latency_s == pytest.approx(0.004)
    assert found.transfer_per_token_s == pytest.approx(2e-6)
    assert found.first_step_s == pytest.approx(0.02)
    assert found.step_per_token_s == pytest.approx(1e-6)
    assert found.model().handoff_s(1000) == pytest.approx(0.004 + 0.002 + 0.02 + 0.001)


def test_one_handoff_that_was_held_up_does_not_count():
    samples = [sample(n) for n in (32, 512, 2048) for _ in range(3)]
    samples[4] = sample(512, held_up_s=3.0)
    assert fit_handoff(samples).model().handoff_s(512) == pytest.approx(sample(512).handoff_s)


@given(st.lists(st.tuples(st.integers(1, 9000), st.floats(0, 9), st.floats(0, 9)), min_size=2, max_size=20))
def test_no_longer_prompt_is_predicted_to_hand_over_sooner(points):
    if len({n for n, _, _ in points}) < 2:
        return
    model = fit_handoff([HandoffSample(*point) for point in points]).model()
    assert 0 <= model.handoff_s(1) <= model.handoff_s(10_000)


def test_one_length_makes_no_line():
    with pytest.raises(ValueError, match="two different"):
        fit_handoff([sample(5), sample(5)])


def test_a_model_without_a_slope_is_one_number():
    assert HandoffModel(0.01, 0.0, 0.04).handoff_s(1) == HandoffModel(0.01, 0.0, 0.04).handoff_s(9000)
