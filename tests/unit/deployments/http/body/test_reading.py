"""What a body may be, and that refusing one holds up nobody."""

import json
import time

import pytest
from bodies import model
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest

from deployments.config.limits import LimitsConfig
from deployments.http.body.asks import output_tokens
from deployments.http.body.json_text import json_shape
from deployments.http.body.reading import parse, read
from deployments.http.errors import HTTPError
from slo.admission.tenants import ANONYMOUS
from slo.errors import FieldError

LIMITS = LimitsConfig()
SAY = {"role": "user", "content": "hi"}
LARGEST = LIMITS.max_body_bytes


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (b"", (0, 0, 0, 0)),
        (b"[]", (1, 1, 0, 1)),
        (b'{"a": [1, 2, {"b": []}]}', (4, 6, 2, 4)),
        (rb'{"a": "[[[\"{{{:,,"}', (1, 1, 1, 1)),
        (rb'["\\", [1]]', (2, 3, 0, 2)),
        (b'["unfinished [[[', (1, 1, 0, 1)),
    ],
)
def test_shapes(text, shape):
    assert json_shape(text, 100) == shape


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


def sizes(value):
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [sizes(item) for item in (value.values() if isinstance(value, dict) else value)]
    return (
        1 + sum(count for count, _, _ in inner),
        len(value) * isinstance(value, dict) + sum(names for _, names, _ in inner),
        1 + max((depth for _, _, depth in inner), default=0),
    )


@given(VALUES)
def test_the_shape_is_what_parsing_finds(value):
    shape = json_shape(json.dumps(value).encode(), 1000)
    assert (shape.containers, shape.names, shape.depth) == sizes(value)


def largest(unit, opening=b"[", closing=b"]"):
    return opening + unit * ((LARGEST - 100) // len(unit)) + closing


WORST = {
    "lists": largest(b"[],", closing=b"[]]"),
    "deep": b"[" * 9_999 + b"]" * 9_999,
    "deep objects": b'{"a":' * 30_000 + b"1" + b"}" * 30_000,
    "quotes": largest(b'"'),
    "escaped quotes": largest(rb"\"", b'"', b""),
    "an unfinished text": largest(b"[,{", b'"', b""),
    "a number": largest(b"9", b'{"model": "m", "prompt": [', b"]}"),
    "arguments": b'{"model": "m", "messages": [{"role": "assistant", "tool_calls": [{"type": "function", '
    b'"function": {"name": "f", "arguments": "' + b"[]," * 600_000 + b'"}}]}]}',
    "prompts": b'{"model": "m", "prompt": [' + b'"a",' * 250_000 + b'"a"]}',
    "floats": b'{"model": "m", "prompt": [' + b"0.1," * 250_000 + b"1]}",
    "too many names": b"{" + b",".join(b'"k%d": 1' % number for number in range(140_000)) + b"}",
    "nulls": b"{" + b",".join(b'"k%d": null' % number for number in range(LIMITS.max_json_names)) + b"}",
    "names": b"{" + b",".join(b'"k%d": 1' % number for number in range(LIMITS.max_json_names)) + b"}",
}


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest])
@pytest.mark.parametrize("name", WORST)
def test_the_worst_bodies_are_refused_before_anybody_notices(name, model):
    """Parsing holds the event loop, so the time is what all other streams stand still.

    Of three times the shortest: what else this machine does slows a core down, too.
    """
    assert len(WORST[name]) <= LARGEST
    took_s = []
    for _ in range(3):
        started_s = time.thread_time()
        with pytest.raises((HTTPError, FieldError)):
            parse(WORST[name], model, LIMITS)
        took_s.append(time.thread_time() - started_s)
    assert min(took_s) < 0.2


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": [5] * 250_000}, "messages[0]"),
        ({"messages": [SAY], "tools": [5] * 250_000}, "tools[0]"),
        ({"messages": [{"role": "user", "content": 5}] * 2_000}, None),
        ({"input": [5] * 250_000}, "input[0]"),
        ({"input": [{"role": "user", "content": [5] * 250_000}]}, "input[0].content[0]"),
        ({"input": [SAY] * 1000 + [{"type": "x"}] * 8_900}, "input[1000].type"),
        (
            {"input": [SAY] * 33 + [{"type": "function_call", "call_id": "c", "name": "f"}]},
            "input[33].arguments",
        ),
    ],
)
def test_what_is_wrong_many_times_over_is_refused_before_anybody_notices(fields, field):
    """Each wrong object was tried as every type that it may have: 20,000 took 13 s, and 6 GB."""
    model = ChatCompletionRequest if "messages" in fields else ResponsesRequest
    raw = json.dumps({"model": "m", **fields}).encode()
    took_s = []
    for _ in range(3):
        started_s = time.thread_time()
        with pytest.raises((HTTPError, FieldError)) as refused:
            parse(raw, model, LIMITS)
        took_s.append(time.thread_time() - started_s)
    assert getattr(refused.value, "field", getattr(refused.value, "param", None)) == field
    assert min(took_s) < 0.3


