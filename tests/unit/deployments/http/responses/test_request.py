"""What a request of the responses API asks for, as a chat completion."""

import json
import logging

import pytest
from bodies import model

from deployments.config.limits import LimitsConfig
from deployments.http.errors import HTTPError
from deployments.http.responses.answer import ResponseWording
from deployments.http.responses.request import read
from slo.admission.tenants import ANONYMOUS
from slo.errors import FieldError

LIMITS = LimitsConfig(max_grammar_bytes=300, max_output_tokens=1000)
SCHEMA = {"type": "object", "properties": {"unit": {"type": "string"}}}
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA}


def in_namespace(*tools):
    return {"type": "namespace", "name": "mcp", "description": "Of a server.", "tools": [*tools]}


def chat_of(**fields):
    body = {"model": "m", "input": "hi", **fields}
    return read(json.dumps(body).encode(), LIMITS, ANONYMOUS)[1]


def plain(messages):
    """Without what is not said."""
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def test_instructions_and_text_are_two_messages():
    chat = chat_of(instructions="Be brief.")
    assert plain(chat.messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_a_picture_is_a_part_without_the_name_that_it_is_cached_as():
    url = "data:image/png;base64,AAAA"
    picture = {"type": "input_image", "detail": "auto", "image_url": url, "uuid": "x"}
    (message,) = plain(chat_of(input=[{"role": "user", "content": [picture]}]).messages)
    assert list(message["content"]) == [{"type": "image_url", "image_url": {"url": url}}]


@pytest.mark.parametrize("given", [{}, {"detail": None}, {"detail": "high"}])
@pytest.mark.parametrize("kind", [{}, {"type": "message"}])
def test_a_picture_says_its_detail_or_not(given, kind):
    """OpenAI's default is `auto`, and its examples leave it out."""
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", **given}
    text = {"type": "input_text", "text": "What is this?"}
    asked = [{"role": "user", "content": "hi"}, {**kind, "role": "user", "content": [text, picture]}]
    *_, message = chat_of(input=asked).messages
    assert [part["type"] for part in message["content"]] == ["text", "image_url"]


def test_a_detail_that_there_is_not_is_refused():
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "most"}
    with pytest.raises(HTTPError) as refused:
        chat_of(input=[{"role": "user", "content": [picture]}])
    assert refused.value.param == "input[0].content[0].detail"


def test_a_conversation_with_a_call_and_its_output_is_one_of_messages():
    chat = chat_of(
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "How warm is it?"}]},
            {
                "type": "reasoning",
                "id": "rs",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm"}],
            },
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "20"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "20"}]},
            {"role": "user", "content": "Thanks"},
        ]
    )
    question, call, output, answer, thanks = plain(chat.messages)
    assert question == {"role": "user", "content": [{"type": "text", "text": "How warm is it?"}]}
    assert call["reasoning"] == "Hm"
    assert next(iter(call["tool_calls"]))["function"] == {"name": "weather", "arguments": "{}"}
    assert (output["role"], output["content"], output["tool_call_id"]) == ("tool", "20", "c")
    assert (answer["role"], answer["content"]) == ("assistant", "20")
    assert thanks == {"role": "user", "content": "Thanks"}


def test_arguments_of_calls_that_are_nested_too_deep_are_refused():
    with pytest.raises(HTTPError) as refused:
        chat_of(input=[{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[" * 5_000}])
    assert (refused.value.status, refused.value.param) == (400, "input")
    assert "limits.max_json_depth" in refused.value.message


def test_what_is_asked_for_has_a_chats_names():
    chat = chat_of(
        max_output_tokens=7,
        temperature=0.5,
        seed=3,
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        truncation="auto",
        stream=True,
        service_tier="flex",
        tools=[TOOL],
        tool_choice="none",
        metadata={"a": "b"},
        store=True,
    )
    assert (chat.max_completion_tokens, chat.temperature, chat.seed) == (7, 0.5, 3)
    assert chat.reasoning_effort == "low"
    assert chat.response_format.json_schema.json_schema == SCHEMA
    assert (chat.logprobs, chat.top_logprobs) == (True, 2)
    assert chat.truncate_prompt_tokens == -1
    assert (chat.stream, chat.stream_options.include_usage) == (True, True)
    assert chat.service_tier == "flex"
    assert chat.tools[0].function.parameters == SCHEMA


def test_a_service_tier_may_be_the_deployments_own():
    assert chat_of(service_tier="batch").service_tier == "batch"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"service_tier": "flex"}, "flex"),
        ({"service_tier": "priority"}, "priority"),
        ({"service_tier": None}, "auto"),
        ({}, "auto"),
        pytest.param({"service_tier": "batch"}, "auto", id="OpenAI has no word for it"),
    ],
)
def test_the_response_tells_the_service_tier_that_was_asked_for(given, told):
    asked, _ = read(json.dumps({"input": "hi", **given}).encode(), LIMITS, ANONYMOUS)
    said = ResponseWording(asked, "resp_1", model(100), 100)
    assert said.response("m", [], None, None).service_tier == told


