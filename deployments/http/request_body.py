"""Reads a request body: JSON to one of vLLM's request models, or a refusal that names the field.

vLLM's models raise errors of several kinds, some of them by accident of what a client sent; whatever a body
causes here is the body's fault and answered with 400.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from vllm.exceptions import VLLMClientError

from deployments.http import errors as http_errors
from slo.errors import FieldError
from telemetry import logs

if TYPE_CHECKING:
    from pydantic import BaseModel


def parse(raw: bytes, model: type[BaseModel]) -> Any:
    """The body as a `model`.

    Raises:
        HTTPError: 400, naming the field at fault where there is one.
        FieldError: for a field that is given twice or cannot be encoded.
    """
    values = _json(raw)
    if not isinstance(values, dict):
        raise http_errors.bad_body("the body is not a JSON object")
    _refuse_lone_surrogates(values, "")
    try:
        body = model.model_validate(values)
    except ValidationError as error:
        raise _from_pydantic(error) from None
    except VLLMClientError as error:
        raise http_errors.bad_body(error.args[0], getattr(error, "parameter", None)) from None
    except Exception as error:  # noqa: BLE001 - whatever a body causes is the body's fault
        logs.event("body_not_understood", level=logging.WARNING, error=repr(error)[:500])
        raise http_errors.bad_body("the body does not have the shape that the API describes") from None
    _check_messages(body)
    return body


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except RecursionError:
        raise http_errors.bad_body("the body is nested too deeply") from None
    except ValueError as error:
        raise http_errors.bad_body(f"the body is not JSON: {error}") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise FieldError(name, "is given more than once", "give it once")
        values[name] = value
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


def _refuse_lone_surrogates(value: Any, path: str) -> None:
    """Text with half a surrogate pair cannot be encoded as UTF-8, so no tokenizer takes it."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            field = path.encode(errors="backslashreplace").decode() or "body"
            raise FieldError(field, "has half a surrogate pair", "send text that is valid Unicode") from None
    elif isinstance(value, dict):
        for name, item in value.items():
            _refuse_lone_surrogates(name, path)
            _refuse_lone_surrogates(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _refuse_lone_surrogates(item, f"{path}[{number}]")


def _from_pydantic(error: ValidationError) -> Exception:
    problem = error.errors(include_url=False)[0]
    param = ".".join(str(part) for part in problem["loc"]) or None
    return http_errors.bad_body(f"{param or 'body'}: {problem['msg']}", param)


def _check_messages(body: Any) -> None:
    for number, message in enumerate(getattr(body, "messages", ())):
        if not isinstance(message, dict):
            raise FieldError(f"messages[{number}]", "is not a message", "give role and content")
