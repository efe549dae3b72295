"""Reads a request body: JSON to one of vLLM's request models, or a refusal that names the field.

vLLM's models raise errors of several kinds, some of them by accident of what a client sent; whatever a body
causes here is the body's fault and answered with 400.
"""

from __future__ import annotations

import logging
import re
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import ValidationError
from ray.llm._internal.serve.core.configs.openai_api_models import TokenizeChatRequest
from vllm.exceptions import VLLMClientError
from vllm.v1.structured_output import backend_xgrammar  # noqa: F401 - lest the first tag of a request import it

from deployments.config.limits import LimitsConfig
from deployments.http import errors as http_errors
from deployments.http.body import asks
from deployments.http.body.allowed import fields_of, served_fields
from deployments.http.body.grammar_size import refuse_large_grammars
from deployments.http.body.hints import refuse_large_hints
from deployments.http.body.json_text import JsonShape, json_shape, read_object
from deployments.http.body.media import refuse_media
from deployments.http.body.values import function_of
from slo.admission.tenants import Tenant
from slo.errors import FieldError
from telemetry import logs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic import BaseModel
    from pydantic_core import ErrorDetails

_SHOWN_LITERALS: Final = 8
_ITEMS_AT_ONCE: Final = 32
"""Of a response's input: a wrong one is tried as sixty types, and the end tells what was wrong as each."""
_PLAIN_MESSAGE: Final = frozenset({"role", "content"})
_ROLES: Final = frozenset({"user", "assistant", "system", "developer"})
_MOST_PROBLEMS: Final = 10_000
_MISSING: Final = "missing"
_LITERAL: Final = "literal_error"
_BETWEEN_LITERALS: Final = re.compile(", | or ")
_ANOTHER_TYPE: Final = re.compile(rf"_type$|_parsing$|^{_LITERAL}$")


def read(raw: bytes, model: type[BaseModel], limits: LimitsConfig, tenant: Tenant) -> Any:
    """The body of a tenant's request as a `model`, within all limits and ready to be placed.

    Raises:
        HTTPError: as `parse`.
        FieldError: as `parse`, and for what is more than one request may ask for.
    """
    return read_values(values_of(raw, limits), model, limits, tenant)


def read_values(values: dict[str, Any], model: type[BaseModel], limits: LimitsConfig, tenant: Tenant) -> Any:
    """As `read`, of a body that has been made of another one.

    Raises:
        HTTPError: as `parse`.
        FieldError: as `read`.
    """
    body = as_model(values, model, limits)
    try:
        asks.refuse_internal_xargs(body)
        asks.materialise(body)
        asks.refuse_excess(body, limits)
    except (ValidationError, VLLMClientError) as error:  # what pydantic has left for later
        raise _refused(error, values, _unread(body)) from None
    asks.keep_apart(body, tenant)
    return body


def read_chat_to_convert(values: dict[str, Any], limits: LimitsConfig) -> TokenizeChatRequest:
    """A chat of which the tokens of its prompt are asked for.

    Raises:
        HTTPError: as `parse`.
        FieldError: as `parse`, and for what is not text.
    """
    body = as_model(values, TokenizeChatRequest, limits)
    try:
        asks.materialise(body)
    except (ValidationError, VLLMClientError) as error:  # what pydantic has left for later
        raise _refused(error, values, _unread(body)) from None
    if asks.only_decode(body):
        raise FieldError("messages", "has more than text, whose tokens are not counted", "send text alone")
    return body


def parse(raw: bytes, model: type[BaseModel], limits: LimitsConfig) -> Any:
    """The body as a `model`.

    Raises:
        HTTPError: 400, naming the field or the limit at fault where there is one.
        FieldError: for a field that is given twice or cannot be encoded.
    """
    return as_model(values_of(raw, limits), model, limits)


def values_of(raw: bytes, limits: LimitsConfig) -> dict[str, Any]:
    """The body as JSON, whose shape is within the limits and whose text can be encoded.

    Raises:
        HTTPError: as `parse`.
        FieldError: as `parse`.
    """
    refuse_large_shape(json_shape(raw, limits.max_json_containers), limits)
    return read_object(raw)


def as_model(values: dict[str, Any], model: type[BaseModel], limits: LimitsConfig) -> Any:
    """The body `values` as a `model`.

    Raises:
        HTTPError: as `parse`.
        FieldError: for a field that is not served, or more than the limits allow.
    """
    fields = fields_of(model.model_fields)
    values = served_fields(values, fields, ignores=limits.unknown_fields == "ignore")
    refuse_large_hints(values)
    refuse_large_grammars(values, limits)
    _refuse_what_is_no_object(values)
    if fields.is_chat:
        refuse_media(values.get("messages"), limits.media_domains, limits.max_media)
        _refuse_large_arguments(values.get("messages"), limits)
    values = {**values, **asks.allowed_default(values, model, limits)}
    items, read = values.get("input"), 0
    try:
        if isinstance(items, list) and len(items) > (first := _items_at_first(items)):
            body: Any = model.model_validate({**values, "input": items[:first]})
            for read in range(first, len(items), _ITEMS_AT_ONCE):
                piece = items[read : read + _ITEMS_AT_ONCE]
                if not all(map(_is_plain_message, piece)):
                    part: Any = model.model_validate({"input": piece})
                    piece = part.input
                body.input += piece
        else:
            body = model.model_validate(values)
    except (ValidationError, VLLMClientError) as error:
        raise _refused(error, values, _read_later(error, values, model), read) from None
    except Exception as error:  # noqa: BLE001 - whatever a body causes is the body's fault
        logs.event("body_not_understood", level=logging.WARNING, error=repr(error)[:500])
        raise http_errors.bad_body("the body does not have the shape that the API describes") from None
    if fields.is_chat:
        _check_messages(body)
    return body


