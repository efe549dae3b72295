"""What the ingress reads out of an OpenAI request body beyond what vLLM reads itself.

Owns the list of fields that only the server may set, and how large a prompt is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from slo.errors import FieldError
from slo.request import RESERVED_XARG_PREFIX

_INTERNAL_FIELDS: Final = ("kv_transfer_params", "ec_transfer_params")
_VALID: Final = "leave it out"


@dataclass(frozen=True, slots=True)
class PromptSize:
    """A prompt's size: exact tokens when it came as tokens, else bytes of text."""

    tokens: int | None
    text_bytes: int


def refuse_internal_fields(body: Any) -> None:
    """Refuse what a client must not set.

    Raises:
        FieldError: naming the field.
    """
    for field in _INTERNAL_FIELDS:
        if getattr(body, field, None) is not None:
            raise FieldError(field, "is set by the server itself", _VALID)
    if getattr(body, "priority", 0):
        raise FieldError("priority", "is not used here", "set x-slo-tier or service_tier instead")
    for name in getattr(body, "vllm_xargs", None) or {}:
        if name in _INTERNAL_FIELDS or name.startswith(RESERVED_XARG_PREFIX):
            raise FieldError(f"vllm_xargs.{name}", "is set by the server itself", _VALID)


def service_tier(body: Any) -> str | None:
    """The OpenAI field `service_tier` of a chat or text completion.

    Raises:
        FieldError: when it is not a string.
    """
    value = getattr(body, "service_tier", None)
    if value is not None and not isinstance(value, str):
        raise FieldError("service_tier", "is not a string", "give the name of a service tier, such as auto")
    return value


def materialise(body: Any) -> None:
    """Turn the lazy iterators that pydantic leaves in chat messages into lists, in place.

    They can be read once only and cannot travel to another process.
    """
    for message in getattr(body, "messages", ()):
        for field in ("content", "tool_calls"):
            value = message.get(field)
            if value is not None and not isinstance(value, str | list):
                message[field] = list(value)


def prompt_size(body: Any) -> PromptSize:
    """How large the prompt of a chat or text completion is; of a chat, after `materialise`."""
    if hasattr(body, "messages"):
        return PromptSize(None, sum(_text_bytes(message) for message in body.messages))
    prompt = body.prompt
    if isinstance(prompt, str):
        return PromptSize(None, len(prompt.encode()))
    if not prompt:
        return PromptSize(None, 0)
    if isinstance(prompt[0], int):
        return PromptSize(len(prompt), 0)
    if isinstance(prompt[0], str):
        return PromptSize(None, sum(len(text.encode()) for text in prompt))
    return PromptSize(sum(len(tokens) for tokens in prompt), 0)


def _text_bytes(value: Any) -> int:
    """Bytes of all text inside a chat message, whatever its nesting."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        return sum(_text_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_text_bytes(item) for item in value)
    return 0
