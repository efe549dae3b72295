"""Reads a request body: JSON to one of vLLM's request models, or a refusal that names the field.

vLLM's models raise errors of several kinds, some of them by accident of what a client sent; whatever a body
causes here is the body's fault and answered with 400.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError
from ray.llm._internal.serve.core.configs.openai_api_models import TokenizeChatRequest
from vllm.exceptions import VLLMClientError
from vllm.v1.structured_output import backend_xgrammar  # noqa: F401 - lest the first tag of a request import it

from deployments.config.limits import LimitsConfig
from deployments.http import errors as http_errors
from deployments.http.body import asks
from deployments.http.body.allowed import fields_of, served_fields
from deployments.http.body.blame import read_later, refusal, unread
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

_ITEMS_AT_ONCE: Final = 32
"""Of a response's input: a wrong one is tried as sixty types, and the end tells what was wrong as each."""
_PLAIN_MESSAGE: Final = frozenset({"role", "content"})
_ROLES: Final = frozenset({"user", "assistant", "system", "developer"})


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
        raise refusal(error, values, unread(body)) from None
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
        raise refusal(error, values, unread(body)) from None
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
    body = _validated(values, model)
    if fields.is_chat:
        _check_messages(body)
    return body


def _validated(values: dict[str, Any], model: type[BaseModel]) -> Any:
    """The body `values` as a `model`; the items of an input are tried a few at a time.

    Raises:
        HTTPError: 400, naming the field at fault.
    """
    items = values.get("input")
    if not isinstance(items, list) or len(items) <= (first := _items_at_first(items)):
        return _tried(values, model, values)
    body = _tried({**values, "input": items[:first]}, model, values)
    for before in range(first, len(items), _ITEMS_AT_ONCE):
        piece = items[before : before + _ITEMS_AT_ONCE]
        if not all(map(_is_plain_message, piece)):
            piece = _tried({"input": piece}, model, values, before).input
        body.input += piece
    return body


def _tried(part: dict[str, Any], model: type[BaseModel], values: dict[str, Any], before: int = 0) -> Any:
    """A part of the body `values` as a `model`, of whose input so many items were read before."""
    try:
        return model.model_validate(part)
    except (ValidationError, VLLMClientError) as error:
        raise refusal(error, values, read_later(error, values, model), before) from None
    except Exception as error:  # noqa: BLE001 - whatever a body causes is the body's fault
        logs.event("body_not_understood", level=logging.WARNING, error=repr(error)[:500])
        raise http_errors.bad_body("the body does not have the shape that the API describes") from None


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


def _check_messages(body: Any) -> None:
    for number, message in enumerate(getattr(body, "messages", ())):
        if not isinstance(message, dict):
            raise FieldError(f"messages[{number}]", "is not a message", "give role and content")
