"""What a request of the messages API asks for, as a chat completion."""

import json

import pytest

from deployments.config.limits import LimitsConfig
from deployments.http.errors import HTTPError
from deployments.http.messages.request import read, read_to_count
from slo.admission.tenants import ANONYMOUS
from slo.errors import FieldError

LIMITS = LimitsConfig(max_grammar_bytes=300, max_output_tokens=1000)
SCHEMA = {"type": "object", "properties": {"unit": {"enum": ["c", None], "default": None}}}
TOOL = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}
SAID = [{"role": "user", "content": "hi"}]
PICTURE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


def body(**fields):
    return json.dumps({"model": "m", "max_tokens": 7, "messages": SAID, **fields}).encode()


def chat_of(**fields):
    return read(body(**fields), LIMITS, ANONYMOUS)[1]


def refusal_of(**fields):
    with pytest.raises((FieldError, HTTPError)) as refused:
        chat_of(**fields)
    return refused.value


def plain(messages):
    """Without what is not said."""
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def test_the_system_is_the_first_message_wherever_it_stands():
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    chat = chat_of(system=system, messages=[*SAID, {"role": "system", "content": " And kind."}])
    assert plain(chat.messages) == [{"role": "system", "content": "Be brief. And kind."}, *SAID]


def test_a_conversation_with_a_call_its_result_and_thoughts():
    call = {"type": "tool_use", "id": "c", "name": "weather", "input": {"unit": "c"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "20"}]}
    thought = {"type": "thinking", "thinking": "Hm", "signature": "s"}
    asked, called, told, said = plain(
        chat_of(
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "How warm"}, {"type": "text", "text": "?"}],
                },
                {"role": "assistant", "content": [thought, call]},
                {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
            ]
        ).messages
    )
    assert asked["content"] == [{"type": "text", "text": "How warm"}, {"type": "text", "text": "?"}]
    assert called["reasoning"] == "Hm"
    (made,) = called["tool_calls"]
    assert (made["id"], made["function"]["name"]) == ("c", "weather")
    assert json.loads(made["function"]["arguments"]) == {"unit": "c"}
    assert (told["role"], told["tool_call_id"], told["content"]) == ("tool", "c", "20")
    assert said == {"role": "user", "content": "Well?"}


def test_what_is_asked_for_has_a_chats_names():
    chat = chat_of(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        stop_sequences=["x"],
        stream=True,
        tools=[TOOL],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        metadata={"user_id": "u"},
        chat_template_kwargs={"enable_thinking": False, "depth": None},
    )
    assert (chat.max_completion_tokens, chat.temperature, chat.top_k, chat.top_p) == (7, 0.5, 3, 0.9)
    assert (chat.stop, chat.reasoning_effort) == (["x"], "low")
    assert (chat.stream, chat.stream_options.include_usage) == (True, True)
    assert chat.stream_options.continuous_usage_stats
    (tool,) = chat.tools
    assert (tool.function.name, tool.function.description) == ("weather", "Tells it.")
    assert tool.function.parameters == SCHEMA
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("auto", False)
    assert chat.response_format.json_schema.json_schema == SCHEMA
    assert chat.chat_template_kwargs == {"enable_thinking": False, "depth": None}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ],
)
def test_a_choice_of_tools(given, told):
    choice = chat_of(tools=[TOOL], tool_choice=given).tool_choice
    assert (choice if isinstance(choice, str) else choice.model_dump()) == told


def test_tools_without_a_choice_may_be_called():
    assert chat_of(tools=[TOOL]).tool_choice == "auto"


@pytest.mark.parametrize("tools", [{}, {"tools": []}], ids=["without", "empty"])
@pytest.mark.parametrize("choice", [{}, {"tool_choice": {"type": "auto"}}], ids=["no choice", "auto"])
def test_no_tools_are_none(tools, choice):
    chat = chat_of(**tools, **choice)
    assert (chat.tools, chat.tool_choice) == (None, "none")


@pytest.mark.parametrize("tools", [{}, {"tools": []}], ids=["without", "empty"])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_choice_that_demands_a_tool_needs_some(tools, choice):
    assert refusal_of(**tools, tool_choice=choice).param == "tool_choice"


@pytest.mark.parametrize(
    ("given", "told"), [("auto", "auto"), ("standard_only", "default"), ("batch", "batch")]
)
def test_a_service_tier_is_anthropics_or_the_deployments_own(given, told):
    assert chat_of(service_tier=given).service_tier == told


def test_what_clients_send_that_changes_nothing_is_taken():
    chat = chat_of(
        thinking={"type": "enabled", "budget_tokens": 1024},
        context_management={"edits": []},
        cache_control={"type": "ephemeral"},
        top_k=None,
    )
    assert plain(chat.messages) == SAID