def test_what_is_not_asked_for_is_left_to_the_chats_defaults():
    named = {"messages", "model", "cache_salt", "request_id"}
    assert chat_of().model_fields_set <= named | {"tools", "tool_choice"}


def test_a_named_tool_is_named():
    chat = chat_of(tools=[TOOL], tool_choice={"type": "function", "name": "weather"})
    assert chat.tool_choice.function.name == "weather"


@pytest.mark.parametrize(
    ("tools", "name", "chosen"),
    [
        ([in_namespace(TOOL)], "mcp__weather", "mcp__weather"),
        ([in_namespace(TOOL)], "weather", "mcp__weather"),
        ([in_namespace({**TOOL, "name": "weather__now"})], "weather__now", "mcp__weather__now"),
        ([in_namespace(TOOL), {**in_namespace(TOOL), "name": "other"}], "weather", "mcp__weather"),
        ([in_namespace(TOOL), TOOL], "weather", "weather"),
    ],
)
def test_a_tool_in_a_namespace_is_named_with_it_or_without(tools, name, chosen):
    chat = chat_of(tools=tools, tool_choice={"type": "function", "name": name})
    assert chat.tool_choice.function.name == chosen


AS_CODEX_SENDS_IT = {
    "model": "m",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files"}]},
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "With ls"}],
            "encrypted_content": None,
        },
        {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "call-1"},
        {"type": "function_call_output", "call_id": "call-1", "output": "a.py"},
        {
            "type": "function_call",
            "name": "weather",
            "namespace": "mcp",
            "arguments": "{}",
            "call_id": "call-2",
        },
        {"type": "function_call_output", "call_id": "call-2", "output": "20"},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "", "strict": False, "parameters": SCHEMA},
        in_namespace(TOOL),
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-conversation",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "0199", "x-codex-turn-metadata": '{"turn_id": "1"}'},
}


def test_a_request_as_codex_sends_it_is_served():
    chat = chat_of(**AS_CODEX_SENDS_IT)
    *_, first, _, second, _ = plain(chat.messages)
    assert first["reasoning"] == "With ls"
    names = [next(iter(call["tool_calls"]))["function"]["name"] for call in (first, second)]
    assert names == [tool.function.name for tool in chat.tools] == ["shell", "mcp__weather"]
    assert chat.logprobs is not True
    assert (chat.reasoning_effort, chat.stream) == ("medium", True)


def test_encrypted_reasoning_may_be_asked_for_beside_log_probabilities():
    include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    assert chat_of(include=include, top_logprobs=1).logprobs is True


def test_a_tool_that_is_no_function_is_refused_with_what_to_do():
    with pytest.raises(FieldError) as refused:
        chat_of(tools=[TOOL, {"type": "web_search", "external_web_access": False}])
    assert str(refused.value) == (
        "tools[1]: is of type 'web_search'; leave it out, or switch it off in the client: of tools, only "
        "functions are served"
    )


def test_an_answer_that_was_begun_is_continued():
    begun = {"type": "message", "role": "assistant", "status": "incomplete", "id": "msg"}
    begun["content"] = [{"type": "output_text", "text": "Once", "annotations": []}]
    chat = chat_of(input=[{"role": "user", "content": "Tell"}, begun])
    assert (chat.add_generation_prompt, chat.continue_final_message) == (False, True)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"temprature": 1}, "temprature"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"vllm_xargs": {"slackserve_job": "1"}}, "vllm_xargs.slackserve_job"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOL, in_namespace({"type": "custom", "name": "patch"})]}, "tools[1].tools[0]"),
        ({"tools": [in_namespace({**TOOL, "parameters": [1]})]}, "tools[0].tools[0].parameters"),
        ({"tools": [in_namespace(5)]}, "tools[0].tools[0]"),
        (
            {
                "tools": [in_namespace({**TOOL, "parameters": {"title": "x" * 400}})],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "weather"}, "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"a": 1}]}}, "tool_choice"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a/b"}]}]},
            "input",
        ),
        ({"max_output_tokens": 2000}, "max_output_tokens"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"a": "x" * 400}}}},
            "text.format",
        ),
        ({"structured_outputs": {"regex": "x" * 400}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "x"}, "text": {"format": {"type": "text"}}}, "structured_outputs"),
        ({"tools": [{**TOOL, "parameters": {"title": "x" * 400}, "strict": True}]}, "tools"),
        (
            {"tools": [{**TOOL, "parameters": {"title": "x" * 400}}], "tool_choice": "required"},
            "tools",
        ),
        ({"stop": ["x" * 100_000]}, "stop"),
        ({"stop": list("abcde")}, "stop"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "tool_call_id": "c", "content": "x"}]}, "input[0].role"),
        ({"input": ["x"]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_txt", "text": "x"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]},
            "input[0].content[0].text",
        ),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "mesage", "role": "user", "content": "x"}]}, "input[0].type"),
    ],
)
def test_what_is_refused_names_the_field_that_was_sent(fields, field):
    with pytest.raises((FieldError, HTTPError)) as caught:
        chat_of(**fields)
    named = caught.value.field if isinstance(caught.value, FieldError) else caught.value.param
    assert str(named).startswith(field), caught.value
    assert getattr(caught.value, "status", 400) == 400