def test_a_long_input_is_read_whole():
    items = [{**SAY, "content": str(number)} for number in range(100)]
    read_ = parse(
        json.dumps({"model": "m", "instructions": "a", "input": items}).encode(), ResponsesRequest, LIMITS
    )
    assert read_.instructions == "a"
    assert [item["content"] for item in read_.input] == [item["content"] for item in items]


def test_a_conversation_as_long_as_may_be_is_read_before_anybody_notices():
    """Each message was tried as all sixty types of an item: 1 s."""
    raw = json.dumps({"model": "m", "input": [SAY] * (LIMITS.max_json_containers - 10)}).encode()
    took_s = []
    for _ in range(3):
        started_s = time.thread_time()
        parse(raw, ResponsesRequest, LIMITS)
        took_s.append(time.thread_time() - started_s)
    assert min(took_s) < 0.3


MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool", 5])},
    optional={
        "content": st.text(st.characters(exclude_categories=["Cs"])) | st.none(),
        "type": st.sampled_from(["message", "reasoning", None]),
        "id": st.just("a"),
        "phase": st.just("commentary"),
    },
)


@given(st.lists(MESSAGES, min_size=1, max_size=40))
def test_an_input_is_read_in_pieces_as_it_is_at_once(items):
    body = {"model": "m", "input": items}
    try:
        whole = ResponsesRequest.model_validate(json.loads(json.dumps(body))).input
    except ValueError:
        with pytest.raises((HTTPError, FieldError)):
            parse(json.dumps(body).encode(), ResponsesRequest, LIMITS)
    else:
        assert parse(json.dumps(body).encode(), ResponsesRequest, LIMITS).input == whole


def test_the_longest_prompts_are_read():
    tokens = {"model": "m", "prompt": [7] * 290_000}
    assert len(parse(json.dumps(tokens).encode(), CompletionRequest, LIMITS).prompt) == 290_000
    text = {"model": "m", "prompt": "{[,]} " * 300_000}
    assert parse(json.dumps(text).encode(), CompletionRequest, LIMITS).prompt == text["prompt"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 65 + b"]" * 65, "the body has 65 lists and objects inside each other; limits.max_json_depth"),
        (b"[" + b"{}," * 10_000 + b"1]", "the body has 10001 lists and objects; limits.max_json_containers"),
        (b"[" + b"1," * 300_000 + b"1]", "the body has 300001 values; limits.max_json_values allows 300000"),
        (b"{" + b'"k":1,' * 50_000 + b'"k":1}', "the body has 50001 names; limits.max_json_names"),
        (b"\xff{}", "the body is not JSON"),
        (b'{"model": "m", "prompt": "a", "temperature": Infinity}', "the body is not JSON: Infinity"),
    ],
)
def test_refusals_name_their_limit(content, message):
    with pytest.raises(HTTPError) as refused:
        parse(content, CompletionRequest, LIMITS)
    assert (refused.value.status, refused.value.message[: len(message)]) == (400, message)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [5, "a"]}, "prompt[1]"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "temperature": "x"}, "temperature"),
        ({"prompt": "a", "logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"prompt": "a", "stop": ["b", 1]}, "stop[1]"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [SAY, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [SAY, {"role": "user", "content": [{"type": "text"}]}]}, "messages[1].content[0].text"),
        ({"messages": [SAY], "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"messages": "a"}, "messages"),
    ],
)
def test_a_refusal_names_the_field_as_the_client_spelt_it(fields, param):
    model = ChatCompletionRequest if "messages" in fields else CompletionRequest
    with pytest.raises(HTTPError) as refused:
        read(json.dumps({"model": "m", **fields}).encode(), model, LIMITS, ANONYMOUS)
    assert refused.value.param == param
    assert refused.value.message.startswith(f"{param}: ")


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def calls(*found):
    return [SAY, {"role": "assistant", "tool_calls": found}]


def called_with(*arguments):
    return json.dumps(
        {
            "model": "m",
            "messages": calls(
                *({**CALL, "function": {"name": "f", "arguments": text}} for text in arguments)
            ),
        }
    ).encode()


@pytest.mark.parametrize("model", [ChatCompletionRequest, TokenizeChatRequest])
@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["{}", "[" * 65], "65 lists and objects inside each other; limits.max_json_depth allows 64"),
        (["[" * 5_000], "5000 lists and objects inside each other; limits.max_json_depth"),
        (["[" + "{}," * 10_000 + "1]"], "10001 lists and objects; limits.max_json_containers allows 10000"),
        (["[[],[]]"] * 3_000 + ["[]"] * 1_001, "10001 lists and objects; limits.max_json_containers"),
        (["[" + "1," * 300_000 + "1]"], "300001 values; limits.max_json_values allows 300000"),
        (["{" + '"k":1,' * 50_000 + '"k":1}'], "50001 names; limits.max_json_names"),
    ],
)
def test_arguments_of_tool_calls_may_be_together_what_a_body_may(model, arguments, found):
    """vLLM parses these texts where all streams of a decode replica wait."""
    with pytest.raises(HTTPError) as refused:
        parse(called_with(*arguments), model, LIMITS)
    message = f"the JSON in arguments of tool calls has {found}"
    assert (refused.value.status, refused.value.param) == (400, "messages")
    assert refused.value.message[: len(message)] == message


