"""Runs a calibration sweep on the prefill tier of a running deployment."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ray.exceptions import RayTaskError

from deployments.calibration import Calibration, sweep
from deployments.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ray.serve.handle import DeploymentHandle


def measure_with(
    handle: DeploymentHandle, lengths: Sequence[int], repeats: int, handoff_s: float
) -> Calibration:
    """Sweep prompt lengths through `handle` and fit; `handoff_s` is carried into the profile.

    Raises:
        ConfigError: when the engine refuses a length.
    """

    def measure(tokens: int) -> float:
        try:
            return float(handle.measure_prefill.remote(tokens).result())
        except RayTaskError as error:
            msg = f"calibrate: a prompt of {tokens} tokens was refused: {error.cause}"
            raise ConfigError(msg) from None

    measured = sweep(measure, lengths, repeats)
    predictor = replace(measured.fit.predictor, handoff_s=handoff_s)
    return replace(measured, fit=replace(measured.fit, predictor=predictor))
