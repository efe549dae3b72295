"""What a chat completion says, in the words of the responses API; `openai`'s own types read it."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from bodies import model
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from deployments.http.responses.answer import ResponseWording

USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
CALL = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
POSITION = {"token": "a", "logprob": -0.5, "bytes": [97]}
POSITION = {**POSITION, "top_logprobs": [POSITION]}


def wording(max_logprobs=100, **fields):
    asked = ResponsesRequest(input="hi", model="m", **fields)
    return ResponseWording(asked, "resp_1", model(100), max_logprobs)


@pytest.mark.parametrize(("asked", "told"), [(None, 32_768), (50_000, 50_000)])
def test_where_the_models_length_is_not_known_what_was_asked_for_is_told(asked, told):
    request = ResponsesRequest(input="hi", model="m", max_output_tokens=asked)
    response = ResponseWording(request, "resp_1", model(), 100).response("m", [], "stop", USAGE)
    assert response.max_output_tokens == told


def whole_chat(message, finish_reason="stop", logprobs=None):
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": logprobs}
    return {"model": "m", "choices": [choice], "usage": USAGE}


def whole(message, finish_reason="stop", logprobs=None, **fields):
    return Response.model_validate(wording(**fields).whole(whole_chat(message, finish_reason, logprobs)))


def streamed(*events, **fields):
    return streamed_by(wording(**fields), *events)


def streamed_by(said, *events):
    """The events that a chat's stream becomes, and whether the stream was closed."""
    stream = SimpleNamespace(closed=False)

    async def pieces():
        try:
            for event in events:
                yield event
        finally:
            stream.closed = True

    async def read():
        return "".join([piece async for piece in said.events(pieces())])

    text = asyncio.run(read())
    told = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        if value["type"].startswith("response.reasoning_part."):  # vLLM's own
            told.append(SimpleNamespace(**value))
        else:
            told.append(TypeAdapter(ResponseStreamEvent).validate_python(value))
    assert stream.closed
    assert [event.sequence_number for event in told] == [*range(len(told))]
    return told


def chunk(delta=None, finish_reason=None, **more):
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish_reason, **more}]
    usage = USAGE if delta is None else None
    return f"data: {json.dumps({'model': 'm', 'choices': choices, 'usage': usage})}\n\n"


def test_a_text():
    response = whole({"role": "assistant", "content": "Once"}, instructions="Be brief.", metadata={"a": "b"})
    assert (response.id, response.status, response.output_text) == ("resp_1", "completed", "Once")
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    assert (response.usage.input_tokens, response.usage.output_tokens) == (9, 4)
    assert response.usage.total_tokens == 13
    assert response.max_output_tokens == 91


def test_what_of_the_prompt_was_cached_and_is_now():
    details = {"cached_tokens": 3, "created_cache_tokens": 5, "multimodal_tokens": None}
    usage = {**USAGE, "prompt_tokens_details": details}
    response = ResponseWording(ResponsesRequest(input="hi", model="m"), "resp_1", model(100), 100).response(
        "m", [], "stop", usage
    )
    told = response.usage.input_tokens_details
    assert (told.cached_tokens, told.cache_write_tokens) == (3, 5)


def test_the_most_that_any_answer_has_is_told():
    said = ResponseWording(ResponsesRequest(input="hi", model="m"), "resp_1", model(100, 50), 100)
    assert said.response("m", [], "stop", USAGE).max_output_tokens == 50


def test_a_text_that_was_cut():
    response = whole({"role": "assistant", "content": "Once"}, "length", max_output_tokens=4)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_reasoning_and_calls():
    response = whole({"content": None, "reasoning": "Hm", "tool_calls": [CALL]}, "tool_calls", tools=[TOOL])
    thought, call = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Hm")
    assert (call.type, call.call_id, call.name, call.arguments) == (
        "function_call",
        "call-1",
        "weather",
        "{}",
    )


NAMESPACE = {"type": "namespace", "name": "mcp", "description": "Of a server.", "tools": [TOOL]}


def test_a_call_of_a_tool_in_a_namespace_has_its_own_name_again():
    call = {**CALL, "function": {"name": "mcp__weather", "arguments": "{}"}}
    (told,) = whole({"tool_calls": [call]}, "tool_calls", tools=[NAMESPACE]).output
    assert (told.name, told.namespace) == ("weather", "mcp")
    events = streamed(
        chunk({"tool_calls": [{"index": 0, "function": call["function"]}]}, "tool_calls"),
        chunk() + "data: [DONE]\n\n",
        tools=[NAMESPACE],
    )
    (told,) = events[-1].response.output
    assert (told.name, told.namespace) == ("weather", "mcp")


def test_encrypted_reasoning_that_is_asked_for_brings_no_log_probabilities():
    response = whole({"reasoning": "Hm", "content": "a"}, include=["reasoning.encrypted_content"])
    thought, text = response.output
    assert thought.content[0].text == "Hm"
    assert thought.encrypted_content is None
    assert text.content[0].logprobs is None


def test_a_call_that_was_cut():
    response = whole({"tool_calls": [CALL]}, "tool_calls", tools=[TOOL], max_output_tokens=4)
    assert response.status == "incomplete"


