"""Prefill profiles, which `slackserve calibrate` writes: how they are read.

Owns the version of the format, and which part of a profile predicts. What else it holds, and how it is
measured and written, is `deployments.calibration`'s.
"""

import json
from pathlib import Path
from typing import Final

from slo.predictor import PrefillPredictor

PROFILE_FORMAT: Final = 1


def read_profile(path: Path, refusal: type[Exception]) -> PrefillPredictor:
    """The line through the measured prefill times.

    Raises:
        refusal: when the file cannot be read or is something else.
    """
    try:
        values = json.loads(path.read_text())
        if (found := values["format"]) == PROFILE_FORMAT:
            return PrefillPredictor(**{name: float(value) for name, value in values["predictor"].items()})
        why = f"has format {found!r}; this version reads {PROFILE_FORMAT}"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"is not a profile ({error!r})"
    raise refusal(f"profile: {path} {why}; `slackserve calibrate` writes one")
