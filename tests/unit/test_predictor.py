import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.predictor import PrefillPredictor, Sample, fit


def test_fit_finds_the_line_it_was_given():
    line = PrefillPredictor(per_token_s=0.0002, fixed_s=0.03)
    result = fit([Sample(n, line.prefill_s(n)) for n in (10, 500, 4000)])
    assert result.predictor.per_token_s == pytest.approx(0.0002)
    assert result.predictor.fixed_s == pytest.approx(0.03)
    assert result.r_squared == pytest.approx(1.0)
    assert result.mape == pytest.approx(0.0, abs=1e-9)


def test_residuals_are_measured_minus_predicted():
    result = fit([Sample(1, 1.0), Sample(1, 3.0), Sample(2, 4.0), Sample(2, 4.0)])
    assert result.residuals_s == pytest.approx((-1.0, 1.0, 0.0, 0.0))
    assert 0 < result.r_squared < 1


@pytest.mark.parametrize(
    "samples", [[], [Sample(5, 1.0)], [Sample(5, 1.0), Sample(5, 2.0)], [Sample(5, 1.0), Sample(6, 0.0)]]
)
def test_too_little_to_fit_is_refused(samples):
    with pytest.raises(ValueError, match=r"different prompt lengths|positive"):
        fit(samples)


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-4, 100)), min_size=2, max_size=30))
def test_no_measurement_makes_time_run_backwards(points):
    samples = [Sample(n, s) for n, s in points]
    if len({n for n, _ in points}) < 2:
        return
    predictor = fit(samples).predictor
    assert predictor.per_token_s >= 0
    assert predictor.fixed_s >= 0
    assert predictor.prefill_s(10) <= predictor.prefill_s(20)


def test_nothing_takes_no_time():
    assert PrefillPredictor(0.1, 0.5).prefill_s(0) == 0.0
