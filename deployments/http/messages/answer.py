"""A chat completion as the answer of the messages API, as a whole or event by event.

What of a chat's answer becomes which block is vLLM's rule. Owns what vLLM's rules do not have: calls of tools
that were cut, and how a stream ends that fails.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import from_json
from ray.serve.llm.openai_api_models import ChatCompletionResponse
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

from deployments.http.errors import MESSAGES_PATH, in_anthropics_words
from deployments.http.messages.request import field_here
from deployments.http.model_config import ModelConfig

if TYPE_CHECKING:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

_DATA: Final = "data: "
_CUT: Final = "length"
_CALLS: Final = "tool_calls"
_CONVERTER: Final[Any] = SimpleNamespace(
    stop_reason_map={"stop": "end_turn", _CUT: "max_tokens", _CALLS: "tool_use"}
)
"""What vLLM's converter reads of its server."""


def said_count(answer: Any) -> dict[str, Any]:
    """How many tokens a prompt has, of an answer with all of them."""
    said = {"original_input_tokens": answer.count}
    return {"input_tokens": answer.count, "context_management": said}


class MessageWording:
    """Says in the words of the messages API what a chat completion says.

    Args:
        asked: The request.
        model: What answers it.
    """

    path = MESSAGES_PATH

    def __init__(self, asked: AnthropicMessagesRequest, model: ModelConfig) -> None:
        self._asked = asked
        self._model = model

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The message that a chat's answer is; of a call that was cut, what of its arguments can be read."""
        (choice,) = answer["choices"]
        self._say_cut(choice, answer["usage"])
        for call in choice["message"].get("tool_calls") or ():
            function = call["function"]
            read = _arguments(function["arguments"])
            if read is None:
                choice["finish_reason"] = _CUT
                read = _arguments(function["arguments"], is_cut=True) or {}
            function["arguments"] = json.dumps(read)
        chat = ChatCompletionResponse.model_validate({**answer, "kv_transfer_params": None})
        message = AnthropicServingMessages.messages_full_converter(_CONVERTER, chat)
        return dict(message.model_dump(mode="json", exclude_none=True))

    async def events(self, pieces: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """The events of the message whose chat completion streams `pieces`, server-sent events too."""
        failures: list[dict[str, Any]] = []
        try:
            chunks = self._chunks(pieces, failures)
            async for event in AnthropicServingMessages.message_stream_converter(_CONVERTER, chunks):
                yield event
            for failure in failures:
                yield f"event: error\ndata: {json.dumps(in_anthropics_words(failure))}\n\n"
        finally:
            await pieces.aclose()

    def field(self, name: str) -> str:
        """What the client has called a chat's field."""
        return field_here(name)

    async def _chunks(
        self, pieces: AsyncGenerator[str, None], failures: list[dict[str, Any]]
    ) -> AsyncGenerator[str, None]:
        """The chat's events one by one, up to an error, which is left in `failures`."""
        async for piece in pieces:
            for line in piece.split("\n"):
                if not line.startswith(_DATA):
                    continue
                if '"error"' in line or _CALLS in line:  # few; all are read by vLLM's converter
                    chunk = json.loads(line.removeprefix(_DATA))
                    if (error := chunk.get("error")) is not None:
                        failures.append(error)
                        return
                    for choice in chunk["choices"]:
                        self._say_cut(choice, chunk.get("usage"))
                    yield f"{_DATA}{json.dumps(chunk)}\n\n"
                else:
                    yield f"{line}\n\n"

    def _say_cut(self, choice: dict[str, Any], usage: dict[str, Any] | None) -> None:
        """To a chat a call that was cut is a call: here the client would run it."""
        if usage is None or choice.get("finish_reason") != _CALLS:
            return
        written = usage.get("completion_tokens") or 0
        bounds = self._model.output_bounds(self._asked.max_tokens, usage["prompt_tokens"])
        if any(written >= bound for bound in bounds):
            choice["finish_reason"] = _CUT


def _arguments(text: str, *, is_cut: bool = False) -> dict[str, Any] | None:
    """The arguments of a call, of which a blank text says none; None where they are no object."""
    try:
        read = from_json(text.strip() or "{}", allow_partial="trailing-strings" if is_cut else False)
    except ValueError:
        return None
    return read if isinstance(read, dict) else None
