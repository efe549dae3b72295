"""Which field of a request body is at fault, by what pydantic and vLLM say of it, and what a client is told.

pydantic tries a value as each of the types that it may have and tells of each try; the one that was meant is
found here. What vLLM reads later, or apart, it tells without its place in the body.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import ValidationError
from vllm.exceptions import VLLMClientError

from deployments.http import errors as http_errors

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic_core import ErrorDetails

_SHOWN_LITERALS: Final = 8
_MOST_PROBLEMS: Final = 10_000
_MISSING: Final = "missing"
_LITERAL: Final = "literal_error"
_BETWEEN_LITERALS: Final = re.compile(", | or ")
_ANOTHER_TYPE: Final = re.compile(rf"_type$|_parsing$|^{_LITERAL}$")


def refusal(
    error: ValidationError | VLLMClientError, values: Any, inside: tuple[Any, ...] = (), before: int = 0
) -> Exception:
    """The refusal of the body `values`.

    Args:
        error: What was found.
        values: The body.
        inside: The part of it that its places are in, if that is read later.
        before: How many items of the input were read before.
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
    for problem in problems if before else ():
        problem["loc"] = _behind(before, problem["loc"])
    problem = _reason(problems, here).problem
    field, message = _field(values, inside, problem), problem["msg"]
    if problem["type"] == _LITERAL:
        literals = (each for each in problems if each["type"] == _LITERAL)
        message = _other_literal([each for each in literals if _field(values, inside, each) == field])
    return http_errors.bad_body(f"{field or 'body'}: {message}", field or None)


def _behind(before: int, place: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """A place whose number in a list is counted from where that was read on."""
    at = next((at for at, part in enumerate(place) if isinstance(part, int)), len(place))
    return (
        *place[:at],
        *(before + part for part in place[at : at + 1] if isinstance(part, int)),
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


def unread(body: Any) -> tuple[Any, ...]:
    """The place of the first list in a chat's messages that could not be read; none in any other body."""
    for number, message in enumerate(getattr(body, "messages", ())):
        for field in ("content", "tool_calls"):
            value = message.get(field)
            if value is not None and not isinstance(value, str | list):
                return "messages", number, field
    return ()


def read_later(error: Exception, values: Any, model: type[BaseModel]) -> tuple[Any, ...]:
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
