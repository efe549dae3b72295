"""How deep and how large a JSON text is, found without parsing it.

Parsing holds the interpreter, and with it every other stream of the process, for a time that grows with the
number of values, not of bytes: 2 MiB of `[],[],…` take seconds where 2 MiB of one string take milliseconds.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_STRINGS: Final = re.compile(rb'(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"?)++', re.DOTALL)
"""Strings with nothing between them. Possessive, and the end may be missing, so that a text of unfinished
strings takes no longer; several in a row, which JSON never has, cost no more than one."""
_BRACKET: Final = re.compile(rb"[\[\]{}]")


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
