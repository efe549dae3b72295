"""Reads the profiles that `slackserve calibrate` writes.

Owns the version of the format, and the parts of a profile that predict. What else it holds, and how it is
measured and written, is `deployments.calibrate.profile`'s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from slo.predict.handoff import Link, TransferFit
from slo.predict.measured_on import UNKNOWN, Subject
from slo.predict.prefill_time import PrefillPredictor

PROFILE_FORMAT: Final = 4
READABLE: Final = (3, PROFILE_FORMAT)
"""Before 4 there is no floor."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The measured times of one subject.

    Attributes:
        predictor: The curve through prefill times; its handoff is 0 when it was not measured.
        transfer: Of KV cache; None when it was not measured.
        kv_bytes_per_token: KV bytes of one token on the subject; 0 when the transfer was not measured.
    """

    predictor: PrefillPredictor
    subject: Subject = UNKNOWN
    transfer: TransferFit | None = None
    kv_bytes_per_token: int = 0

    def link(self, kv_bytes_per_token: int) -> Link | None:
        """The link, for a model with so many KV bytes per token; None when it was not measured.

        The measured seconds per token are kept, even when the subject's tokens had another number of bytes.
        """
        if (transfer := self.transfer) is None:
            return None
        per_token_s = transfer.per_token_s
        return Link(kv_bytes_per_token / per_token_s if per_token_s > 0 else float("inf"), transfer.latency_s)


def read_profile(path: Path, refusal: type[Exception]) -> Profile:
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


def _profile(values: Mapping[str, Any]) -> Profile:
    return Profile(PrefillPredictor(**_numbers(values["predictor"])), _subject(values), *_transfer(values))


def _transfer(values: Mapping[str, Any]) -> tuple[TransferFit | None, int]:
    """The profile's transfer, and KV bytes of a token."""
    if (found := values.get("transfer")) is None:
        return None, 0
    numbers = _numbers({name: found[name] for name in ("latency_s", "per_token_s")})
    return TransferFit(**numbers), int(found["kv_bytes_per_token"])


def _subject(values: Mapping[str, Any]) -> Subject:
    """The profile's subject; `UNKNOWN` where the file does not say."""
    about = values.get("about", {})
    return Subject(**{part.name: about.get(part.name) for part in fields(Subject)})


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: float(value) for name, value in values.items()}
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            raise ValueError(f"{name} is {number}: times are finite and not negative")
    return numbers
