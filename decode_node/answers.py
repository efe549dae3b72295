"""The pieces of an engine's answer: what they say, and errors of our own in the same form.

vLLM answers with an object, or with server-sent events, one or several at a time; an error is either. A
decode replica sends each event of a stream as a `Piece`, with what another one needs to go on after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ray.serve.llm.openai_api_models import ErrorResponse

from slo.model_digest import UNTOLD, ModelDigest
from slo.request import ReplicaId

if TYPE_CHECKING:
    from sampling.carried import CacheUse

_OPENING: Final = re.compile(r'"delta":\{"role":"(?:[^"\\]|\\.)*"(?:,"content":"")?\}')
_CHOICE: Final = re.compile(r'"choices":\[\{"index":(\d+)')
_FINISHED: Final = '"finish_reason":"'
_ERROR_EVENT: Final = 'data: {"error"'
SERVER_ERRORS: Final = 500
"""Codes from here on are the server's fault, not the request's."""
NOT_TAKEN: Final = (ValueError, TypeError, OverflowError)
"""What a renderer or a tokenizer raises for input that it does not take; vLLM answers with 400."""
REQUEST_FAILED: Final = "engine_error"
"""Type of the error that a replica answers with when its engine fails a request and lives on."""
ENDED_BY_GRAMMAR: Final = "ended_by_grammar"
"""Type of the error for an answer that its own grammar ends."""


class End(NamedTuple):
    """Why an answer has ended, as vLLM says it in `finish_reason` and `stop_reason`."""

    finish_reason: str
    stop_reason: int | str | None


class Piece(NamedTuple):
    """An event of a stream, from a decode replica to the ingress; clients get its text alone.

    Attributes:
        text: The server-sent event.
        token_ids: What has been generated since the last piece; the text up to here is theirs.
        end: Why the answer ends with these tokens; None when it does not.
        bound: Why no other replica can go on after this piece; None when one can.
        cache: With the first tokens, what the prompt's first prefill had to do with the prefix cache.
        digest: With the first tokens, that of the model which has generated them.
        replica: With the first tokens, who sends the answer.
    """

    text: str
    token_ids: Sequence[int] = ()
    end: End | None = None
    bound: str | None = None
    cache: CacheUse | None = None
    digest: ModelDigest = UNTOLD
    replica: ReplicaId | None = None


def is_done(text: str) -> bool:
    """Whether a server-sent event is the last of its stream."""
    return text.rstrip().endswith("data: [DONE]")


def has_choice(text: str) -> bool:
    """Whether a server-sent event brings something of the answer: not its usage, its end or an error."""
    return '"choices":[{' in text


def choice_of(text: str) -> int:
    """Which of a request's answers a server-sent event is of; the first where it does not say."""
    found = _CHOICE.search(text)
    return 0 if found is None else int(found[1])


def is_role(text: str) -> bool:
    """Whether a server-sent event says who speaks, before a chat's first token, and nothing else.

    A tool parser may put the role into each of its deltas.
    """
    return _OPENING.search(text) is not None


def ends_answer(text: str) -> bool:
    """Whether a server-sent event is the last of an answer, of which a stream may have several."""
    return _FINISHED in text


@dataclass(frozen=True, slots=True)
class EngineError:
    """What an engine answers with instead of tokens.

    Attributes:
        message: For people.
        type: vLLM's or ours, such as "BadRequestError".
        code: An HTTP status.
        param: The request's field that is wrong. Of what our replicas do not take or give up, in how many
            seconds it may come again, where they say it; of what another one may answer, which it was.
    """

    message: str
    type: str
    code: int
    param: str | None = None

    def response(self) -> ErrorResponse:
        """The same in vLLM's form, to answer with."""
        return error_response(self.code, self.type, self.message, self.param)


def parts_of(piece: Any) -> list[Any]:
    """The events or the object that a piece of an answer is; vLLM may give several events at a time."""
    return piece if isinstance(piece, list) else [piece]


def error_in(piece: Any) -> EngineError | None:
    """The error that a piece of an answer is, or has in one of its events; None for none."""
    for part in parts_of(piece):
        if not isinstance(part, str):
            if (found := getattr(part, "error", None)) is not None:
                return _read(vars(found))
        elif part.startswith(_ERROR_EVENT):
            return _read(json.loads(part.removeprefix("data: "))["error"])
    return None


def error_response(code: int, kind: str, message: str, param: str | None = None) -> ErrorResponse:
    """An error to answer with, of the parts of an `EngineError`; `kind` is its type."""
    return ErrorResponse(error={"message": message, "type": kind, "param": param, "code": code})


def _read(fields: Mapping[str, Any]) -> EngineError:
    return EngineError(fields["message"], fields.get("type", ""), int(fields["code"]), fields.get("param"))
