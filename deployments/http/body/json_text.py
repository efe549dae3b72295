"""A body's JSON text: how deep and how large it is, found without parsing it, and what it says.

Parsing holds the interpreter, and with it every other stream of the process, for a time that grows with the
number of values, not of bytes: 2 MiB of `[],[],…` take seconds where 2 MiB of one string take milliseconds.
How large it may be is not decided here.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from deployments.http import errors as http_errors
from slo.errors import FieldError

_STRINGS: Final = re.compile(rb'(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"?)++', re.DOTALL)
"""Strings with nothing between them. Possessive, and the end may be missing, so that a text of unfinished
strings takes no longer; several in a row, which JSON never has, cost no more than one."""
_BRACKET: Final = re.compile(rb"[\[\]{}]")
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_DIGITS_ALIKE: Final = bytes.maketrans(b"123456789E", b"000000000e")
_LONG_NUMBERS: Final = (b"0" * 19, b"0e000", b"0e+000")
"""Perhaps a number that is out of range, with all digits alike; nothing else is."""
_INTEGERS: Final = range(-(2**63), 2**63)
_SHOWN_DIGITS: Final = 24


class JsonShape(NamedTuple):
    """Of a text that need not be valid JSON.

    Attributes:
        containers: Lists and objects.
        values: Values in them.
        names: Names in objects, each time that one is given.
        depth: Containers inside each other; 0 when there are more than were to be counted.
    """

    containers: int
    values: int
    names: int
    depth: int


def json_shape(raw: bytes, max_containers: int) -> JsonShape:
    """The shape of a JSON text, in time linear in its bytes.

    Args:
        raw: The text, in UTF-8.
        max_containers: With more the depth is not looked for.
    """
    outside = _STRINGS.sub(b"", raw)
    containers = outside.count(b"[") + outside.count(b"{")
    values = containers + outside.count(b",")
    names = outside.count(b":")
    if containers > max_containers:
        return JsonShape(containers, values, names, 0)
    depth = deepest = 0
    for bracket in _BRACKET.findall(outside):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return JsonShape(containers, values, names, deepest)


def read_object(raw: bytes) -> dict[str, Any]:
    """What a JSON text says that is an object, all of which can be encoded and sent on.

    Raises:
        HTTPError: 400 when it is not JSON, or no object.
        FieldError: for a field that is given twice, a number that does not fit into 64 bits, or half a
            surrogate pair.
    """
    out_of_range: list[_OutOfRange] = []
    values = _json(raw, out_of_range)
    if not isinstance(values, dict):
        raise http_errors.bad_body("the body is not a JSON object")
    if out_of_range:
        _refuse_out_of_range(values, "")
    if _SURROGATE.search(raw):
        _refuse_lone_surrogates(values, "")
    return values


class _OutOfRange(NamedTuple):
    """Stands for a number that no engine takes: what the engines' processes send each other has 64 bits."""

    text: str
    valid: str


def _json(raw: bytes, out_of_range: list[_OutOfRange]) -> Any:
    """What a JSON text says; the numbers in it that are out of range are put into the list as well."""

    def in_range(found: float | _OutOfRange) -> float | _OutOfRange:
        if isinstance(found, _OutOfRange):
            out_of_range.append(found)
        return found

    alike = raw.translate(_DIGITS_ALIKE)  # a tenth of the time of a regular expression
    has_long = any(number in alike for number in _LONG_NUMBERS)
    try:
        return json.loads(
            raw.decode("utf-8-sig"),
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_int=(lambda text: in_range(_integer(text))) if has_long else None,
            parse_float=(lambda text: in_range(_number(text))) if has_long else None,
        )
    except ValueError as error:
        raise http_errors.bad_body(f"the body is not JSON: {error}") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise FieldError(twice, "is given more than once", "give it once")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


def _integer(text: str) -> int | _OutOfRange:
    if len(text) > len(str(_INTEGERS.start)) or (value := int(text)) not in _INTEGERS:
        return _OutOfRange(text, f"give an integer from {_INTEGERS.start} to {_INTEGERS.stop - 1}")
    return value


def _number(text: str) -> float | _OutOfRange:
    value = float(text)
    return _OutOfRange(text, "give a number of at most 1.79e308") if math.isinf(value) else value


def _refuse_out_of_range(value: Any, path: str) -> None:
    if isinstance(value, _OutOfRange):
        shown = value.text
        if len(shown) > _SHOWN_DIGITS:
            shown = f"{shown[:_SHOWN_DIGITS]}…"
        raise FieldError(path, f"{shown} does not fit into 64 bits", value.valid)
    for place, item in _inside(value, path):
        _refuse_out_of_range(item, place)


def _refuse_lone_surrogates(value: Any, path: str) -> None:
    """Text with half a surrogate pair cannot be encoded as UTF-8, so no tokenizer takes it."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            problem = "has half a surrogate pair"
            raise FieldError(path or "body", problem, "send text that is valid Unicode") from None
    if isinstance(value, dict):
        for name in value:
            _refuse_lone_surrogates(name, path)
    for place, item in _inside(value, path):
        _refuse_lone_surrogates(item, place)


def _inside(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What a list or an object holds, each with its place in the body."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield (f"{path}.{name}" if path else name), item
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield f"{path}[{number}]", item
