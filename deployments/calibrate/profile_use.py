"""Whether a profile is of what is to be served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deployments.config.errors import ConfigError
from slo.files.profile import Profile, read_whole_profile

if TYPE_CHECKING:
    from pathlib import Path

    from slo.predict.measured_on import Subject


def profile_of(path: Path, subject: Subject) -> Profile:
    """Read a profile that is to be used for `subject`.

    Raises:
        ConfigError: when the file cannot be read, is not a profile, or is one of something else.
    """
    profile = read_whole_profile(path, ConfigError)
    check_subject(str(path), profile.subject, subject)
    return profile


def check_subject(name: str, measured: Subject, served: Subject) -> None:
    """Refuse a profile of something else.

    Raises:
        ConfigError: naming what differs.
    """
    if differences := measured.differences(served):
        msg = (
            f"profile: {name} was measured on something else: {', '.join(differences)}; measure this "
            "deployment with `slackserve calibrate`, or leave `profile` out"
        )
        raise ConfigError(msg)
