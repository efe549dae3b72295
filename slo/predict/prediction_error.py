"""How far predictions are off, and by what factor to correct those of prefill times.

Owns the errors over the latest predictions, and the factor from measured forward passes, one replica at a
time. The replicas measure; `slo.predict.prefill_time.PrefillPredictor.times` applies the factor.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np

QUANTILE: Final = 0.75
"""Of measured over predicted time. Slack computed with the mean is too long every other time."""
MIN_CORRECTION: Final = 0.2
MAX_CORRECTION: Final = 5.0
UNCORRECTED: Final = 1.0
REMEMBERED: Final = 64
"""Latest passes that count, per replica."""
MIN_SAMPLES: Final = 8
_MAD_TO_SIGMA: Final = 1.4826
_CLIP_SIGMAS: Final = 3.0
_MIN_SPREAD: Final = 0.02
"""Nothing within two per cent of the median is an outlier."""


@dataclass(frozen=True, slots=True)
class PassMeasured:
    """A forward pass that ran from its beginning to its end.

    Attributes:
        predicted_s: What the replica's own predictor says, which has learned from it, without any correction.
        corrected_s: What the replica predicted, the correction that it then followed included.
        measured_s: How long it took.
    """

    predicted_s: float
    corrected_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class PredictionError:
    """How far predictions were off, as fractions of what was measured.

    Attributes:
        samples: Predictions that this is taken from.
        mape: Mean absolute percentage error.
        p90: 90th percentile of the absolute percentage error.
    """

    samples: int
    mape: float
    p90: float


class RollingError:
    """How far the latest predictions of anything were off.

    Args:
        remembered: How many count.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._errors: deque[float] = deque(maxlen=remembered)

    def clear(self) -> None:
        """Forget all of them."""
        self._errors.clear()

    def add(self, predicted_s: float, measured_s: float) -> None:
        """Something was predicted and measured; values that are not positive are ignored."""
        if min(predicted_s, measured_s) > 0:
            self._errors.append(abs(predicted_s - measured_s) / measured_s)

    @property
    def errors(self) -> tuple[float, ...]:
        """Absolute errors as fractions of what was measured."""
        return tuple(self._errors)


class Residuals:
    """One replica's latest passes."""

    def __init__(self) -> None:
        self._log_ratios: deque[float] = deque(maxlen=REMEMBERED)
        self._error = RollingError()
        self._overruns: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, measured: PassMeasured) -> None:
        """A pass was measured; one without a prediction is ignored."""
        if min(measured.predicted_s, measured.corrected_s, measured.measured_s) <= 0:
            return
        self._log_ratios.append(math.log(measured.measured_s / measured.predicted_s))
        self._error.add(measured.corrected_s, measured.measured_s)
        self._overruns.append(measured.measured_s / measured.corrected_s)

    def forget_errors(self) -> None:
        """Passes are too long ago to say how far predictions are off; what was learned from them stays."""
        self._error.clear()

    @property
    def errors(self) -> tuple[float, ...]:
        """Absolute errors of the predictions that were made, as fractions of the measured time."""
        return self._error.errors

    @property
    def overruns(self) -> tuple[float, ...]:
        """Measured over predicted time, of the predictions that were made."""
        return tuple(self._overruns)

    def factor(self) -> float | None:
        """How many times as long as predicted a pass takes, by `QUANTILE`; None with too few passes.

        Ratios farther from their median than three robust standard deviations (Hampel's rule) count as if
        they were just there: a pass that was held up once does not make a replica slow.
        """
        if len(self._log_ratios) < MIN_SAMPLES:
            return None
        middle = statistics.median(self._log_ratios)
        spread = _MAD_TO_SIGMA * statistics.median(abs(ratio - middle) for ratio in self._log_ratios)
        reach = _CLIP_SIGMAS * max(spread, _MIN_SPREAD / _CLIP_SIGMAS)
        clipped = [min(max(ratio, middle - reach), middle + reach) for ratio in self._log_ratios]
        factor = math.exp(float(np.quantile(clipped, QUANTILE)))
        return min(max(factor, MIN_CORRECTION), MAX_CORRECTION)


def is_correction(factor: float) -> bool:
    """Whether predictions may be corrected by it; not by NaN."""
    return MIN_CORRECTION <= factor <= MAX_CORRECTION


def prediction_error(*residuals: Residuals | RollingError) -> PredictionError | None:
    """How far these predictions were off, together; None without any."""
    errors = [error for each in residuals for error in each.errors]
    if not errors:
        return None
    return PredictionError(len(errors), statistics.fmean(errors), float(np.quantile(errors, 0.9)))


def overrun(*residuals: Residuals) -> tuple[int, float]:
    """How many predictions there were on these replicas, and what nine of ten passes did not exceed.

    Returns:
        Their number, and the 90th percentile of measured over predicted time; 1 without any.
    """
    ratios = [ratio for each in residuals for ratio in each.overruns]
    return len(ratios), float(np.quantile(ratios, 0.9)) if ratios else 1.0
