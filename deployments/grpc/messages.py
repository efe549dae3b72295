"""Between the gRPC API's messages and the HTTP API's JSON and headers, which have the same names."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from google.protobuf.json_format import MessageToDict, ParseDict, SerializeToJsonError
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Value

from deployments.http import errors as http_errors
from deployments.http.body.json_text import JsonShape
from deployments.http.body.reading import refuse_large_shape

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

    from deployments.config.limits import LimitsConfig

Answer = TypeVar("Answer", bound=Message)
_OBJECTIVES: Final = ("tier", "ttft_ms", "tpot_ms", "e2e_ms")
_NOT_OURS: Final = frozenset({"content-encoding", "content-length", "content-type", "origin"})
"""Metadata that describes the gRPC message, not the body that is made of it, or a web page.

Pages have a proxy for gRPC-Web before them, which knows its own host and says who may ask."""
_BYTES_OF_JSON: Final = 6
"""A message has no more for each of its JSON: the number of a Struct takes it eleven, and two of JSON."""
_ANY_VALUE: Final = Value.DESCRIPTOR.full_name
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
        values = _values(request)
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
    texts = [f"{_json(name)}:{_json(value)}" for name, value in fields]
    if inside := written[1:-1].strip():
        texts.append(inside)
    return ("{" + ",".join(texts) + "}").encode()


def _values(request: Message) -> dict[str, Any]:
    """What a message says, as JSON has it.

    Raises:
        SerializeToJsonError: for a number that JSON does not have. Of one outside a Struct protobuf makes a
            text, such as "NaN", which would be read as that number again.
    """
    for field, value in request.ListFields():
        held = value.values() if _kind_of(field).is_map else [value]
        if not all(math.isfinite(each) for each in held if isinstance(each, float)):
            raise SerializeToJsonError(f"{field.name} is no number of JSON")
    values: dict[str, Any] = _with_integers(MessageToDict(request, preserving_proto_field_name=True))
    return values


def _json(value: Any) -> str:
    """Its text, no longer than HTTP clients write it."""
    return json.dumps(value, ensure_ascii=False)


def refuse_large(request: Message, limits: LimitsConfig) -> None:
    """Refuse a message that stands for more than a body may be, in time linear in what may be.

    To make JSON of a message holds the interpreter, and takes ten times as long as to read as much JSON.

    Raises:
        HTTPError: 413 for its bytes, 400 for what is in it.
    """
    if request.ByteSize() > _BYTES_OF_JSON * limits.max_body_bytes:
        raise http_errors.too_large(limits.max_body_bytes)
    containers, values, names, left = 1, 0, 0, [request]
    while left:
        for field, value in left.pop().ListFields():
            kind = _kind_of(field)
            many = len(value) if kind.is_repeated else 1
            containers += many if kind.is_container else 0
            values += many
            names += many if kind.is_map else 1
            refuse_large_shape(JsonShape(containers, values, names, depth=0), limits, "message")
            if kind.has_messages:
                left += value.values() if kind.is_map else value if kind.is_repeated else [value]


class _Kind(NamedTuple):
    """What a field of a message holds, and how many of it there may be."""

    is_repeated: bool
    is_map: bool
    is_container: bool
    has_messages: bool


@lru_cache(maxsize=256)
def _kind_of(field: FieldDescriptor) -> _Kind:
    kind = field.message_type
    if kind is None:
        return _Kind(field.is_repeated, is_map=False, is_container=False, has_messages=False)
    if kind.GetOptions().map_entry:
        has_messages = kind.fields_by_name["value"].message_type is not None
        return _Kind(is_repeated=True, is_map=True, is_container=False, has_messages=has_messages)
    return _Kind(
        field.is_repeated, is_map=False, is_container=kind.full_name != _ANY_VALUE, has_messages=True
    )


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
        if isinstance(value, str) and name.replace("_", "-") not in _NOT_OURS
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
