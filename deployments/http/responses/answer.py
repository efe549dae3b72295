"""A chat completion as the answer of the responses API, as a whole or event by event.

Owns what of a chat's answer becomes which part of a response. Items and events are made by vLLM's own rules.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Final

from openai.types.responses import (
    ResponseErrorEvent,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    response_text_delta_event,
)
from openai.types.responses.response_output_text import Logprob, LogprobTopLogprob
from vllm.entrypoints.generate.base.protocol import DeltaMessage, FunctionCall
from vllm.entrypoints.openai.responses.protocol import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseInProgressEvent,
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
)
from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor, split_delta
from vllm.entrypoints.openai.responses.utils import build_response_output_items
from vllm.sampling_params import SamplingParams

from deployments.http.body.asks import UNKNOWN_LENGTH
from deployments.http.model_config import ModelConfig
from deployments.http.responses.request import field_here

_DATA: Final = "data: "
_DONE: Final = "[DONE]"
_CUT: Final = "length"
"""Why a chat ended whose response is incomplete."""


class ResponseWording:
    """Says in the words of the responses API what a chat completion says.

    Args:
        asked: The request.
        response_id: Of the response.
        model: What answers it.
        max_logprobs: The most log-probabilities that one event has.
    """

    path = "/v1/responses"

    def __init__(
        self, asked: ResponsesRequest, response_id: str, model: ModelConfig, max_logprobs: int
    ) -> None:
        self._asked = asked.model_copy(update={"request_id": response_id})
        self._model = model
        self.max_logprobs = max_logprobs
        self._created_s = int(time.time())

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The response that a chat's answer is."""
        (choice,) = answer["choices"]
        message = choice["message"]
        calls = [
            FunctionCall(
                id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"]
            )
            for call in message.get("tool_calls") or ()
        ]
        asks = self._asked.is_include_output_logprobs()
        logprobs = [_logprob(one) for one in _positions(choice)] if asks else None
        output = build_response_output_items(
            message.get("reasoning"),
            message.get("content"),
            calls,
            logprobs,
            self._asked.tools,
        )
        response = self.response(answer["model"], output, choice["finish_reason"], answer["usage"])
        return dict(response.model_dump(mode="json", by_alias=True))

    async def events(self, pieces: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """The events of the response whose chat completion streams `pieces`, server-sent events too."""
        stream = _Stream(self)
        try:
            async for piece in pieces:
                for line in piece.split("\n"):
                    if line.startswith(_DATA):
                        for event in stream.read(line.removeprefix(_DATA)):
                            yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
        finally:
            await pieces.aclose()

    def field(self, name: str) -> str:
        """What the client has called a chat's field."""
        return field_here(name)

    @property
    def asked(self) -> ResponsesRequest:
        """The request."""
        return self._asked

    def response(
        self, model: str, output: list[Any], finish_reason: str | None, usage: dict[str, Any] | None
    ) -> ResponsesResponse:
        """The response of these items; without the chat's usage it has not ended."""
        asked, status = self._asked, "in_progress"
        prompt_tokens = 0 if usage is None else usage["prompt_tokens"]
        bounds = self._model.output_bounds(asked.max_output_tokens, prompt_tokens)
        if usage is not None:
            # A call that was cut is a call to a chat.
            is_full = any(usage["completion_tokens"] >= bound for bound in bounds)
            is_cut = finish_reason == _CUT or (finish_reason == "tool_calls" and is_full)
            status = "incomplete" if is_cut else "completed"
        sampled = SamplingParams(
            temperature=self._of_model("temperature") if asked.temperature is None else asked.temperature,
            top_p=self._of_model("top_p") if asked.top_p is None else asked.top_p,
            max_tokens=max(1, min(bounds, default=UNKNOWN_LENGTH)),
            presence_penalty=asked.presence_penalty or 0.0,
            frequency_penalty=asked.frequency_penalty or 0.0,
            logprobs=asked.top_logprobs if asked.is_include_output_logprobs() else None,
        )
        return ResponsesResponse.from_request(
            asked,
            sampled,
            model_name=model,
            created_time=self._created_s,
            output=output,
            status=status,
            usage=None if usage is None else _usage(usage),
        )

    def _of_model(self, name: str) -> float:
        return self._model.sampled_with.get(name, 1.0)


class _Stream:
    """Where a stream is."""

    def __init__(self, wording: ResponseWording) -> None:
        self._wording = wording
        self._processor = SimpleStreamingEventProcessor(tools=wording.asked.tools)
        self._number = 0
        self._model = ""
        self._items: list[Any] = []
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] | None = None
        self._has_failed = False
        self._logprobs: list[Logprob] | None = [] if wording.asked.is_include_output_logprobs() else None
        self._logprobs_left = wording.max_logprobs

    def read(self, data: str) -> Iterator[dict[str, Any]]:
        """The events that one event of the chat becomes."""
        if self._has_failed:
            return
        if data == _DONE:
            yield from self._end()
            return
        chunk = json.loads(data)
        if (error := chunk.get("error")) is not None:
            self._has_failed = True
            yield self._failed(error)
            return
        if not self._number:
            self._model = chunk["model"]
            begun = self._wording.response(self._model, [], None, None)
            for kind, name in (
                (ResponseCreatedEvent, "response.created"),
                (ResponseInProgressEvent, "response.in_progress"),
            ):
                yield self._numbered(kind(type=name, sequence_number=-1, response=begun))
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            yield from self._delta(choice)

    def _failed(self, error: dict[str, Any]) -> dict[str, Any]:
        """The event that an error is, in OpenAI's form, with its trace if it has one."""
        event = ResponseErrorEvent(
            type="error",
            code=str(error.get("code")),
            message=error["message"],
            param=error.get("param"),
            sequence_number=-1,
        )
        said = self._numbered(event)
        return said | {"trace_id": error["trace_id"]} if "trace_id" in error else said

    def _delta(self, choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
        positions = _positions(choice)
        self._keep(positions)
        logprobs = [_delta_logprob(one) for one in positions]
        for delta in split_delta(DeltaMessage(**choice["delta"])):
            state, call = self._processor.resolve_target_state(delta)
            if state.name == "NONE":
                continue
            if self._processor.needs_transition(state, call):
                yield from self._told(self._processor.close_current())
                yield from self._told(self._processor.open(state, call))
            yield from self._told(self._processor.emit_delta(delta, None, lambda _: logprobs))

    def _keep(self, positions: list[dict[str, Any]]) -> None:
        """Have the last event say the log-probabilities of these, too; none if all are too many for one."""
        if self._logprobs is None:
            return
        self._logprobs_left -= sum(1 + len(one["top_logprobs"]) for one in positions)
        if self._logprobs_left < 0:
            self._logprobs = None
        else:
            self._logprobs.extend(map(_logprob, positions))

    def _end(self) -> Iterator[dict[str, Any]]:
        yield from self._told(self._processor.close_current())
        _say(self._items, self._logprobs)
        usage = self._usage or {"prompt_tokens": 0, "completion_tokens": 0}
        response = self._wording.response(self._model, self._items, self._finish_reason, usage)
        yield self._numbered(
            ResponseCompletedEvent(type="response.completed", sequence_number=-1, response=response)
        )

    def _told(self, events: list[Any]) -> Iterator[dict[str, Any]]:
        for event in events:
            if isinstance(event, ResponseOutputItemDoneEvent):
                self._items.append(_item(event.item))
            yield self._numbered(event)

    def _numbered(self, event: Any) -> dict[str, Any]:
        event.sequence_number = self._number
        self._number += 1
        return dict(event.model_dump(mode="json", by_alias=True))


def _item(item: Any) -> Any:
    """As it stands in a whole response: in vLLM's event a message has a summary, which it has not."""
    if isinstance(item, ResponseOutputMessage):
        return ResponseOutputMessage.model_validate(item.model_dump(exclude={"summary"}))
    return item


def _say(items: list[Any], logprobs: list[Logprob] | None) -> None:
    """Put the log-probabilities of a whole answer where a whole response has them: at its first text."""
    message = next((item for item in items if isinstance(item, ResponseOutputMessage)), None)
    if message is not None and isinstance(text := message.content[0], ResponseOutputText):
        text.logprobs = logprobs


def _usage(usage: dict[str, Any]) -> ResponseUsage:
    """The same counts under the API's names."""
    read, written = usage["prompt_tokens"], usage.get("completion_tokens") or 0
    prompt = usage.get("prompt_tokens_details") or {}
    found, kept = (prompt.get(name) or 0 for name in ("cached_tokens", "created_cache_tokens"))
    reasoned = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return ResponseUsage(
        input_tokens=read,
        input_tokens_details=InputTokensDetails(cached_tokens=found, cache_write_tokens=kept),
        output_tokens=written,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoned),
        total_tokens=read + written,
    )


def _positions(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """The log-probabilities of a choice, position by position."""
    return list((choice.get("logprobs") or {}).get("content") or ())


def _logprob(one: dict[str, Any]) -> Logprob:
    top = [
        LogprobTopLogprob(token=other["token"], bytes=other["bytes"] or [], logprob=other["logprob"])
        for other in one["top_logprobs"]
    ]
    return Logprob(token=one["token"], bytes=one["bytes"] or [], logprob=one["logprob"], top_logprobs=top)


def _delta_logprob(one: dict[str, Any]) -> response_text_delta_event.Logprob:
    top = [
        response_text_delta_event.LogprobTopLogprob(token=other["token"], logprob=other["logprob"])
        for other in one["top_logprobs"]
    ]
    return response_text_delta_event.Logprob(token=one["token"], logprob=one["logprob"], top_logprobs=top)
