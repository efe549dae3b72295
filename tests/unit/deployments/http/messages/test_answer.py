"""What a chat completion says, in the words of the messages API; `anthropic`'s own types read it."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from anthropic.types import Message
from bodies import model
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

from deployments.http.messages.answer import MessageWording

USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
UNBOUNDED = model()


def wording(most=100, of=UNBOUNDED):
    asked = {"model": "m", "max_tokens": most, "messages": [{"role": "user", "content": "hi"}]}
    return MessageWording(AnthropicMessagesRequest(**asked), of)


def call(arguments):
    return {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def whole(message, finish_reason="stop", most=100, of=UNBOUNDED, **choice):
    choice = {
        "index": 0,
        "message": {"role": "assistant", **message},
        "finish_reason": finish_reason,
        **choice,
    }
    answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    return Message.model_validate(wording(most, of).whole({**answer, "choices": [choice], "usage": USAGE}))


def test_text_and_thoughts_are_blocks():
    message = whole({"content": "Hello", "reasoning": "Hm"})
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == ("Hm", "Hello")
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", "m")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (9, 4)


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        ({"finish_reason": "length"}, ("max_tokens", None)),
        ({"finish_reason": "stop", "stop_reason": "x"}, ("stop_sequence", "x")),
        ({"finish_reason": "stop", "stop_reason": 2}, ("end_turn", None)),
    ],
)
def test_why_it_stopped(ended, told):
    message = whole({"content": "Hello"}, **ended)
    assert (message.stop_reason, message.stop_sequence) == told


@pytest.mark.parametrize(
    ("arguments", "most", "told", "reason"),
    [
        ('{"unit": "celsius"}', 100, {"unit": "celsius"}, "tool_use"),
        ('{"unit": "cel', 4, {"unit": "cel"}, "max_tokens"),
        ('{"unit": "celsius"', 100, {"unit": "celsius"}, "max_tokens"),
        ("nothing", 100, {}, "max_tokens"),
        ("[1]", 100, {}, "max_tokens"),
        ("", 4, {}, "max_tokens"),
    ],
)
def test_a_call_that_was_cut_is_not_one_to_run(arguments, most, told, reason):
    message = whole({"content": None, "tool_calls": [call(arguments)]}, "tool_calls", most)
    (block,) = message.content
    assert (block.type, block.name, block.input, message.stop_reason) == ("tool_use", "weather", told, reason)


@pytest.mark.parametrize("arguments", ["", " \n", "{}"])
def test_a_call_without_arguments_is_one_to_run(arguments):
    message = whole({"content": None, "tool_calls": [call(arguments)]}, "tool_calls")
    (block,) = message.content
    assert (block.type, block.input, message.stop_reason) == ("tool_use", {}, "tool_use")


def chunk(delta=None, finish_reason=None, usage=USAGE):
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    said = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return f"data: {json.dumps({**said, 'choices': choices, 'usage': usage})}\n\n"


START = chunk({"role": "assistant", "content": ""}, usage={**USAGE, "completion_tokens": 0})
DONE = "data: [DONE]\n\n"


def streamed(*pieces, most=100, of=UNBOUNDED):
    """The events that a chat's stream becomes; the stream is closed behind them."""
    stream = SimpleNamespace(closed=False)

    async def told():
        try:
            for piece in pieces:
                yield piece
        finally:
            stream.closed = True

    async def read():
        return "".join([event async for event in wording(most, of).events(told())])

    events = []
    for event in asyncio.run(read()).strip().split("\n\n"):
        name, data = event.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        events.append(value)
    assert stream.closed
    return events


def kinds(events):
    return [event["type"] for event in events]


def test_a_stream_is_one_of_blocks():
    parts = [START + chunk({"reasoning": "Hm"}), chunk({"content": "Hel"}), chunk({"content": "lo"}, "stop")]
    events = streamed(*parts, chunk() + DONE)
    assert kinds(events) == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert [event["delta"].get("text") for event in events[6:8]] == ["Hel", "lo"]
    assert events[0]["message"]["usage"] == {"input_tokens": 9, "output_tokens": 0}
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    assert events[-2]["usage"] == {"input_tokens": 9, "output_tokens": 4}


@pytest.mark.parametrize(("most", "reason"), [(100, "tool_use"), (4, "max_tokens")])
def test_a_call_in_a_stream(most, reason):
    begun = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"unit": "cel'}}
    parts = [
        START,
        chunk({"tool_calls": [begun]}),
        chunk({"tool_calls": [more]}, "tool_calls"),
        chunk(),
        DONE,
    ]
    events = streamed(*parts, most=most)
    assert events[1]["content_block"]["name"] == "weather"
    assert events[2]["delta"]["partial_json"] == '{"unit": "cel'
    assert events[-2]["delta"]["stop_reason"] == reason


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("model_takes", "at_most", "reason"),
    [(None, 4, "max_tokens"), (13, None, "max_tokens"), (14, 5, "tool_use"), (None, None, "tool_use")],
)
def test_a_call_that_the_servers_own_limit_has_cut(model_takes, at_most, reason, streams):
    """The answer has 4 tokens after a prompt of 9; what bounds requests that name nothing does not count."""
    of = model(model_takes, at_most, max_tokens=4)
    if streams:
        begun = {"index": 0, "id": "c", "type": "function", "function": {"name": "weather", "arguments": ""}}
        events = streamed(START, chunk({"tool_calls": [begun]}, "tool_calls"), chunk(), DONE, of=of)
        told = events[-2]["delta"]["stop_reason"]
    else:
        told = whole({"content": None, "tool_calls": [call("")]}, "tool_calls", of=of).stop_reason
    assert told == reason


@pytest.mark.parametrize("begun", [(), (START, chunk({"content": "Hel"}))])
def test_a_stream_that_fails_ends_with_the_error(begun):
    error = {"message": "too late", "type": "service_unavailable", "param": None, "code": "decode_failed"}
    *_, last = streamed(*begun, f"data: {json.dumps({'error': error})}\n\n")
    assert last == {"type": "error", "error": {**error, "type": "overloaded_error"}}


def test_text_about_errors_and_calls_is_text():
    text = '{"error": 1} and tool_calls'
    events = streamed(START, chunk({"content": text}, "stop"), chunk(), DONE)
    assert events[2]["delta"]["text"] == text
    assert events[-1]["type"] == "message_stop"
