"""Values of a body as JSON has them, whatever vLLM's models have made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_jsonable_python


def plain(value: Any) -> Any:
    """Values as JSON has them, of what may be a model, a dataclass or either in a list."""
    return to_jsonable_python(value, serialize_unknown=True)


def size_of_text(value: Any) -> int:
    """Bytes of all text inside, whatever its nesting, names of fields included."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        return sum(len(name.encode()) + size_of_text(item) for name, item in value.items())
    if isinstance(value, list | tuple):
        return sum(size_of_text(item) for item in value)
    return 0


def function_of(tool: Any) -> Mapping[str, Any]:
    """The function that a tool is or a choice names, as a chat or a response has it; empty for another."""
    if not isinstance(tool, Mapping):
        return {}
    inner = tool.get("function")
    return {**tool, **inner} if isinstance(inner, Mapping) else tool
