"""Reads the profiles that `slackserve calibrate` writes.

Owns the version of the format, and the parts of a profile that predict. What else it holds, and how it is
measured and written, is `deployments.calibrate.profile`'s.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from slo.predict.handoff import HandoffFit, Link
from slo.predict.measured_on import UNKNOWN, Subject
from slo.predict.prefill_time import PrefillPredictor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PROFILE_FORMAT: Final = 2
READABLE: Final = (1, PROFILE_FORMAT)
"""Format 1 has prefill times only, without their subject."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The measured times of one subject.

    Attributes:
        predictor: The curve through prefill times; its handoff is the part that does not depend on length.
        subject: What was measured.
        handoff: From the end of a prefill to its first token; None when it was not measured.
        kv_bytes_per_token: KV bytes of one token on the subject; 0 when the handoff was not measured.
    """

    predictor: PrefillPredictor
    subject: Subject = UNKNOWN
    handoff: HandoffFit | None = None
    kv_bytes_per_token: int = 0

    def link(self, kv_bytes_per_token: int) -> Link | None:
        """The link, for a model with so many KV bytes per token; None when it was not measured.

        The measured seconds per token are kept, even when the subject's tokens had another number of bytes.
        """
        if (handoff := self.handoff) is None:
            return None
        per_token_s = handoff.transfer_per_token_s
        return Link(kv_bytes_per_token / per_token_s if per_token_s > 0 else float("inf"), handoff.latency_s)


def read_whole_profile(path: Path, refusal: type[Exception]) -> Profile:
    """Read the parts of a profile that predict.

    Raises:
        refusal: when the file cannot be read or is something else.
    """
    try:
        values = json.loads(path.read_text())
        if (found := values["format"]) in READABLE:
            return _profile(values)
        readable = " and ".join(map(str, READABLE))
        why = f"has format {found!r}; this version reads {readable}"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"is not a profile ({error!r})"
    raise refusal(f"profile: {path} {why}; `slackserve calibrate` writes one")


def read_profile(path: Path, refusal: type[Exception]) -> PrefillPredictor:
    """Read the curve through the measured prefill times.

    Raises:
        refusal: when the file cannot be read or is something else.
    """
    return read_whole_profile(path, refusal).predictor


def _profile(values: Mapping[str, Any]) -> Profile:
    predictor = PrefillPredictor(**_numbers(values["predictor"]))
    if values["format"] == 1 or (handoff := values.get("handoff")) is None:
        return Profile(predictor, _subject(values))
    fit = HandoffFit(**_numbers({part.name: handoff[part.name] for part in fields(HandoffFit)}))
    return Profile(predictor, _subject(values), fit, int(handoff["kv_bytes_per_token"]))


def _subject(values: Mapping[str, Any]) -> Subject:
    """The profile's subject; `UNKNOWN` where the file does not say."""
    about = values.get("about", {}) if values["format"] > 1 else {}
    return Subject(**{part.name: about.get(part.name) for part in fields(Subject)})


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
