"""Another API's words for a chat completion, which answers it.

A chat's answer is made as every chat's is; a wording says it, whole or event by event, and names fields as
the client has.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from deployments.http.errors import HTTPError
from slo.errors import FieldError


class Wording(Protocol):
    """Of one request, of the API that has this path."""

    path: str

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The answer that a chat's is."""

    def events(self, pieces: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """The events of an answer whose chat completion streams `pieces`, server-sent events too."""

    def field(self, name: str) -> str:
        """What the client has called a chat's field."""


def renamed(error: FieldError | HTTPError, field: Callable[[str], str]) -> FieldError | HTTPError:
    """A refusal of a chat that names the field that the client has sent.

    Args:
        error: The refusal.
        field: Its name for a chat's field.
    """
    if isinstance(error, HTTPError):
        error.param = None if error.param is None else field(error.param)
        return error
    return FieldError(field(error.field), error.problem, error.valid)