@pytest.mark.parametrize(
    "arguments", ["[" * 64, "no JSON", '{"a": "' + "[" * 70, json.dumps({"a": "[" * 99})]
)
def test_arguments_are_no_more_looked_at_than_that(arguments):
    (_, message) = parse(called_with(arguments), ChatCompletionRequest, LIMITS).messages
    (call,) = message["tool_calls"]
    assert call["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "a", "stop": list("abcde")}, "stop: List should have at most 4 items"),
        ({"prompt": "a", "stop": 5}, "stop: Input should be a valid string"),
        ({"prompt": ["a", 3]}, "prompt[1]: Input should be a valid string"),
        ({"prompt": [1, 2.5]}, "prompt[1]: Input should be a valid integer, got a number with a fractional"),
        ({"prompt": [[1], ["a"]]}, "prompt[1][0]: Input should be a valid integer"),
        ({"messages": [SAY], "stop": list("abcde")}, "stop: List should have at most 4 items"),
        ({"messages": [{"role": "user", "content": "a", "name": 7}]}, "messages[0].name: Input should be a"),
        ({"messages": [{"role": "user", "name": 7}]}, "messages[0].name: Input should be a"),
        ({"messages": [{"content": "a"}]}, "messages[0].role: Field required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            "messages[0].content[0].text: Input should be a valid string",
        ),
        (
            {"messages": calls({**CALL, "function": {"name": "f"}})},
            "messages[1].tool_calls[0].function.arguments: Field required",
        ),
        (
            {"messages": calls(CALL, {**CALL, "function": {"name": "f", "arguments": {}}})},
            "messages[1].tool_calls[1].function.arguments: Input should be a valid string",
        ),
        ({"messages": calls({**CALL, "id": 1})}, "messages[1].tool_calls[0].id: Input should be a valid s"),
        (
            {"messages": [SAY], "response_format": {"type": "x"}},
            "response_format.type: Input should be 'text', 'json_object', 'json_schema' or 'structural_",
        ),
        (
            {"messages": [SAY], "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name: Field required",
        ),
    ],
)
def test_a_refusal_is_about_the_type_that_the_client_has_most_likely_meant(fields, message):
    """Of each type that a field may have, pydantic says what is wrong with the value as one of that type."""
    model = ChatCompletionRequest if "messages" in fields else CompletionRequest
    with pytest.raises(HTTPError) as refused:
        read(json.dumps({"model": "m", **fields}).encode(), model, LIMITS, ANONYMOUS)
    assert refused.value.message[: len(message)] == message


