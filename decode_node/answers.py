"""The pieces of an engine's answer: what they say, and errors of our own in the same form.

vLLM answers with an object, or with server-sent events, one or several at a time; an error is either.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ray.serve.llm.openai_api_models import ErrorResponse

if TYPE_CHECKING:
    from collections.abc import Mapping

_ERROR_EVENT: Final = 'data: {"error"'
_SERVER_ERRORS: Final = 500


@dataclass(frozen=True, slots=True)
class EngineError:
    """What an engine answers with instead of tokens.

    Attributes:
        message: For people.
        type: vLLM's or ours, such as "BadRequestError".
        code: An HTTP status.
        param: The request's field that is wrong, or what our replicas put there.
    """

    message: str
    type: str
    code: int
    param: str | None = None

    @property
    def is_servers(self) -> bool:
        """Whether the server is to blame, not the request."""
        return self.code >= _SERVER_ERRORS


def error_in(piece: Any) -> EngineError | None:
    """The error that a piece of an answer is, or has in one of its events; None for none."""
    for part in piece if isinstance(piece, list) else [piece]:
        if not isinstance(part, str):
            if (found := getattr(part, "error", None)) is not None:
                return _read(vars(found))
        elif part.startswith(_ERROR_EVENT):
            return _read(json.loads(part.removeprefix("data: "))["error"])
    return None


def error_response(code: int, kind: str, message: str, param: str | None = None) -> ErrorResponse:
    """An error to answer with, of the parts of an `EngineError`; `kind` is its type."""
    return ErrorResponse(error={"message": message, "type": kind, "param": param, "code": code})


def is_answer(piece: Any) -> bool:
    """Whether a piece is part of an answer: not an error, nor the end of a stream."""
    text = piece[0] if isinstance(piece, list) and piece else piece
    if isinstance(text, str):
        return text.startswith("data: {") and not text.startswith(_ERROR_EVENT)
    return getattr(piece, "error", None) is None


def is_preamble(piece: Any) -> bool:
    """Whether a piece only says who will speak: a chat's stream begins so, even one that fails then."""
    texts = piece if isinstance(piece, list) else [piece]
    return all(isinstance(text, str) and _names_the_role_alone(text) for text in texts)


def _read(fields: Mapping[str, Any]) -> EngineError:
    return EngineError(fields["message"], fields.get("type", ""), int(fields["code"]), fields.get("param"))


def _names_the_role_alone(text: str) -> bool:
    if not text.startswith("data: {") or '"role"' not in text:
        return False
    choices = json.loads(text.removeprefix("data: ")).get("choices") or [{}]
    return all(_is_empty(choice) for choice in choices)


def _is_empty(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None or choice.get("finish_reason"):
        return False
    return not any(value for name, value in delta.items() if name != "role")
