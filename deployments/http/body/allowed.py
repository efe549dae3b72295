"""Which fields of a request body are served: a list of what is allowed, so that whatever is new is refused.

The names are those of vLLM's request models, version by version; a test compares them with the installed
vLLM and fails when upstream adds one. A header that vLLM takes for a field that is refused is refused, too.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

from slo.errors import FieldError
from slo.files.strict_yaml import nearest

_SAMPLING: Final = frozenset(
    [
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "length_penalty",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "max_tokens",
        "min_p",
        "min_tokens",
        "n",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_detection",
        "repetition_penalty",
        "response_format",
        "seed",
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
        "top_k",
        "top_p",
        "use_beam_search",
    ]
)
_COMMON: Final = _SAMPLING | frozenset(
    [
        "add_special_tokens",
        "cache_salt",
        "echo",
        "model",
        "request_id",
        "return_token_ids",
        "return_token_offsets",
        "return_tokens_as_token_ids",
        "routed_experts_prompt_start",
        "session_id",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stream",
        "stream_interval",
        "stream_options",
        "truncate_prompt_tokens",
        "truncation_side",
        "user",
        "vllm_xargs",
    ]
)
CHAT: Final = _COMMON | frozenset(
    [
        "add_generation_prompt",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "include_reasoning",
        "max_completion_tokens",
        "messages",
        "parallel_tool_calls",
        "reasoning_effort",
        "return_prompt_text",
        "tool_choice",
        "tools",
        "top_logprobs",
    ]
)
RESPONSES: Final = frozenset(
    [
        "cache_salt",
        "chat_template_kwargs",
        "frequency_penalty",
        "ignore_eos",
        "include",
        "include_reasoning",
        "include_stop_str_in_output",
        "input",
        "instructions",
        "logit_bias",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "model",
        "parallel_tool_calls",
        "presence_penalty",
        "prompt_cache_key",
        "reasoning",
        "repetition_penalty",
        "request_id",
        "seed",
        "session_id",
        "skip_special_tokens",
        "stop",
        "store",
        "stream",
        "structured_outputs",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
        "truncation",
        "user",
        "vllm_xargs",
    ]
)
COUNT_TOKENS: Final = frozenset(
    {"chat_template_kwargs", "messages", "model", "system", "tool_choice", "tools"}
)
MESSAGES: Final = COUNT_TOKENS | frozenset(
    [
        "cache_salt",
        "max_tokens",
        "metadata",
        "output_config",
        "stop_sequences",
        "stream",
        "temperature",
        "top_k",
        "top_p",
        "vllm_xargs",
    ]
)
COMPLETION: Final = _COMMON | {"prompt", "suffix"}
TOKENIZE: Final = frozenset({"model", "prompt", "add_special_tokens", "return_token_strs"})
TOKENIZE_CHAT: Final = frozenset(
    [
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template_kwargs",
        "continue_final_message",
        "messages",
        "model",
        "return_token_strs",
        "tools",
    ]
)
DETOKENIZE: Final = frozenset({"model", "tokens"})
HINTS: Final = frozenset(
    [
        "client_metadata",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    ]
)
"""Fields of OpenAI's and of its clients that vLLM's models lack: all but the service tier change nothing."""
MESSAGES_HINTS: Final = frozenset(
    {"cache_control", "context_management", "metadata", "output_config", "service_tier", "thinking"}
)
"""Fields of Anthropic's that vLLM's models lack, in whole or in part; they change nothing, as in vLLM."""
_PRIORITY: Final = "priority"
_PRIORITY_HEADER: Final = "x-vllm-priority"
"""In vLLM's server it goes before the field."""
_OURS: Final = "is set by the server itself"
_STATELESS: Final = "needs what a server keeps between requests, and this one keeps nothing"
REFUSED: Final[Mapping[str, tuple[str, str]]] = {
    "kv_transfer_params": (_OURS, "leave it out"),
    "ec_transfer_params": (_OURS, "leave it out"),
    _PRIORITY: ("is not used here", "set x-slo-tier or service_tier instead"),
    "chat_template": ("is a program for the server to run", "use chat_template_kwargs with the model's own"),
    "prompt_embeds": ("is not served", "send text or token ids"),
    "media_io_kwargs": ("says how the server reads media", "leave it out"),
    "mm_processor_kwargs": ("says how the server reads media", "leave it out"),
    "return_assistant_tokens_mask": ("is not served", "leave it out"),
}
"""Fields of vLLM's models that no client may set: why, and what instead."""
RESPONSES_REFUSED: Final[Mapping[str, tuple[str, str]]] = {
    **REFUSED,
    "background": (_STATELESS, "send it without background"),
    "conversation": (_STATELESS, "send the whole conversation as input"),
    "enable_response_messages": ("is not served", "leave it out"),
    "previous_input_messages": (_STATELESS, "send the whole conversation as input"),
    "previous_response_id": (_STATELESS, "send the whole conversation as input"),
    "prompt": (_STATELESS, "send the text as instructions and input"),
}
"""The same for the responses API."""
KWARGS_REFUSED: Final[Mapping[str, tuple[str, str]]] = {
    "chat_template": REFUSED["chat_template"],
    "tools": ("is a field of the body", "give tools there"),
    **dict.fromkeys(
        [
            "_messages_citations",
            "_position_to_source",
            "_tool_message_v2_content",
            "bos_token",
            "cls_token",
            "conversation",
            "conversations",
            "eos_token",
            "mask_token",
            "max_length",
            "messages",
            "model_config",
            "pad_token",
            "padding",
            "return_assistant_tokens_mask",
            "return_dict",
            "return_tensors",
            "sanitize_control_tokens",
            "self",
            "sep_token",
            "tokenize",
            "tokenizer",
            "tokenizer_kwargs",
            "truncation",
            "unk_token",
        ],
        (_OURS, "leave it out"),
    ),
}
"""The same for names in `chat_template_kwargs` that are no variables of a template.

vLLM hands them on to what renders a chat: a tokenizer pads a prompt to any `max_length`, and a template
repeats a special token after each message, however long the one is that was sent.
"""
_INSTEAD: Final[Mapping[str, tuple[str, ...]]] = {
    **{
        f"guided_{kind}": (f"structured_outputs.{kind}",)
        for kind in ("choice", "grammar", "json", "regex", "whitespace_pattern")
    },
    "best_of": ("n",),
    "function_call": ("tool_choice",),
    "functions": ("tools",),
    "input": ("messages", "prompt"),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    "max_output_tokens": ("max_completion_tokens", "max_tokens"),
    "max_tokens": ("max_output_tokens",),
    "mcp_servers": ("tools",),
    "messages": ("input", "prompt"),
    "prompt": ("messages",),
    "prompt_token_ids": ("prompt",),
    "reasoning": ("reasoning_effort",),
    "reasoning_effort": ("reasoning.effort", "output_config.effort"),
    "response_format": ("text.format", "output_config.format"),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "structural_tag": ("structured_outputs.structural_tag",),
    "truncation": ("truncate_prompt_tokens",),
}
"""Fields of another API or of an older vLLM, and what says the same here: the first that is served."""
_NOTHING: Final[Mapping[str, Any]] = {
    "modalities": ["text"],
    "stream_options": {"include_obfuscation": False},
}
"""Fields of OpenAI's that are not served, the second for a response, and with what they ask for nothing."""
_MOST_IGNORED: Final = 32
"""Fields of a body that are left out of it; each takes time to compare with all that are served."""
_MISSPELT: Final = 0.9
"""How alike two names are, as `difflib` has it, one of which is meant by the other."""
_ALIKE: Final = 0.8
"""The same of a field that is refused, for which one that is no more like it would be bad advice."""


