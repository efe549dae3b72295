"""A request of the responses API as the chat completion that answers it.

Owns which name a field has there. Items of the input become messages by vLLM's own rules, and what a body may
hold is decided where every chat's is (`deployments.http.body.reading`), after the translation.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, get_args

from openai.types.responses import (
    NamespaceTool,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
    ToolChoiceFunction,
)
from openai.types.responses.response_reasoning_item import Content
from ray.serve.llm.openai_api_models import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import (
    construct_input_messages,
    construct_tool_dicts,
    should_continue_final_message,
)
from vllm.tool_parsers.utils import build_responses_tool_call_name_map

from deployments.config.limits import LimitsConfig
from deployments.http import errors as http_errors
from deployments.http.answering.wording import renamed
from deployments.http.body import reading
from deployments.http.errors import HTTPError
from slo.admission.tenants import Tenant
from slo.errors import FieldError
from telemetry import logs

_SAME: Final = (
    "cache_salt",
    "chat_template_kwargs",
    "frequency_penalty",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "logit_bias",
    "model",
    "parallel_tool_calls",
    "presence_penalty",
    "repetition_penalty",
    "request_id",
    "seed",
    "service_tier",
    "session_id",
    "skip_special_tokens",
    "stop",
    "structured_outputs",
    "temperature",
    "top_k",
    "top_p",
    "user",
    "vllm_xargs",
)
_RENAMED: Final = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "truncate_prompt_tokens": "truncation",
}
"""Names of a chat's fields, which refusals name, and what they are here."""
_OPENAIS_TIERS: Final = get_args(ResponsesRequest.model_fields["service_tier"].annotation)
"""Those that vLLM's model of a request takes; a deployment may have others, which a response cannot tell."""
_LOGPROBS: Final = "message.output_text.logprobs"
_ENCRYPTED: Final = "reasoning.encrypted_content"
"""Asked for by clients that send reasoning back; they have its text here, and that is what they send."""
_TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text"})


def read(raw: bytes, limits: LimitsConfig, tenant: Tenant) -> tuple[ResponsesRequest, ChatCompletionRequest]:
    """The body of a tenant's request, and the chat completion that it is answered with.

    Raises:
        HTTPError: as `reading.read`.
        FieldError: as `reading.read`, and for what only a server can do that keeps state or runs tools.
    """
    given = {name: value for name, value in reading.values_of(raw, limits).items() if value is not None}
    known = {
        name: value for name, value in given.items() if name != "service_tier" or value in _OPENAIS_TIERS
    }
    asked = reading.as_model(_with_details(known), ResponsesRequest, limits)
    try:
        chat = reading.read_values(_as_chat(asked, given), ChatCompletionRequest, limits, tenant)
    except (FieldError, HTTPError) as error:
        raise renamed(error, field_here) from None
    except Exception as error:  # noqa: BLE001 - whatever a body causes is the body's fault
        logs.event("body_not_understood", level=logging.WARNING, error=repr(error)[:500])
        raise http_errors.bad_body(
            "input: has an item that is not of the shape of its type", "input"
        ) from None
    return asked, chat


def _with_details(values: dict[str, Any]) -> dict[str, Any]:
    """The body with OpenAI's default of a picture's `detail`, which vLLM's model of a request wants said."""
    items = values.get("input")
    return {**values, "input": [_with_detail(item) for item in items]} if isinstance(items, list) else values


def _with_detail(item: Any) -> Any:
    """An item of the input, or a part of one."""
    if not isinstance(item, dict):
        return item
    if item.get("type") == "input_image" and item.get("detail") is None:
        return {**item, "detail": "auto"}
    parts = item.get("content")
    if isinstance(parts, list):
        return {**item, "content": [_with_detail(part) for part in parts]}
    return item


