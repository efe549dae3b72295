"""What the answer of a server means for a request of a batch."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from deployments.client import error_code

_OK: Final = 200
_UNAUTHORIZED: Final = 401
_NOT_FOUND: Final = 404
_TOO_MANY: Final = 429
_ERROR: Final = 500
_UNAVAILABLE: Final = 503
_TRANSIENT: Final = frozenset({408, 409, 425})
_FAILED_WHILE_RUN: Final = frozenset({"decode_failed", "prefill_failed"})
"""Codes of 503 of requests that replicas have begun, and failed with, perhaps because of them."""
_NO_ROUTE: Final = "Path '"
"""How Serve's proxy begins a 404 while there is no application behind it."""
_TIER: Final = "x-slo-tier"


class Verdict(enum.Enum):
    """What is done with a request."""

    ANSWERED = enum.auto()
    WRONG = enum.auto()
    """It would be so again."""
    REFUSED = enum.auto()
    """It has not been begun, and is sent again until time is up."""
    FAILED = enum.auto()
    """It may have been begun, and is sent again some times."""
    OF_THE_RUN = enum.auto()
    """Each request would be told the same."""


def judge(
    status: int, headers: Mapping[str, str], said: Any, *, text: str = "", names_tier: bool = False
) -> Verdict:
    """Judge an answer.

    Args:
        status: Of HTTP.
        headers: Of the answer, by name in any case.
        said: Its body as JSON; None where it is none.
        text: How its body begins.
        names_tier: See `BatchRequest`.
    """
    if status == _OK:
        return Verdict.ANSWERED if isinstance(said, dict) else Verdict.FAILED
    if status == _UNAUTHORIZED or (_param(said) == _TIER and not names_tier):
        return Verdict.OF_THE_RUN
    if headers.get("x-should-retry") == "false":
        return Verdict.WRONG
    if status == _TOO_MANY or (status == _NOT_FOUND and text.startswith(_NO_ROUTE)):
        return Verdict.REFUSED
    if status == _UNAVAILABLE:
        return Verdict.FAILED if error_code(said) in _FAILED_WHILE_RUN else Verdict.REFUSED
    return Verdict.FAILED if status >= _ERROR or status in _TRANSIENT else Verdict.WRONG


def retry_after_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """How long a server asks not to be asked again (RFC 9110, 10.2.3); None when it does not say."""
    given = headers.get("retry-after", "")
    if given.isdecimal():
        return float(given)
    try:
        at = parsedate_to_datetime(given)
    except ValueError:
        return None
    return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - now).total_seconds())


def _param(said: Any) -> Any:
    error = said.get("error") if isinstance(said, dict) else None
    return error.get("param") if isinstance(error, dict) else None
