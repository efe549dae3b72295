"""How good a profile is: prompts that it has not seen, predicted and measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slo.predict.prediction_error import PredictionError, RollingError, prediction_error
from slo.predict.prefill_time import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deployments.calibrate.profile import MeasurePrefill
    from slo.predict.handoff import HandoffModel, HandoffSample
    from slo.predict.prefill_time import PrefillPredictor


def check_prefills(
    predictor: PrefillPredictor, measure: MeasurePrefill, pairs: Sequence[tuple[int, int]]
) -> tuple[tuple[Sample, ...], PredictionError]:
    """Measure prompts that the profile has not seen, each once after an unmeasured pass.

    Returns:
        The measurements, and how far the predictor is off.
    """
    samples = []
    for tokens, context in pairs:
        measure(tokens, context)
        samples.append(Sample(tokens, measure(tokens, context), context))
    predicted = [predictor.prefill_s(sample.tokens, sample.context_tokens) for sample in samples]
    return tuple(samples), _error(predicted, [sample.measured_s for sample in samples])


def check_handoffs(
    model: HandoffModel, measure: Callable[[int], HandoffSample], lengths: Sequence[int]
) -> PredictionError:
    """How far predicted handoffs are off."""
    samples = [measure(tokens) for tokens in lengths]
    return _error([model.handoff_s(it.tokens) for it in samples], [it.handoff_s for it in samples])


def _error(predicted_s: Sequence[float], measured_s: Sequence[float]) -> PredictionError:
    rolling = RollingError(len(measured_s))
    for predicted, measured in zip(predicted_s, measured_s, strict=True):
        rolling.add(predicted, measured)
    error = prediction_error(rolling)
    assert error is not None
    return error