def _as_chat(asked: ResponsesRequest, given: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat completion that asks for the same.

    Args:
        asked: As vLLM reads it.
        given: The body that it was read from; what it does not name is left to the chat's defaults.

    Raises:
        FieldError: for what this server cannot do.
    """
    values = {name: given[name] for name in _SAME if given.get(name) is not None}
    values["messages"] = _messages(asked)
    if should_continue_final_message(asked.input):
        values |= {"add_generation_prompt": False, "continue_final_message": True}
    if asked.max_output_tokens is not None:
        values["max_completion_tokens"] = asked.max_output_tokens
    if asked.reasoning is not None and asked.reasoning.effort is not None:
        values["reasoning_effort"] = asked.reasoning.effort
    if asked.truncation == "auto":
        values["truncate_prompt_tokens"] = -1
    if asked.stream:
        values |= {"stream": True, "stream_options": {"include_usage": True}}
    return values | _format(asked) | _tools(asked) | _logprobs(asked)


def field_here(field: str) -> str:
    """What the client has called a chat's field."""
    head = field.partition(".")[0].partition("[")[0]
    if head in {"messages", "prompt"}:  # which are not the items
        return "input"
    return _RENAMED.get(head, head) + field[len(head) :]


def _messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    given = asked.input
    items = given if isinstance(given, str) else [_item(*numbered) for numbered in enumerate(given)]
    try:
        made = construct_input_messages(request_instructions=asked.instructions, request_input=items)
    except ValueError as error:  # reasoning that is encrypted
        raise FieldError("input", f"cannot be used: {error}", "leave that item out") from None
    instructions = made[:1] if asked.instructions else []
    of_items = made[len(instructions) :]
    # Where reasoning and calls have become one message, a message's place is no item's.
    are_items = not isinstance(items, str) and len(of_items) == len(items)
    fields = [f"input[{number}]" if are_items else "input" for number in range(len(of_items))]
    return [
        *(_message("instructions", message) for message in instructions),
        *(_message(field, message) for field, message in zip(fields, of_items, strict=True)),
    ]


def _item(number: int, item: Any) -> Any:
    """An item of the input with all of its text in one part: vLLM takes the first part alone of many."""
    if isinstance(item, ResponseOutputMessage):
        parts = [part.text if isinstance(part, ResponseOutputText) else part.refusal for part in item.content]
        return {"role": "assistant", "content": "".join(parts)}
    if isinstance(item, ResponseReasoningItem):
        text = ("" if item.content else "\n").join(part.text for part in item.content or item.summary)
        return item.model_copy(update={"content": [Content(text=text, type="reasoning_text")]})
    if isinstance(item, dict) and item.get("role") == "assistant" and isinstance(item.get("content"), list):
        return _whole_answer(f"input[{number}]", item)
    return item


def _whole_answer(field: str, item: dict[str, Any]) -> dict[str, Any]:
    texts = [
        part.get("text", part.get("refusal")) if isinstance(part, dict) else None for part in item["content"]
    ]
    whole = [text for text in texts if isinstance(text, str)]
    if texts and len(whole) == len(texts):
        return {**item, "content": "".join(whole)}
    if len(texts) > 1 and texts[0] is not None:
        problem = "is an assistant's message with a part that is not text behind one that is"
        raise FieldError(f"{field}.content", problem, "send its text alone")
    return item


def _message(field: str, message: Any) -> dict[str, Any]:
    """A message whose parts have the types of a chat's."""
    if not isinstance(message, dict) or "role" not in message:
        kind = message.get("type") if isinstance(message, dict) else getattr(message, "type", None)
        raise FieldError(
            field, f"is of type {str(kind)[:100]!r}", "send messages, function calls and outputs"
        )
    content = message.get("content")
    parts = (
        {}
        if content is None or isinstance(content, str)
        else {"content": [_part(field, one) for one in content]}
    )
    return {**{name: message[name] for name in message if name not in ("type", "status", "id")}, **parts}


def _part(field: str, part: Any) -> dict[str, Any]:
    values = part if isinstance(part, dict) else part.model_dump(exclude_none=True)
    kind = values.get("type")
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": values.get("text", "")}
    if kind == "refusal":
        return {"type": "refusal", "refusal": values.get("refusal", "")}
    if kind == "input_image" and values.get("image_url"):
        return {"type": "image_url", "image_url": {"url": values["image_url"]}}
    raise FieldError(f"{field}.content", f"has a part of type {str(kind)[:100]!r}", "use input_text")


def _format(asked: ResponsesRequest) -> dict[str, Any]:
    wanted = None if asked.text is None else asked.text.format
    if wanted is not None and asked.structured_outputs is not None:
        raise FieldError("structured_outputs", "comes with text.format", "give one of them")
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"response_format": {"type": "json_object"}}
    schema = {"name": wanted.name, "schema": wanted.schema_, "strict": wanted.strict}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _tools(asked: ResponsesRequest) -> dict[str, Any]:
    for field, tool in _functions(asked):
        if tool.type != "function":
            raise FieldError(
                field,
                f"is of type {tool.type!r}",
                "leave it out, or switch it off in the client: of tools, only functions are served",
            )
        if not isinstance(tool.parameters, dict | None):
            raise FieldError(f"{field}.parameters", "is not an object", "give a JSON schema")
    tools = construct_tool_dicts(asked.tools, asked.tool_choice)
    choice = asked.tool_choice
    if not isinstance(choice, str | ToolChoiceFunction):
        raise FieldError("tool_choice", "is not served", "use auto, none, required or a function")
    if not tools:  # that a call is demanded without any, vLLM refuses
        return {}
    if isinstance(choice, ToolChoiceFunction):
        name = _name_in_chat(choice.name, asked, [tool["function"]["name"] for tool in tools])
        return {"tools": tools, "tool_choice": {"type": "function", "function": {"name": name}}}
    return {"tools": tools, "tool_choice": choice}


def _name_in_chat(name: str, asked: ResponsesRequest, names: Collection[str]) -> str:
    """What of `names` the chat calls a function, which may be named as inside its namespace; else `name`."""
    if name in names:
        return name
    calls = build_responses_tool_call_name_map(asked.tools)
    return next((whole for whole, call in calls.items() if call.name == name), name)


def _functions(asked: ResponsesRequest) -> Iterator[tuple[str, Any]]:
    """The tools that a request has, those of a namespace one by one, and where each stands."""
    for number, tool in enumerate(asked.tools):
        if not isinstance(tool, NamespaceTool):
            yield f"tools[{number}]", tool
            continue
        for place, inner in enumerate(tool.tools):
            yield f"tools[{number}].tools[{place}]", inner


def _logprobs(asked: ResponsesRequest) -> dict[str, Any]:
    for wanted in asked.include or ():
        if wanted not in (_LOGPROBS, _ENCRYPTED):
            raise FieldError("include", f"asks for {wanted!r}", f"only {_LOGPROBS} is served")
    if not asked.is_include_output_logprobs():
        return {}
    return {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
