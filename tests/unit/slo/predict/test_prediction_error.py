"""Corrections of predictors from measured passes."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slo.predict.prediction_error import (
    MAX_CORRECTION,
    MIN_CORRECTION,
    MIN_SAMPLES,
    QUANTILE,
    PassMeasured,
    Residuals,
    RollingError,
    overrun,
    prediction_error,
)
from slo.predict.prefill_time import PrefillPredictor

PROFILE = PrefillPredictor(per_token_s=1e-4, fixed_s=0.005, per_pair_s=1e-9)


def measure(residuals, truth, passes, *, noise=0.02, seed=1, outliers=0.0):
    """Passes of a replica that follows each correction at once; the relative errors of its predictions."""
    rng, errors = random.Random(seed), []
    for _ in range(passes):
        tokens = rng.randrange(64, 8192)
        measured_s = truth.prefill_s(tokens) * math.exp(rng.gauss(0, noise))
        if rng.random() < outliers:
            measured_s *= rng.choice([0.05, 10.0, 30.0])
        corrected_s = PROFILE.times(residuals.factor() or 1.0).prefill_s(tokens)
        residuals.add(PassMeasured(PROFILE.prefill_s(tokens), corrected_s, measured_s))
        errors.append(abs(corrected_s - measured_s) / measured_s)
    return errors


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
@pytest.mark.parametrize("outliers", [0.0, 0.1])
def test_a_profile_that_is_off_by_three_is_corrected_within_a_hundred_passes(factor, outliers):
    residuals = Residuals()
    measure(residuals, PROFILE.times(factor), 100, outliers=outliers)
    assert residuals.factor() == pytest.approx(factor, rel=0.04)


def test_it_stays_corrected_and_says_how_well_it_predicts():
    residuals = Residuals()
    before = measure(residuals, PROFILE.times(3.0), MIN_SAMPLES)
    assert min(before) > 0.6
    measure(residuals, PROFILE.times(3.0), 92)
    error = prediction_error(residuals)
    assert error.samples == 64
    assert error.mape < 0.03
    assert error.p90 < 0.06
    assert error.mape < error.p90


def test_a_replica_that_changes_its_speed_is_followed_within_a_hundred_passes():
    residuals = Residuals()
    measure(residuals, PROFILE, 200)
    measure(residuals, PROFILE.times(2.0), 100)
    assert residuals.factor() == pytest.approx(2.0, rel=0.04)


def test_the_correction_is_a_quantile_so_that_most_passes_end_sooner_than_predicted():
    rng, sooner = random.Random(2), 0
    for seed in range(20):
        residuals = Residuals()
        measure(residuals, PROFILE, 64, noise=0.2, seed=seed)
        factor = residuals.factor()
        sooner += sum(math.exp(rng.gauss(0, 0.2)) <= factor for _ in range(200))
    assert sooner / (20 * 200) == pytest.approx(QUANTILE, abs=0.04)


def test_one_pass_that_was_held_up_changes_next_to_nothing():
    residuals = Residuals()
    measure(residuals, PROFILE, 20)
    before = residuals.factor()
    residuals.add(PassMeasured(0.1, 0.1, 60.0))
    assert residuals.factor() == pytest.approx(before, rel=0.02)


def test_too_few_passes_correct_nothing():
    residuals = Residuals()
    measure(residuals, PROFILE.times(3), MIN_SAMPLES - 1)
    assert residuals.factor() is None
    measure(residuals, PROFILE.times(3), 1)
    assert residuals.factor() is not None


def test_without_measurements_there_is_no_error():
    assert prediction_error(Residuals()) is None
    assert overrun(Residuals()) == (0, 1.0)


def test_what_has_no_prediction_says_nothing():
    residuals = Residuals()
    for _ in range(MIN_SAMPLES):
        residuals.add(PassMeasured(0.0, 0.0, 1.0))
        residuals.add(PassMeasured(1.0, 1.0, 0.0))
    assert residuals.factor() is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3)), max_size=100))
def test_whatever_is_measured_a_correction_stays_in_its_bounds(passes):
    residuals = Residuals()
    for predicted_s, measured_s in passes:
        residuals.add(PassMeasured(predicted_s, predicted_s, measured_s))
    factor = residuals.factor()
    assert (factor is None) == (len(passes) < MIN_SAMPLES)
    assert factor is None or MIN_CORRECTION <= factor <= MAX_CORRECTION


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=1, max_size=50))
def test_a_rolling_error_is_of_the_latest_predictions_only(pairs):
    rolling = RollingError(10)
    rolling.add(0.0, 1.0)
    rolling.add(1.0, 0.0)
    assert prediction_error(rolling) is None, "no prediction, no error"
    for predicted_s, measured_s in pairs:
        rolling.add(predicted_s, measured_s)
    error = prediction_error(rolling)
    latest = [abs(predicted - measured) / measured for predicted, measured in pairs[-10:]]
    assert error is not None
    assert error.samples == len(latest)
    assert error.mape == pytest.approx(sum(latest) / len(latest))
    assert min(latest) <= error.p90 <= max(latest)
