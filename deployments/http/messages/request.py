"""A request of the messages API as the chat completion that answers it.

Owns which name a field has there. A chat is made of the messages by vLLM's own rules, and what a body may
hold is decided where every chat's is (`deployments.http.body.reading`), after the translation.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import to_jsonable_python
from ray.serve.llm.openai_api_models import ChatCompletionRequest
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

from deployments.config.limits import LimitsConfig
from deployments.http import errors as http_errors
from deployments.http.answering.wording import renamed
from deployments.http.body import asks, reading
from deployments.http.body.allowed import TOKENIZE_CHAT
from deployments.http.errors import HTTPError
from slo.admission.tenants import Tenant
from slo.errors import FieldError
from telemetry import logs

if TYPE_CHECKING:
    from ray.llm._internal.serve.core.configs.openai_api_models import TokenizeChatRequest

_RENAMED: Final = {
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
"""Names of a chat's fields, which refusals name, and what they are here."""
_IN_SYSTEM: Final = ("text",)
_IN_MESSAGES: Final = {
    "system": _IN_SYSTEM,
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result"),
}
"""Blocks that vLLM's rules put into a chat, by whose message it is, and what is redacted: nobody reads it."""
_IN_RESULTS: Final = ("text", "image", "tool_reference")
"""Blocks of a tool's result that vLLM's rules put into a chat."""
_SOURCES: Final = {"base64": "data", "url": "url"}
"""Where a picture is, by the type of its source."""
_STANDARD: Final = {"standard_only": "default"}
"""What a service tier of Anthropic's is called by OpenAI, where another name is used."""


def read(
    raw: bytes, limits: LimitsConfig, tenant: Tenant
) -> tuple[AnthropicMessagesRequest, ChatCompletionRequest]:
    """The body of a tenant's request, and the chat completion that it is answered with.

    Raises:
        HTTPError: as `reading.read`.
        FieldError: as `reading.read`, and for blocks that the model would not see.
    """
    given = _given(raw, limits)
    asked = reading.as_model(given, AnthropicMessagesRequest, limits)
    _check_blocks(given)
    values = _as_chat(asked)
    if (tier := given.get("service_tier")) is not None:
        values["service_tier"] = _STANDARD.get(tier, tier) if isinstance(tier, str) else tier
    try:
        return asked, reading.read_values(values, ChatCompletionRequest, limits, tenant)
    except (FieldError, HTTPError) as error:
        raise renamed(error, field_here) from None


def read_to_count(raw: bytes, limits: LimitsConfig) -> TokenizeChatRequest:
    """The chat whose tokens a request asks to be counted.

    Raises:
        HTTPError: as `reading.parse`.
        FieldError: as `reading.parse`, and for what is not text, or would not be seen.
    """
    given = _given(raw, limits)
    asked = reading.as_model(given, AnthropicCountTokensRequest, limits)
    _check_blocks(given)
    values = {name: value for name, value in _as_chat(asked).items() if name in TOKENIZE_CHAT}
    try:
        return reading.read_chat_to_convert(values, limits)
    except (FieldError, HTTPError) as error:
        raise renamed(error, field_here) from None


def field_here(field: str) -> str:
    """What the client has called a chat's field."""
    head = field.partition(".")[0].partition("[")[0]
    if head == "messages":  # the system's text is one of a chat's, and results of tools are some
        return head
    if head == "tools":
        return field.replace(".function.parameters", ".input_schema").replace(".function", "")
    return _RENAMED.get(head, head) + field[len(head) :]


def _check_blocks(given: Mapping[str, Any]) -> None:
    """Refuse the blocks that vLLM's rules leave out without a word, and pictures of nothing.

    Raises:
        FieldError: naming the first.
    """
    for where, block in _blocks("system", given.get("system")):
        _check_type(where, block, _IN_SYSTEM, "the system's text")
    for number, message in enumerate(given["messages"]):
        role = message["role"]
        for where, block in _blocks(f"messages[{number}].content", message["content"]):
            _check_type(where, block, _IN_MESSAGES[role], f"the {role}'s messages")
            _check_picture(where, block)
            for within, part in _blocks(f"{where}.content", block.get("content")):
                _check_type(within, part, _IN_RESULTS, "a tool's result")
                _check_picture(within, part)
                _check_reference(within, part)


def _blocks(where: str, content: Any) -> list[tuple[str, dict[str, Any]]]:
    """The blocks of a content, each with where it stands; a text has none."""
    return (
        [(f"{where}[{place}]", block) for place, block in enumerate(content)]
        if isinstance(content, list)
        else []
    )


def _check_type(where: str, block: Mapping[str, Any], served: tuple[str, ...], within: str) -> None:
    if block.get("type") not in served:
        raise FieldError(f"{where}.type", f"is not served in {within}", f"give one of {', '.join(served)}")


def _check_picture(where: str, block: Mapping[str, Any]) -> None:
    if block["type"] != "image":
        return
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    key = _SOURCES.get(str(source.get("type")))
    if key is None or not isinstance(source.get(key), str) or not source[key]:
        raise FieldError(
            f"{where}.source",
            "has no picture",
            'give {"type": "base64", "media_type": "image/png", "data": …}',
        )


def _check_reference(where: str, block: Mapping[str, Any]) -> None:
    if block["type"] == "tool_reference" and not (block.get("tool_name") or block.get("name")):
        raise FieldError(f"{where}.tool_name", "names no tool", "give the tool's name")


def _given(raw: bytes, limits: LimitsConfig) -> dict[str, Any]:
    values = reading.values_of(raw, limits)
    return {name: value for name, value in values.items() if value is not None}


def _as_chat(asked: AnthropicMessagesRequest | AnthropicCountTokensRequest) -> dict[str, Any]:
    """The body of a chat completion that asks for the same; what is not named is left to the chat's defaults.

    A chat takes no empty list of tools, and no choice without tools; only one that demands a call is refused.

    Texts of the system inside the conversation stand before it, as in a vLLM server that was given no
    template: many templates take no others.

    Raises:
        HTTPError: 400 for messages of which no chat can be made.
    """
    try:
        chat = AnthropicServingMessages.to_chat_completion_request(asked, merge_inline_system=True)
        asks.materialise(chat)
    except Exception as error:  # noqa: BLE001 - whatever a body causes is the body's fault
        logs.event("body_not_understood", level=logging.WARNING, error=repr(error)[:500])
        raise http_errors.bad_body(
            "messages: has a block that is not of the shape of its type", "messages"
        ) from None
    named: Mapping[str, Any] = {name: getattr(chat, name) for name in chat.model_fields_set}
    plain = to_jsonable_python(named, by_alias=True, exclude_none=True)
    values = {name: value for name, value in plain.items() if value is not None and name != "max_tokens"}
    if not values.get("tools"):
        values.pop("tools", None)
        if values.get("tool_choice") == "auto":
            del values["tool_choice"]
    return values
