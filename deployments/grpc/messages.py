"""Between the gRPC API's messages and the HTTP API's JSON and headers, which have the same names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from google.protobuf.json_format import MessageToDict, ParseDict, SerializeToJsonError
from google.protobuf.message import Message

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

Answer = TypeVar("Answer", bound=Message)
_OBJECTIVES: Final = ("tier", "ttft_ms", "tpot_ms", "e2e_ms")
_NOT_OURS: Final = frozenset({"content-encoding", "content-length", "content-type", "origin"})
"""Metadata that describes the gRPC message, not the body that is made of it, or a web page.

Pages have a proxy for gRPC-Web before them, which knows its own host and says who may ask."""
_CONSTANT: Final = frozenset({"object"})
"""Fields of an answer that say the same in each."""
_EXACT_BELOW: Final = 2**53
"""A larger floating-point number may not be the integer that was meant."""


def request_body(request: Message, *, stream: bool) -> bytes:
    """The body of a chat or text completion, as an HTTP client would send it.

    `extra_json` goes into it as it is written. A field that is given both by itself and in `extra` is there
    twice, and refused for that as in any body.
    """
    try:
        values = _with_integers(MessageToDict(request, preserving_proto_field_name=True))
    except SerializeToJsonError:
        return b"NaN"  # a number that JSON does not have is refused as it is over HTTP
    values.pop("objective", None)
    extra, written = values.pop("extra", {}), values.pop("extra_json", "").strip()
    if written and not (written.startswith("{") and written.endswith("}")):
        return str(written).encode()  # is refused as a body that is no object
    if "seed" in values:
        values["seed"] = int(values["seed"])  # JSON's form of 64 bits is text
    if "prompt_token_ids" in values:
        values["prompt"] = values.pop("prompt_token_ids").get("ids", [])
    for message in values.get("messages", []):
        if "content_parts" in message:
            message["content"] = message.pop("content_parts").get("parts", [])
        for call in message.get("tool_calls", []):
            if "function" in call:  # empty arguments are not there, and have to be
                call["function"].setdefault("arguments", "")
    fields = [*values.items(), ("stream", stream), *extra.items()]
    texts = [f"{json.dumps(name)}:{json.dumps(value)}" for name, value in fields]
    if inside := written[1:-1].strip():
        texts.append(inside)
    return ("{" + ",".join(texts) + "}").encode()


def _with_integers(value: Any) -> Any:
    """A JSON value whose whole numbers are integers, as schemas need them: those of a Struct are not."""
    match value:
        case dict():
            return {name: _with_integers(each) for name, each in value.items()}
        case list():
            return [_with_integers(each) for each in value]
        case float() if value.is_integer() and abs(value) < _EXACT_BELOW:
            return int(value)
    return value


def request_headers(
    metadata: Iterable[tuple[str, str | bytes]], request: Any = None
) -> list[tuple[bytes, bytes]]:
    """The headers that say what metadata and a typed objective say."""
    headers = [
        (name.encode(), value.encode())
        for name, value in metadata
        if isinstance(value, str) and name not in _NOT_OURS
    ]
    if request is not None and "objective" in request.DESCRIPTOR.fields_by_name:
        objective = request.objective
        for name in _OBJECTIVES:
            if objective.HasField(name):
                header = f"x-slo-{name.replace('_', '-')}"
                headers.append((header.encode(), str(getattr(objective, name)).encode()))
    return headers


def parsed(values: Any, answer: Answer) -> Answer:
    """`answer` with what an answer's JSON says of its fields, and in `extra` of others."""
    ParseDict(_with_extra(values, answer.DESCRIPTOR), answer, ignore_unknown_fields=True)
    return answer


def _with_extra(value: Any, kind: Descriptor) -> Any:
    """The JSON of a message of that kind, what it has no fields for in `extra`, if it has that."""
    if isinstance(value, list):
        return [_with_extra(each, kind) for each in value]
    if not isinstance(value, dict) or kind.full_name.startswith("google."):
        return value
    known, extra = {}, {}
    for name, inner in value.items():
        field = kind.fields_by_name.get(name)
        if field is None:
            if inner is not None and name not in _CONSTANT:
                extra[name] = inner
        else:
            known[name] = inner if field.message_type is None else _with_extra(inner, field.message_type)
    if extra and "extra" in kind.fields_by_name:
        known["extra"] = extra
    return known
