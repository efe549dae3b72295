"""How long the head of a request says that its body is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_DIGITS: Final = 18
"""As many as a length has, and more than any limit; Python refuses to read thousands of them."""


def is_longer(headers: Iterable[tuple[bytes, bytes]], most_bytes: int) -> bool:
    """Whether a body is said to be longer than that, by the header of that spelling alone."""
    length = dict(headers).get(b"content-length", b"0")
    return length.isdigit() and int(length.lstrip(b"0")[:_DIGITS] or b"0") > most_bytes