class Fields(NamedTuple):
    """Of one kind of request body: those that are allowed, and those that are refused with a reason.

    Attributes:
        is_chat: Whether messages are OpenAI's.
    """

    allowed: frozenset[str]
    refused: Mapping[str, tuple[str, str]]
    is_chat: bool = False


def fields_of(model: Collection[str]) -> Fields:
    """What may be in a body, by the fields of the request model that it is read as."""
    if "system" in model:
        named = MESSAGES if "stop_sequences" in model else COUNT_TOKENS
        return Fields(named | MESSAGES_HINTS, REFUSED)
    if "messages" in model:
        return Fields(CHAT | HINTS if "stop" in model else TOKENIZE_CHAT, REFUSED, is_chat=True)
    if "input" in model:
        return Fields(RESPONSES | HINTS, RESPONSES_REFUSED)
    if "max_tokens" in model:
        return Fields(COMPLETION | HINTS, REFUSED)
    return Fields(TOKENIZE if "prompt" in model else DETOKENIZE, REFUSED)


def refuse_priority(headers: Iterable[tuple[str, str]]) -> None:
    """Refuse the header in which vLLM takes a priority, as the field is refused.

    Raises:
        FieldError: when it asks for one.
    """
    for name, value in headers:
        if name == _PRIORITY_HEADER and value.strip() != "0":
            raise FieldError(name, *REFUSED[_PRIORITY])


