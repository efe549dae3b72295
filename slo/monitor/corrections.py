"""By how much the predictions of each replica are corrected, and the margin that covers what is left of them.

Owns the measured passes of every prefill replica and what follows from them. One replica's correction is
nobody else's: it goes to that replica alone, and is no part of the policy that all follow. The factor itself
is `slo.predict.prediction_error`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from slo.predict.prediction_error import (
    MIN_SAMPLES,
    UNCORRECTED,
    PassMeasured,
    PredictionError,
    Residuals,
    is_correction,
    overrun,
    prediction_error,
)
from slo.request import ReplicaId

_MIN_CHANGE: Final = 0.03
"""A replica is not told of a correction that differs by less."""
_ERRORS_HOLD_S: Final = 300.0
"""How far a replica's predictions were off is forgotten when it has had no forward pass for so long."""
_MIN_MARGIN_CHANGE: Final = 0.5
_MARGIN_SAMPLES: Final = 32


class Corrections:
    """Those of all prefill replicas of a model."""

    def __init__(self) -> None:
        self._residuals: dict[ReplicaId, Residuals] = {}
        self._measured_s: dict[ReplicaId, float] = {}
        self._factors: dict[ReplicaId, float] = {}

    def reported(
        self, replica_id: ReplicaId, follows: float, measured: Iterable[PassMeasured], now_s: float
    ) -> None:
        """A replica says which correction it follows, and which passes have ended.

        What it follows is another monitor's when this one has not told it any: it holds until there are
        passes enough.
        """
        residuals = self._residuals.setdefault(replica_id, Residuals())
        self._factors.setdefault(replica_id, follows if is_correction(follows) else UNCORRECTED)
        for each in measured:
            residuals.add(each)
            self._measured_s[replica_id] = now_s

    def of(self, replica_id: ReplicaId) -> float:
        """How many times as long as its own predictor says a prefill takes there."""
        return self._factors.get(replica_id, UNCORRECTED)

    @property
    def all(self) -> Mapping[ReplicaId, float]:
        """The same of every replica that reports."""
        return dict(self._factors)

    def revise(self) -> None:
        """Follow the measured passes."""
        for replica, residuals in self._residuals.items():
            factor = residuals.factor()
            if factor is not None and abs(factor / self._factors[replica] - 1.0) > _MIN_CHANGE:
                self._factors[replica] = round(factor, 4)

    def take_back(self) -> None:
        """Correct nothing."""
        self._factors = dict.fromkeys(self._factors, UNCORRECTED)

    def margin(self, known: float, configured: float) -> float:
        """The configured margin of preemption, or more where predictions are farther off than it allows for.

        `known` is the margin that holds.
        """
        samples, exceeded = overrun(*self._residuals.values())
        if samples < _MARGIN_SAMPLES:
            return configured
        needed = round(min(max(configured, exceeded), 2.0 * configured), 2)
        settled = needed > configured and abs(needed - known) < _MIN_MARGIN_CHANGE and known >= configured
        return known if settled else needed

    def error(self) -> PredictionError | None:
        """How far the predictions of all replicas together are off; None when no pass was measured."""
        return prediction_error(*self._residuals.values())

    def errors(self) -> dict[ReplicaId, PredictionError | None]:
        """How far the predictions of each replica are off; None with too few of late."""
        found = {replica: prediction_error(residuals) for replica, residuals in self._residuals.items()}
        return {
            replica: error if error is not None and error.samples >= MIN_SAMPLES else None
            for replica, error in found.items()
        }

    def forget_old(self, now_s: float) -> None:
        """Forget errors that nothing has confirmed of late."""
        for replica, measured_s in self._measured_s.items():
            if now_s - measured_s > _ERRORS_HOLD_S:
                self._residuals[replica].forget_errors()

    def forget(self, replica_id: ReplicaId) -> None:
        """A replica is gone."""
        for known in (self._residuals, self._measured_s, self._factors):
            known.pop(replica_id, None)