def _items_at_first(items: list[Any]) -> int:
    return 1 if all(map(_is_plain_message, items[:_ITEMS_AT_ONCE])) else _ITEMS_AT_ONCE


def _is_plain_message(item: Any) -> bool:
    """Whether a response's input item is surely read as it is; trying it as all types takes 0.1 ms."""
    return (
        isinstance(item, dict)
        and _PLAIN_MESSAGE <= item.keys() <= {*_PLAIN_MESSAGE, "type"}
        and item.get("type", "message") == "message"
        and isinstance(item["content"], str)
        and isinstance(item["role"], str)
        and item["role"] in _ROLES
    )


def refuse_large_shape(
    shape: JsonShape, limits: LimitsConfig, whose: str = "body", field: str | None = None
) -> None:
    """Refuse what has more in it than a body may.

    Raises:
        HTTPError: 400, naming the limit.
    """
    for what, found, name in (
        ("lists and objects", shape.containers, "max_json_containers"),
        ("values", shape.values, "max_json_values"),
        ("names", shape.names, "max_json_names"),
        ("lists and objects inside each other", shape.depth, "max_json_depth"),
    ):
        if found > (limit := getattr(limits, name)):
            message = f"the {whose} has {found} {what}; limits.{name} allows {limit}"
            raise http_errors.bad_body(message, field)


def _refuse_large_arguments(messages: Any, limits: LimitsConfig) -> None:
    """Hold what calls of tools were given against the limits of a body; vLLM parses these texts, too."""
    shapes = [json_shape(text.encode(), limits.max_json_containers) for text in _arguments(messages)]
    containers, values, names, depths = zip(JsonShape(0, 0, 0, 0), *shapes, strict=True)
    whole = JsonShape(sum(containers), sum(values), sum(names), max(depths))
    refuse_large_shape(whole, limits, "JSON in arguments of tool calls", "messages")


def _arguments(messages: Any) -> Iterator[str]:
    for message in messages if isinstance(messages, list) else ():
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else ():
            if isinstance(text := function_of(call).get("arguments"), str):
                yield text


def _refuse_what_is_no_object(values: Mapping[str, Any]) -> None:
    """Refuse it where objects belong: pydantic would try each as all of their types, and tell of each try."""
    lists: list[tuple[str, Any]] = [(name, values.get(name)) for name in ("messages", "input", "tools")]
    for name, within in (("input", ("content", "output", "summary")), ("tools", ("tools",))):
        given = values.get(name)
        lists += [
            (f"{name}[{number}].{inner}", one.get(inner))
            for number, one in enumerate(given if isinstance(given, list) else ())
            if isinstance(one, dict)
            for inner in within
        ]
    for field, found in lists:
        for number, one in enumerate(found if isinstance(found, list) else ()):
            if not isinstance(one, dict):
                raise FieldError(
                    f"{field}[{number}]", "is not an object", "send one, as the API describes it"
                )


def _refused(
    error: ValidationError | VLLMClientError, values: Any, inside: tuple[Any, ...] = (), read: int = 0
) -> Exception:
    """The refusal of the body `values`.

    Args:
        error: What was found.
        values: The body.
        inside: The part of it that its places are in, if that is read later.
        read: How many items of the input were read before.
    """
    if isinstance(error, VLLMClientError):
        return http_errors.bad_body(error.args[0], getattr(error, "parameter", None))
    if (count := error.error_count()) > _MOST_PROBLEMS:  # each takes its time to be told
        return http_errors.bad_body(
            f"the body does not have the shape that the API describes {count} times over"
        )
    here = values
    for part in inside:
        here = here[part]
    problems = error.errors(include_url=False)
    for problem in problems if read else ():
        problem["loc"] = _behind(read, problem["loc"])
    problem = _reason(problems, here).problem
    field, message = _field(values, inside, problem), problem["msg"]
    if problem["type"] == _LITERAL:
        literals = (each for each in problems if each["type"] == _LITERAL)
        message = _other_literal([each for each in literals if _field(values, inside, each) == field])
    return http_errors.bad_body(f"{field or 'body'}: {message}", field or None)