@pytest.mark.parametrize("half", [rb"\ud800", rb"\uDFff", rb"x\udc00\ud800"])
def test_half_a_surrogate_pair_is_refused_and_a_whole_one_is_not(half):
    with pytest.raises(FieldError, match="prompt"):
        parse(b'{"model": "m", "prompt": "' + half + b'"}', CompletionRequest, LIMITS)
    assert parse(rb'{"model": "m", "prompt": "\ud83d\ude00"}', CompletionRequest, LIMITS).prompt == "😀"


INTEGER = "give an integer from -9223372036854775808 to 9223372036854775807"


@pytest.mark.parametrize(
    ("number", "shown", "valid"),
    [
        ("9223372036854775808", "9223372036854775808", INTEGER),
        ("-9223372036854775809", "-9223372036854775809", INTEGER),
        ("1" * 300, f"{'1' * 24}…", INTEGER),
        ("1" * 5000, f"{'1' * 24}…", INTEGER),
        ("1e400", "1e400", "give a number of at most 1.79e308"),
        ("-1.5E+999", "-1.5E+999", "give a number of at most 1.79e308"),
    ],
)
@pytest.mark.parametrize(
    ("place", "field"),
    [
        (b'"top_k": %s', "top_k"),
        (b'"vllm_xargs": {"a": %s}', "vllm_xargs.a"),
        (b'"stop_token_ids": [1, %s]', "stop_token_ids[1]"),
    ],
)
def test_numbers_that_no_engine_takes_are_refused(number, shown, valid, place, field):
    with pytest.raises(FieldError) as refused:
        parse(b'{"model": "m", "prompt": "a", ' + place % number.encode() + b"}", CompletionRequest, LIMITS)
    assert refused.value.field == field
    assert str(refused.value) == f"{field}: {shown} does not fit into 64 bits; {valid}"


@pytest.mark.parametrize("body", [b"9223372036854775808", b"[1e999]"])
def test_such_a_number_that_is_in_no_field_is_no_object(body):
    with pytest.raises(HTTPError, match="the body is not a JSON object"):
        parse(body, CompletionRequest, LIMITS)


@pytest.mark.parametrize("number", ["9223372036854775807", "-9223372036854775808", "1e-999", "0." + 40 * "1"])
def test_other_numbers_with_many_digits_are_not(number):
    body = b'{"model": "m", "prompt": "a", "vllm_xargs": {"a": %s}}' % number.encode()
    assert parse(body, CompletionRequest, LIMITS).vllm_xargs == {"a": json.loads(number)}


@pytest.mark.parametrize(("limit", "most"), [(8, 8), (16, 16), (100, 16), (None, 16)])
@pytest.mark.parametrize("asked", [{}, {"max_tokens": None}])
def test_who_names_no_max_tokens_asks_for_no_more_than_is_allowed(asked, limit, most):
    limits = LimitsConfig(max_output_tokens=limit)
    raw = json.dumps({"model": "m", "prompt": "a", **asked}).encode()
    body = read(raw, CompletionRequest, limits, ANONYMOUS)
    assert (body.max_tokens, output_tokens(body, model(1000, limit))) == (most, most)
    chat = json.dumps({"model": "m", "messages": [], **asked}).encode()
    assert read(chat, ChatCompletionRequest, limits, ANONYMOUS).max_tokens is None


def test_who_names_more_than_is_allowed_is_refused():
    raw = json.dumps({"model": "m", "prompt": "a", "max_tokens": 9}).encode()
    with pytest.raises(FieldError, match=r"limits\.max_output_tokens allows 8"):
        read(raw, CompletionRequest, LimitsConfig(max_output_tokens=8), ANONYMOUS)


@pytest.mark.parametrize("name", [r"\ud800", r"a\nb", "x" * 1_000_000])
@pytest.mark.parametrize("body", ['{{"{0}": 1, "{0}": 1}}', '{{"{0}": "\\ud800"}}', '{{"{0}": 1}}'])
def test_a_field_of_any_name_can_be_told_of_and_logged(name, body):
    with pytest.raises(FieldError) as refused:
        parse(body.format(name).encode(), CompletionRequest, LIMITS)
    assert refused.value.field.isprintable()
    assert len(str(refused.value)) < 1000
    str(refused.value).encode()
