"""How numbers are written for people.

Owns rounding and units; a number that is missing or not finite is a dash.
"""

from __future__ import annotations

import math
from typing import Final

MISSING: Final = "\N{EN DASH}"
TIMES: Final = "\N{MULTIPLICATION SIGN}"
_SPACE: Final = "\N{NO-BREAK SPACE}"
_NO_DECIMALS_FROM: Final = 99.95
_ONE_DECIMAL_FROM: Final = 9.995
_RATIO_ONE_DECIMAL_FROM: Final = 1.995


def is_finite(value: float | None) -> bool:
    """Whether there is a number to show."""
    return value is not None and math.isfinite(value)


def number(value: float | None) -> str:
    """Three significant digits, whole numbers from 100: 0.52, 5.10, 12.3, 4,096."""
    if value is None or not math.isfinite(value):
        return MISSING
    return _rounded(value, _ONE_DECIMAL_FROM)


def plain(value: float | None) -> str:
    """As `number`, without zeros at the end: 200, 0.5."""
    text = number(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def rate(value: float | None) -> str:
    """Requests per second, in words: `5.1 requests/s`."""
    return f"{plain(value)}{_SPACE}requests/s"


def ratio(value: float, reference: float) -> str:
    """A factor with a sign behind it, such as 4.8 or 1.07; a dash where there is nothing to divide by."""
    if not (is_finite(value) and is_finite(reference)) or reference <= 0:
        return MISSING
    return _rounded(value / reference, _RATIO_ONE_DECIMAL_FROM) + TIMES


def _rounded(value: float, one_decimal_from: float) -> str:
    decimals = 0 if abs(value) >= _NO_DECIMALS_FROM else 1 if abs(value) >= one_decimal_from else 2
    return f"{value:,.{decimals}f}"


def percent(fraction: float | None) -> str:
    """`97.4 %`; never rounded up to 100 %."""
    if fraction is None or not math.isfinite(fraction):
        return MISSING
    if fraction < 1:
        return f"{math.floor(fraction * 1000 + 1e-6) / 10:.1f}{_SPACE}%"
    return f"{fraction * 100:.0f}{_SPACE}%"


def level(key: str) -> str:
    """The name of a goodput level, `90 %` for "0.90"."""
    return f"{plain(float(key) * 100)}{_SPACE}%"


def milliseconds(value: float | None) -> str:
    """`3.20 ms`, or seconds from 10,000 ms."""
    if value is not None and math.isfinite(value) and value >= 10_000:  # noqa: PLR2004 - five digits
        return f"{plain(value / 1e3)}{_SPACE}s"
    return f"{plain(value)}{_SPACE}ms"
