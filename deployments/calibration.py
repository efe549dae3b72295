"""Prefill profiles: measured by sweeping prompt lengths on running replicas, kept in a file.

Owns the sweep's plan and what is written. The measurement itself runs in each prefill replica; the format is
read in `simulator.prefill_profile`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from deployments.config import ConfigError
from simulator.prefill_profile import PROFILE_FORMAT, read_profile
from slo.predictor import Fit, Sample, fit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from slo.predictor import PrefillPredictor


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
        "format": PROFILE_FORMAT,
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
    return read_profile(path, ConfigError)
