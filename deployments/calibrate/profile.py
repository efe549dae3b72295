"""Profiles: measured by a sweep on running replicas, kept in a file.

Owns the sweep, what is written, how good a profile is, and whether it is of what is to be served. What is
swept is `deployments.calibrate.plan`'s; the measurement itself runs in the replicas; the format is read in
`slo.files.profile`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from deployments.config import ConfigError
from deployments.whole_file import write_whole
from slo.files.profile import PROFILE_FORMAT, Profile, read_profile
from slo.predict.handoff import HandoffSample, TransferFit, fit_transfer, usual_handoff_s
from slo.predict.measured_on import Subject
from slo.predict.prediction_error import PredictionError, RollingError, prediction_error
from slo.predict.prefill_time import Fit, PrefillPredictor, Sample, fit

MeasurePrefill: TypeAlias = Callable[[int, int], float]
"""Prefills as many random tokens behind as many cached ones, and returns seconds."""
WORST_MAPE: Final = 0.1
"""A fit with a larger mean error is not to be relied on."""
_DISTURBED: Final = 2.0
_MOST_AGAIN: Final = 3


@dataclass(frozen=True, slots=True)
class Calibration:
    """A sweep's samples and the curve through them, and the same of handoffs if they were measured."""

    samples: tuple[Sample, ...]
    fit: Fit
    handoffs: tuple[HandoffSample, ...] = ()
    transfer: TransferFit | None = None


def sweep(
    measure: MeasurePrefill,
    lengths: Sequence[int],
    repeats: int,
    behind: Sequence[tuple[int, int]] = (),
    *,
    has_floor: bool = False,
) -> Calibration:
    """Measure each of two or more lengths `repeats` times after one unmeasured pass, and fit.

    A pass that something else on the machine held up is measured again (`_undisturbed`).

    `behind` are (tokens, tokens of a cached prefix before them) to measure as well; `has_floor` is
    `slo.predict.prefill_time.fit`'s.
    """
    samples: list[Sample] = []
    for tokens, context in (*((tokens, 0) for tokens in lengths), *behind):
        times_s = _undisturbed(partial(measure, tokens, context), repeats)
        samples.extend(Sample(tokens, time_s, context) for time_s in times_s)
    return Calibration(tuple(samples), fit(samples, has_floor=has_floor))


def _undisturbed(measure: Callable[[], float], repeats: int) -> list[float]:
    """Measure `repeats` times after an unmeasured pass; what took over twice the fastest is measured again.

    The same pass on an idle replica varies by less. After `_MOST_AGAIN` such passes the machine is not idle:
    what was measured stays, and shows in the error of the fit.
    """
    fastest_s = measure()
    times_s = [measure() for _ in range(repeats)]
    for _ in range(_MOST_AGAIN):
        fastest_s = min(fastest_s, *times_s)
        slowest_s = max(times_s)
        if slowest_s <= _DISTURBED * fastest_s:
            break
        times_s[times_s.index(slowest_s)] = measure()
    return times_s


def measure_handoffs(
    measure: Callable[[int], HandoffSample], lengths: Sequence[int], repeats: int
) -> list[HandoffSample]:
    """Measure handoffs of each of these lengths `repeats` times after an unmeasured one."""
    samples: list[HandoffSample] = []
    for tokens in lengths:
        measure(tokens)
        samples.extend(measure(tokens) for _ in range(repeats))
    return samples


def with_handoffs(calibration: Calibration, samples: Sequence[HandoffSample]) -> Calibration:
    """The same with handoffs of two or more lengths."""
    calibration = with_handoff_s(calibration, usual_handoff_s(samples))
    return replace(calibration, handoffs=tuple(samples), transfer=fit_transfer(samples))


def with_handoff_s(calibration: Calibration, handoff_s: float) -> Calibration:
    """The same with so long a handoff."""
    predictor = replace(calibration.fit.predictor, handoff_s=handoff_s)
    return replace(calibration, fit=replace(calibration.fit, predictor=predictor))


def save_profile(
    path: Path, calibration: Calibration, about: dict[str, Any], kv_bytes_per_token: int = 0
) -> None:
    """Write a profile as JSON; the directory is created.

    `about` says what it was measured on: the parts of a `slo.predict.measured_on.Subject`, and more for the
    reader.

    Raises:
        OSError: when it cannot be written; a profile that was there stays.
    """
    result, transfer = calibration.fit, calibration.transfer
    values: dict[str, Any] = {
        "format": PROFILE_FORMAT,
        "about": about,
        "predictor": asdict(result.predictor),
        "r_squared": result.r_squared,
        "mape": result.mape,
        "samples": [asdict(sample) for sample in calibration.samples],
    }
    if transfer is not None:
        values["transfer"] = {**asdict(transfer), "kv_bytes_per_token": kv_bytes_per_token}
        values["handoffs"] = [asdict(sample) for sample in calibration.handoffs]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(values, indent=2) + "\n")


def load_profile(path: Path) -> PrefillPredictor:
    """Read the predictor out of a profile.

    Raises:
        ConfigError: when the file cannot be read or is not a profile.
    """
    return read_profile(path, ConfigError).predictor


def check_prefills(
    predictor: PrefillPredictor, measure: MeasurePrefill, pairs: Sequence[tuple[int, int]]
) -> tuple[tuple[Sample, ...], PredictionError]:
    """Measure other prompts, each once after an unmeasured pass, and how far the predictor is off."""
    samples = []
    for tokens, context in pairs:
        (time_s,) = _undisturbed(partial(measure, tokens, context), 1)
        samples.append(Sample(tokens, time_s, context))
    predicted = [predictor.prefill_s(sample.tokens, sample.context_tokens) for sample in samples]
    return tuple(samples), _error(predicted, [sample.measured_s for sample in samples])


def check_handoffs(
    handoff_s: float, measure: Callable[[int], HandoffSample], lengths: Sequence[int]
) -> PredictionError:
    """How far a predicted handoff is off."""
    return _error([handoff_s] * len(lengths), [measure(tokens).handoff_s for tokens in lengths])


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
    profile = read_profile(path, ConfigError)
    if differences := profile.subject.differences(subject):
        raise ConfigError(
            f"profile: {path} was measured on something else: {', '.join(differences)}; measure this "
            "deployment with `slackserve calibrate`, or leave `profile` out"
        )
    return profile