@pytest.mark.parametrize(
    "item",
    [
        {"type": "message", "role": "assistant", "content": []},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "bogus"}]},
        {"type": "message", "role": "assistant", "status": "completed", "content": [{"type": "bogus"}]},
        {"type": "function_call_output", "output": {"a": [1]}},
        {"type": "reasoning", "summary": [{}], "content": None},
        {"role": "user", "content": [1]},
        {"role": "user", "content": {"a": 1}},
        {},
    ],
)
def test_no_item_is_the_servers_fault(item):
    statuses = []
    try:
        chat_of(input=[{"role": "user", "content": "hi"}, item])
    except FieldError:
        statuses.append(400)
    except HTTPError as error:
        statuses.append(error.status)
    assert statuses in ([], [400])


def test_an_answer_of_several_parts_and_a_refusal_are_replayed():
    parts = [{"type": "output_text", "text": "a", "annotations": []}, {"type": "refusal", "refusal": "b"}]
    chat = chat_of(input=[{"type": "message", "role": "assistant", "content": parts}])
    assert plain(chat.messages) == [{"role": "assistant", "content": "ab"}]


def test_nothing_of_an_answer_in_a_conversation_is_lost():
    parts = [{"type": "input_text", "text": text} for text in ("a", "b")]
    chat = chat_of(input=[{"role": "assistant", "content": parts}, {"role": "user", "content": "and?"}])
    assert plain(chat.messages) == [
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "and?"},
    ]
    thoughts = [{"type": "reasoning_text", "text": text} for text in ("h1 ", "h2")]
    summary = [{"type": "summary_text", "text": text} for text in ("s1", "s2")]
    for given, reasoning in ({"content": thoughts, "summary": []}, "h1 h2"), ({"summary": summary}, "s1\ns2"):
        item = {"type": "reasoning", "id": "r", **given}
        (message,) = chat_of(input=[item]).messages
        assert message["reasoning"] == reasoning


def test_reasoning_that_is_its_summary_makes_no_line(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    summary = [{"type": "summary_text", "text": "s"}]
    (message,) = chat_of(input=[{"type": "reasoning", "id": "sent " * 1_000, "summary": summary}]).messages
    assert message["reasoning"] == "s"
    assert caplog.records == []


def test_an_answer_with_more_than_text_is_refused_if_vllm_would_cut_it():
    picture = {"type": "input_image", "detail": "auto", "image_url": "data:image/png;base64,AAAA"}
    parts = [{"type": "input_text", "text": "a"}, picture]
    with pytest.raises(FieldError, match="assistant"):
        chat_of(input=[{"role": "assistant", "content": parts}])


@pytest.mark.parametrize(
    ("before", "fields", "field"),
    [
        ([], {}, "input[0].content"),
        ([], {"instructions": "Be brief."}, "input[0].content"),
        ([{"role": "user", "content": "hi"}], {"instructions": "Be brief."}, "input[1].content"),
        (
            [
                {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}]},
                {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            ],
            {},
            "input.content",
        ),
    ],
)
def test_the_item_that_is_refused_is_named_by_its_place_or_not_at_all(before, fields, field):
    with pytest.raises(FieldError) as refused:
        chat_of(
            input=[*before, {"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}], **fields
        )
    assert refused.value.field == field


@pytest.mark.parametrize(
    "fields",
    [
        {"background": False},
        {"background": None, "truncation": None, "temperature": None, "tools": None},
        {"previous_response_id": None},
        {"store": False},
    ],
)
def test_what_changes_nothing_is_taken(fields):
    assert chat_of(**fields).messages
