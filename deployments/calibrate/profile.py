"""Profiles: measured by a sweep on running replicas, kept in a file.

Owns the sweep, what is written, how good a profile is, and whether it is of what is to be served. What is
swept is `deployments.calibrate.plan`'s; the measurement itself runs in the replicas; the format is read in
`slo.files.profile`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from deployments.config import ConfigError
from slo.files.profile import PROFILE_FORMAT, Profile, read_profile, read_whole_profile
from slo.predict.handoff import HandoffFit, HandoffModel, HandoffSample, fit_handoff
from slo.predict.prediction_error import PredictionError, RollingError, prediction_error
from slo.predict.prefill_time import Fit, PrefillPredictor, Sample, fit

if TYPE_CHECKING:
    from pathlib import Path

    from slo.predict.measured_on import Subject

MeasurePrefill: TypeAlias = Callable[[int, int], float]
"""Prefills as many random tokens behind as many cached ones, and returns seconds."""
WORST_MAPE: Final = 0.1
"""A fit with a larger mean error is not to be relied on."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A sweep's samples and the curve through them, and the same of handoffs if they were measured."""

    samples: tuple[Sample, ...]
    fit: Fit
    handoffs: tuple[HandoffSample, ...] = ()
    handoff_fit: HandoffFit | None = None


def sweep(
    measure: MeasurePrefill,
    lengths: Sequence[int],
    repeats: int,
    behind: Sequence[tuple[int, int]] = (),
) -> Calibration:
    """Measure each of two or more lengths `repeats` times after one unmeasured pass, and fit.

    `behind` are (tokens, tokens of a cached prefix before them) to measure as well.
    """
    samples: list[Sample] = []
    for tokens, context in (*((tokens, 0) for tokens in lengths), *behind):
        measure(tokens, context)
        samples.extend(Sample(tokens, measure(tokens, context), context) for _ in range(repeats))
    return Calibration(tuple(samples), fit(samples))


def with_handoffs(
    calibration: Calibration, measure: Callable[[int], HandoffSample], lengths: Sequence[int], repeats: int
) -> Calibration:
    """The same with handoffs measured at these lengths, each `repeats` times after an unmeasured one."""
    samples: list[HandoffSample] = []
    for tokens in lengths:
        measure(tokens)
        samples.extend(measure(tokens) for _ in range(repeats))
    found = fit_handoff(samples)
    return replace(
        with_handoff_s(calibration, found.first_step_s), handoffs=tuple(samples), handoff_fit=found
    )


def with_handoff_s(calibration: Calibration, handoff_s: float) -> Calibration:
    """The same with the part of the handoff that no length changes."""
    predictor = replace(calibration.fit.predictor, handoff_s=handoff_s)
    return replace(calibration, fit=replace(calibration.fit, predictor=predictor))


def save_profile(
    path: Path, calibration: Calibration, about: dict[str, Any], kv_bytes_per_token: int = 0
) -> None:
    """Write a profile as JSON; the directory is created.

    `about` says what it was measured on: the parts of a `slo.predict.measured_on.Subject`, and more for the
    reader.
    """
    result, handoff = calibration.fit, calibration.handoff_fit
    values: dict[str, Any] = {
        "format": PROFILE_FORMAT,
        "about": about,
        "predictor": asdict(result.predictor),
        "r_squared": result.r_squared,
        "mape": result.mape,
        "samples": [asdict(sample) for sample in calibration.samples],
    }
    if handoff is not None:
        values["handoff"] = {**asdict(handoff), "kv_bytes_per_token": kv_bytes_per_token}
        values["handoffs"] = [asdict(sample) for sample in calibration.handoffs]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n")


def load_profile(path: Path) -> PrefillPredictor:
    """Read the predictor out of a profile.

    Raises:
        ConfigError: when the file cannot be read or is not a profile.
    """
    return read_profile(path, ConfigError)


def check_prefills(
    predictor: PrefillPredictor, measure: MeasurePrefill, pairs: Sequence[tuple[int, int]]
) -> tuple[tuple[Sample, ...], PredictionError]:
    """Measure other prompts, each once after an unmeasured pass, and how far the predictor is off."""
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


def profile_of(path: Path, subject: Subject) -> Profile:
    """Read a profile that is to be used for `subject`.

    Raises:
        ConfigError: when the file cannot be read, is not a profile, or is one of something else.
    """
    profile = read_whole_profile(path, ConfigError)
    if differences := profile.subject.differences(subject):
        raise ConfigError(
            f"profile: {path} was measured on something else: {', '.join(differences)}; measure this "
            "deployment with `slackserve calibrate`, or leave `profile` out"
        )
    return profile