CUT_CALL = {**CALL, "function": {"name": "weather", "arguments": '{"city": "Ro'}}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("model_takes", "at_most", "status"),
    [(None, 4, "incomplete"), (13, None, "incomplete"), (14, 5, "completed"), (None, None, "completed")],
)
def test_a_call_that_the_servers_own_limit_has_cut(model_takes, at_most, status, streams):
    """The answer has 4 tokens after a prompt of 9."""
    asked = ResponsesRequest(input="hi", model="m", tools=[TOOL])
    said = ResponseWording(asked, "resp_1", model(model_takes, at_most), 100)
    if streams:
        told = streamed_by(
            said,
            chunk({"tool_calls": [{"index": 0, "function": CUT_CALL["function"]}]}, "tool_calls"),
            chunk() + "data: [DONE]\n\n",
        )
        response = told[-1].response
    else:
        response = Response.model_validate(said.whole(whole_chat({"tool_calls": [CUT_CALL]}, "tool_calls")))
    assert response.status == status


@pytest.mark.parametrize(("named", "told", "status"), [(None, 4, "incomplete"), (9, 9, "completed")])
def test_a_call_that_the_models_own_limit_for_requests_without_one_has_cut(named, told, status):
    asked = ResponsesRequest(input="hi", model="m", tools=[TOOL], max_output_tokens=named)
    said = ResponseWording(asked, "resp_1", model(max_tokens=4), 100)
    response = Response.model_validate(said.whole(whole_chat({"tool_calls": [CUT_CALL]}, "tool_calls")))
    assert (response.max_output_tokens, response.status) == (told, status)


def test_a_prompt_that_is_longer_than_the_model_is_known_to_take():
    message = {"role": "assistant", "content": "Once"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {**USAGE, "prompt_tokens": 40_000}
    answer = {"model": "m", "choices": [choice], "usage": usage}
    assert Response.model_validate(wording().whole(answer)).max_output_tokens == 1


def test_log_probabilities():
    include = ["message.output_text.logprobs"]
    response = whole({"content": "a"}, logprobs={"content": [POSITION]}, include=include, top_logprobs=1)
    (logprob,) = response.output[0].content[0].logprobs
    assert (logprob.token, logprob.logprob, logprob.top_logprobs[0].token) == ("a", -0.5, "a")


def test_a_stream_of_text():
    told = streamed(
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "On"}, logprobs={"content": [POSITION]}),
        chunk({"content": "ce"}, "length"),
        chunk(),
        "data: [DONE]\n\n",
        include=["message.output_text.logprobs"],
    )
    assert [event.type for event in told] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert told[4].logprobs[0].token == "a"
    response = told[-1].response
    assert [logprob.token for logprob in response.output[0].content[0].logprobs] == ["a"]
    assert (response.output_text, response.status, response.usage.output_tokens) == ("Once", "incomplete", 4)


@pytest.mark.parametrize(
    ("asked", "most", "told"),
    [(True, 6, ["Hm", "O", "n", "ce"]), (True, 5, None), (False, 6, None)],
    ids=["asked for", "too many at once", "not asked for"],
)
def test_the_last_event_has_the_log_probabilities_of_the_whole_answer(asked, most, told):
    """Three positions have no other token beside their own, and one has two."""
    alone = {**POSITION, "top_logprobs": []}
    thought, *begin, end = ({**alone, "token": token} for token in ("Hm", "O", "n", "ce"))
    end["top_logprobs"] = POSITION["top_logprobs"] * 2
    events = streamed_by(
        wording(include=["message.output_text.logprobs"] if asked else None, max_logprobs=most),
        chunk({"reasoning": "Hm"}, logprobs={"content": [thought]}),
        chunk({"content": "On"}, logprobs={"content": begin}),
        chunk({"content": "ce"}, "stop", logprobs={"content": [end]}),
        chunk() + "data: [DONE]\n\n",
    )
    logprobs = events[-1].response.output[1].content[0].logprobs
    assert (logprobs and [logprob.token for logprob in logprobs]) == told
    if told:
        assert len(logprobs[-1].top_logprobs) == 2


def test_a_stream_of_reasoning_text_and_two_calls_in_pieces_that_hold_several_events():
    def call(index, **function):
        return {"tool_calls": [{"index": index, "function": function}]}

    told = streamed(
        chunk({"role": "assistant", "reasoning": "Hm"}) + chunk({"content": "So"}),
        chunk(call(0, name="weather", arguments="{")),
        chunk(call(0, arguments="}")) + chunk(call(1, name="weather", arguments="{}"), "tool_calls"),
        chunk() + "data: [DONE]\n\n",
        tools=[TOOL],
    )
    thought, text, first, second = told[-1].response.output
    assert (thought.content[0].text, text.content[0].text) == ("Hm", "So")
    assert (first.arguments, second.arguments) == ("{}", "{}")
    deltas = [event.delta for event in told if event.type == "response.function_call_arguments.delta"]
    assert deltas == ["{", "}", "{}"]


@pytest.mark.parametrize("trace", [{}, {"trace_id": "t"}])
@pytest.mark.parametrize("before", [(), (chunk({"content": "On"}),)])
def test_a_stream_that_fails_ends_with_the_error(before, trace):
    error = {"message": "no", "type": "decode_failed", "param": None, "code": "decode_failed", **trace}
    told = streamed(*before, f"data: {json.dumps({'error': error})}\n\n", "data: [DONE]\n\n")
    assert (told[-1].type, told[-1].code, told[-1].message) == ("error", "decode_failed", "no")
    assert told[-1].model_extra == trace
