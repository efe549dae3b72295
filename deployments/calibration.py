"""Prefill profiles: measured by sweeping prompt lengths on running replicas, kept in a file.

Owns the file's format and the sweep's plan. The measurement itself runs in each prefill replica.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from deployments.config import ConfigError
from slo.predictor import Fit, PrefillPredictor, Sample, fit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Calibration:
    """A sweep's samples and the line through them."""

    samples: tuple[Sample, ...]
    fit: Fit


def sweep(measure: Callable[[int], float], lengths: Sequence[int], repeats: int) -> Calibration:
    """Measure each length `repeats` times after one unmeasured pass, and fit.

    Args:
        measure: Prefills a random prompt of that many tokens and returns seconds.
        lengths: Prompt lengths, tokens; at least two different ones.
        repeats: Measurements of each length, at least 1.
    """
    samples: list[Sample] = []
    for tokens in lengths:
        measure(tokens)
        samples.extend(Sample(tokens, measure(tokens)) for _ in range(repeats))
    return Calibration(tuple(samples), fit(samples))


def save_profile(path: Path, calibration: Calibration, about: dict[str, Any]) -> None:
    """Write a profile as JSON.

    Args:
        path: Where to; its directory is created.
        calibration: What was measured.
        about: What it was measured on, for the reader.
    """
    result = calibration.fit
    values = {
        "format": FORMAT,
        "about": about,
        "predictor": asdict(result.predictor),
        "r_squared": result.r_squared,
        "mape": result.mape,
        "samples": [asdict(sample) for sample in calibration.samples],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n")


def load_profile(path: Path) -> PrefillPredictor:
    """Read the predictor out of a profile.

    Raises:
        ConfigError: when the file cannot be read or is not a profile.
    """
    try:
        values = json.loads(path.read_text())
        if values["format"] != FORMAT:
            msg = f"profile: {path} has format {values['format']!r}; this version reads {FORMAT}"
            raise ConfigError(msg)
        return PrefillPredictor(**{name: float(value) for name, value in values["predictor"].items()})
    except OSError as error:
        msg = f"profile: {path} cannot be read: {error.strerror}; `slackserve calibrate` writes one"
        raise ConfigError(msg) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"profile: {path} is not a profile ({error}); `slackserve calibrate` writes one"
        raise ConfigError(msg) from None
