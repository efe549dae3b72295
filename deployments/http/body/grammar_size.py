"""How much text a request may have a grammar compiled from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.config.limits import LimitsConfig
from deployments.http.body.values import function_of, size_of_text
from slo.errors import FieldError


def refuse_large_grammars(values: Mapping[str, Any], limits: LimitsConfig) -> None:
    """Refuse a body, before vLLM reads it, with too much text that a grammar is compiled from.

    Raises:
        FieldError: naming the field and the limit.
    """
    compiled = {field: values.get(field) for field in ("structured_outputs", "response_format")}
    compiled["tools"] = _schemas(values.get("tools"), values.get("tool_choice"))
    for field, text in compiled.items():
        if (found := size_of_text(text)) > (limit := limits.max_grammar_bytes):
            valid = f"limits.max_grammar_bytes allows {limit}"
            raise FieldError(field, f"asks for {found} bytes of grammar", valid)


def _schemas(tools: Any, choice: Any) -> list[Any]:
    """Names and schemas of the tools whose arguments are held to them; what they are for is prompt."""
    functions = [function_of(tool) for tool in tools] if isinstance(tools, list) else []
    match choice:
        case "none":
            held = []
        case None | "auto":  # only the arguments of strict ones are held to their schema
            held = [function for function in functions if function.get("strict")]
        case {"type": "function"}:
            name = function_of(choice).get("name")
            held = [function for function in functions if function.get("name") == name]
        case _:
            held = functions
    return [(function.get("name"), function.get("parameters")) for function in held]
