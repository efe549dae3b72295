"""How large a prompt is, before anybody has made tokens of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from deployments.http import errors as http_errors
from deployments.http.body.asks import prompts
from deployments.http.body.media import MEDIA_KEYS
from deployments.http.body.values import plain, size_of_text
from slo.predict.prompt_length import PromptLengthEstimator

_RENDERED_FIELDS: Final = ("tools", "documents", "chat_template_kwargs")
"""What a chat template puts into the prompt beside the messages."""


@dataclass(frozen=True, slots=True)
class PromptSize:
    """A prompt's size: exact tokens when it came as tokens, else bytes of text."""

    tokens: int | None
    text_bytes: int


def prompt_size(body: Any) -> PromptSize:
    """How large the prompt of a chat or text completion is; of a chat, after `materialise`.

    Of one that is to be cut, what is left; of each prompt, where there are several.
    """
    size, most = _whole_size(body), getattr(body, "truncate_prompt_tokens", None)
    if most is None or most < 0:  # as long as the model takes, which the router knows
        return size
    most *= prompts(body)
    text_bytes = min(size.text_bytes, round(most * PromptLengthEstimator().bytes_per_token))
    return PromptSize(None if size.tokens is None else min(size.tokens, most), text_bytes)


def _whole_size(body: Any) -> PromptSize:
    if hasattr(body, "messages"):
        more = [getattr(body, name, None) for name in _RENDERED_FIELDS]
        return PromptSize(None, sum(map(_said_bytes, body.messages)) + size_of_text(plain(more)))
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


def _said_bytes(message: Mapping[str, Any]) -> int:
    """Bytes of a message's text; the media among the parts of its content are no text."""
    content = message.get("content")
    if not isinstance(content, list):
        return size_of_text(message)
    parts = [
        {name: item for name, item in part.items() if name not in MEDIA_KEYS}
        if isinstance(part, dict)
        else part
        for part in content
    ]
    return size_of_text({**message, "content": parts})


def refuse_too_long(body: Any, max_model_len: int | None) -> None:
    """Refuse a prompt of token ids that cannot fit, before anybody looks for a place for it.

    Where the length is not known, a decode replica refuses it.

    Raises:
        HTTPError: 400, in vLLM's words, which clients look for.
    """
    prompt = getattr(body, "prompt", None)
    if (
        max_model_len is None
        or getattr(body, "truncate_prompt_tokens", None) is not None
        or not isinstance(prompt, list)
        or not prompt
    ):
        return
    if isinstance(prompt[0], int):
        prompt = [prompt]
    longest = 0 if isinstance(prompt[0], str) else max(map(len, prompt))
    if longest > max_model_len:
        raise http_errors.bad_body(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{longest} input tokens. Please reduce the length of the input prompt.",
            "prompt",
        )