def test_a_picture_is_one_of_a_chat():
    (message,) = chat_of(
        messages=[{"role": "user", "content": [{"type": "image", "source": PICTURE}]}]
    ).messages
    assert list(message["content"]) == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    ]


def test_a_picture_is_not_fetched():
    source = {"type": "url", "url": "http://internal/x.png"}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": source}]}
    for block in ({"type": "image", "source": source}, result):
        refused = refusal_of(messages=[{"role": "user", "content": [block]}])
        assert refused.field == "messages"
        assert "does not fetch from" in refused.problem


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1001}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"stop_sequences": ["x" * 100_000]}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"const": "x" * 400}}}},
            "output_config.format",
        ),
        ({"vllm_xargs": {"kv_transfer_params": 1}}, "vllm_xargs.kv_transfer_params"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"n": 2}, "n"),
        ({"stop": ["x"]}, "stop"),
        ({"thinking": {"type": "x" * 20_000}}, "thinking"),
    ],
)
def test_what_is_refused_names_the_field_that_was_sent(fields, named):
    refused = refusal_of(**fields)
    assert (refused.field if isinstance(refused, FieldError) else refused.param) == named


def result_of(*parts):
    return [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [*parts]}]}]


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        (
            result_of({"type": "text", "text": "x"}, {"type": "document"}),
            "messages[0].content[0].content[1].type",
        ),
        (result_of({"type": "search_result"}), "messages[0].content[0].content[0].type"),
        (result_of({"text": "x"}), "messages[0].content[0].content[0].type"),
        (result_of({"type": "image"}), "messages[0].content[0].content[0].source"),
        (
            result_of({"type": "image", "source": {"type": "file", "file_id": "f"}}),
            "messages[0].content[0].content[0].source",
        ),
        (result_of({"type": "image", "source": "x"}), "messages[0].content[0].content[0].source"),
        ([{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0].source"),
        (
            [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": ""}}]}],
            "messages[0].content[0].source",
        ),
        ([{"role": "user", "content": [{"type": "tool_reference"}]}], "messages[0].content[0].type"),
        (
            result_of({"type": "tool_reference", "tool_name": ""}),
            "messages[0].content[0].content[0].tool_name",
        ),
        ([{"role": "assistant", "content": [{"type": "tool_reference"}]}], "messages[0].content[0].type"),
        (
            [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}],
            "messages[0].content[0].type",
        ),
        (
            [{"role": "user", "content": [{"type": "tool_use", "id": "c", "name": "weather", "input": {}}]}],
            "messages[0].content[0].type",
        ),
        (
            [{"role": "system", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}, *SAID],
            "messages[0].content[1].type",
        ),
    ],
)
def test_a_block_that_the_model_would_not_see_is_refused(messages, named):
    assert refusal_of(messages=messages).field == named
    with pytest.raises(FieldError) as refused:
        read_to_count(json.dumps({"model": "m", "messages": messages}).encode(), LIMITS)
    assert refused.value.field == named


def test_a_tool_that_a_result_refers_to_is_named_to_the_model():
    named = [{"type": "tool_reference", "tool_name": "a"}, {"type": "tool_reference", "name": "b"}]
    _, told = chat_of(messages=result_of(*named)).messages
    assert [part["name"] for part in told["content"]] == ["a", "b"]


def test_the_systems_text_has_no_pictures():
    assert refusal_of(system=[{"type": "text", "text": "x"}, {"type": "image"}]).field == "system[1].type"


def test_the_prompt_is_counted_with_its_tools():
    asked = {
        "model": "m",
        "messages": SAID,
        "system": "Be brief.",
        "tools": [TOOL],
        "thinking": {"type": "adaptive"},
    }
    asked["tool_choice"] = {"type": "any"}
    chat = read_to_count(json.dumps(asked).encode(), LIMITS)
    assert [message["role"] for message in chat.messages] == ["system", "user"]
    assert chat.tools[0].function.parameters == SCHEMA


def test_a_prompt_with_a_list_of_no_tools_is_counted():
    chat = read_to_count(json.dumps({"model": "m", "messages": SAID, "tools": []}).encode(), LIMITS)
    assert chat.tools is None


def test_pictures_are_not_counted():
    asked = {"model": "m", "messages": [{"role": "user", "content": [{"type": "image", "source": PICTURE}]}]}
    with pytest.raises(FieldError, match="more than text") as refused:
        read_to_count(json.dumps(asked).encode(), LIMITS)
    assert refused.value.field == "messages"