def _behind(read: int, place: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """A place whose number in a list is counted from where that was read on."""
    at = next((at for at, part in enumerate(place) if isinstance(part, int)), len(place))
    return (
        *place[:at],
        *(read + part for part in place[at : at + 1] if isinstance(part, int)),
        *place[at + 1 :],
    )


def _other_literal(problems: list[ErrorDetails]) -> str:
    """The message of a field that is not what it is in any type of its object."""
    texts = (_BETWEEN_LITERALS.split(problem["ctx"]["expected"]) for problem in problems)
    literals = list(dict.fromkeys(chain.from_iterable(texts)))
    if len(literals) > _SHOWN_LITERALS:
        literals[_SHOWN_LITERALS:] = [f"one of {len(literals) - _SHOWN_LITERALS} others"]
    *first, last = literals
    return f"Input should be {', '.join(first)} or {last}" if first else f"Input should be {last}"


def _field(values: Any, inside: tuple[Any, ...], problem: ErrorDetails) -> str:
    return _path(values, (*inside, *problem["loc"]), is_missing=problem["type"] == _MISSING)


class _Reason(NamedTuple):
    """Why a value is refused, as of one type that it may have; the largest is of the type that was meant."""

    problem: ErrorDetails
    is_of_kind: bool = True
    """Whether the value is of that type by its own `type`, `role` or the like."""
    minus_wrong: int = 0
    """How many fields of the value are wrong, if it is an object; less than 0, so that fewer are more."""
    depth: int = 0
    """How many parts of the problem's place, in the value, were sent."""
    numbers: tuple[int, ...] = ()
    """The places in lists among them: what stands before was right."""
    is_no_type: bool = True
    """Whether the problem is more than that something has another type."""


def _reason(problems: list[ErrorDetails], here: Any, at: int = 0) -> _Reason:
    """Why the value `here` is refused, to which `at` parts of the problems' places lead."""
    first = problems[0]
    if at == len(first["loc"]):
        return _Reason(first, is_no_type=not _ANOTHER_TYPE.search(first["type"]))
    problems = [each for each in problems if len(each["loc"]) > at]
    part = first["loc"][at]
    is_of_kind = not any(len(each["loc"]) == at + 1 and _says_kind(each, here) for each in problems)
    minus_wrong = -len({each["loc"][at] for each in problems}) if isinstance(here, dict) else 0
    if _is_in(part, here):
        inside = _reason([each for each in problems if each["loc"][at] == part], here[part], at + 1)
        numbers = (part, *inside.numbers) if isinstance(part, int) else inside.numbers
        return inside._replace(
            is_of_kind=is_of_kind, minus_wrong=minus_wrong, depth=1 + inside.depth, numbers=numbers
        )
    if first["type"] == _MISSING and at + 1 == len(first["loc"]):
        return _Reason(first, is_of_kind, minus_wrong)
    types: dict[str | int, list[ErrorDetails]] = {}  # parts of a place that were not sent are names of types
    for each in problems:
        types.setdefault(each["loc"][at], []).append(each)
    return max((_reason(of_type, here, at + 1) for of_type in types.values()), key=lambda reason: reason[1:])


def _says_kind(problem: ErrorDetails, here: Any) -> bool:
    """Whether a field of the object `here` is wrong that says what it is; only its id may, of a reference."""
    name = problem["loc"][-1]
    if problem["type"] == _MISSING:
        return name == "type" or (name == "id" and "type" not in here)
    return problem["type"] == _LITERAL


def _is_in(part: str | int, here: Any) -> bool:
    if isinstance(here, dict):
        return part in here
    return isinstance(here, list) and isinstance(part, int) and 0 <= part < len(here)


def _path(values: Any, place: tuple[Any, ...], *, is_missing: bool) -> str:
    """The field at a place in a body as pydantic has it, which names types of its own on the way."""
    path, here = "", values
    for at, part in enumerate(place, start=1):
        if _is_in(part, here):
            here = here[part]
        elif not (is_missing and at == len(place)):
            continue
        path += f"[{part}]" if isinstance(part, int) else f"{path and '.'}{part[:100]}"
    return path


def _unread(body: Any) -> tuple[Any, ...]:
    """The place of the first list in a chat's messages that could not be read; none in any other body."""
    for number, message in enumerate(getattr(body, "messages", ())):
        for field in ("content", "tool_calls"):
            value = message.get(field)
            if value is not None and not isinstance(value, str | list):
                return "messages", number, field
    return ()


def _read_later(error: Exception, values: Any, model: type[BaseModel]) -> tuple[Any, ...]:
    """The place of the tool calls that an error is in, if it is in some: vLLM reads them last, and apart."""
    if not isinstance(error, ValidationError) or error.error_count() > _MOST_PROBLEMS:
        return ()
    place = error.errors(include_url=False)[0]["loc"]
    if not place or not isinstance(place[0], int):
        return ()
    for number, message in enumerate(values["messages"]):
        try:
            model.model_validate({"messages": [message]})
        except ValidationError:
            return "messages", number, "tool_calls"
    return ()


def _check_messages(body: Any) -> None:
    for number, message in enumerate(getattr(body, "messages", ())):
        if not isinstance(message, dict):
            raise FieldError(f"messages[{number}]", "is not a message", "give role and content")