def served_fields(values: Mapping[str, Any], fields: Fields, *, ignores: bool) -> dict[str, Any]:
    """What of a body is served.

    Args:
        values: The body.
        fields: What may be in it.
        ignores: Whether a field that is not served is left out whatever it asks for, unless something else
            here is meant by it; otherwise only one that asks for nothing is.

    Raises:
        FieldError: naming a field that is not served.
    """
    left_out: set[str] = set()
    for name, value in values.items():
        if name in fields.allowed:
            continue
        if name in fields.refused:
            if value is not None and value is not False and (name != _PRIORITY or value != 0):
                raise FieldError(name, *fields.refused[name])
            continue
        if len(left_out) >= _MOST_IGNORED or not _may_be_left_out(
            name, values, fields.allowed, ignores=ignores
        ):
            advice = _advice(name[:100], fields.allowed)
            raise FieldError(name[:100], "is not a field that is served here", advice)
        left_out.add(name)
    kwargs = values.get("chat_template_kwargs")
    for name in kwargs if isinstance(kwargs, dict) else ():
        if name in KWARGS_REFUSED:
            raise FieldError(f"chat_template_kwargs.{name}", *KWARGS_REFUSED[name])
    return {name: value for name, value in values.items() if name not in left_out}


def _advice(name: str, allowed: Collection[str]) -> str:
    """What to do about a field that is not served."""
    if (instead := _instead(name, allowed)) is not None:
        return f"give {instead!r} instead"
    return nearest(name, allowed, "leave it out", cutoff=_ALIKE)


def _instead(name: str, allowed: Collection[str]) -> str | None:
    """What says here what a field of another API or version says, if anything does."""
    return next((each for each in _INSTEAD.get(name, ()) if each.partition(".")[0] in allowed), None)


def _may_be_left_out(
    name: str, values: Mapping[str, Any], allowed: Collection[str], *, ignores: bool
) -> bool:
    """Whether a body is served without a field that is not.

    It is where the field says what holds anyway, as many do that OpenAI's clients send as null, and, if
    others are ignored, where none that is served says what it does.
    """
    value = values[name]
    if name == "best_of" and type(value) is int and value == (values.get("n") or 1):
        return True
    if name in _NOTHING and value == _NOTHING[name]:
        return True
    if value is not None and (not ignores or _instead(name, allowed) is not None):
        return False
    # What may be misspelt is told, whatever its value.
    return not difflib.get_close_matches(name[:100], allowed, n=1, cutoff=_MISSPELT)
