"""A gRPC message says in JSON and headers what an HTTP client would have said."""

import json
import math

import pytest
from google.protobuf import json_format
from google.protobuf.json_format import MessageToDict, ParseDict
from ray.serve.llm.openai_api_models import ChatCompletionRequest

from deployments.config.limits import LimitsConfig
from deployments.grpc import inference_pb2 as pb
from deployments.grpc.messages import parsed, request_body, request_headers
from deployments.http.body.reading import parse, read
from slo.admission.tenants import ANONYMOUS
from slo.errors import FieldError


def test_a_chat_in_openais_words():
    request = pb.ChatRequest(
        model="tiny",
        messages=[
            pb.Message(role="system", content="be brief"),
            pb.Message(
                role="user",
                content_parts=ParseDict({"parts": [{"type": "text", "text": "hi"}]}, pb.ContentParts()),
            ),
        ],
        max_tokens=3,
        temperature=0.7,
        stop=["a", "b"],
        logit_bias={"5": -1.5},
        seed=2**40,
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        objective=pb.Objective(tier="premium"),
    )
    request.tool_choice.string_value = "auto"
    request.extra.update({"top_k": 5, "ignore_eos": True, "vllm_xargs": {"a": 1.5}})
    assert json.loads(request_body(request, stream=True)) == {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        "max_tokens": 3,
        "temperature": 0.7,
        "stop": ["a", "b"],
        "logit_bias": {"5": -1.5},
        "seed": 2**40,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "auto",
        "stream": True,
        "top_k": 5,
        "ignore_eos": True,
        "vllm_xargs": {"a": 1.5},
    }


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ({"prompt": "hi"}, "hi"),
        ({"prompt": ""}, ""),
        ({"prompt_token_ids": {"ids": [1, 2, 0]}}, [1, 2, 0]),
        ({"prompt_token_ids": {}}, []),
    ],
)
def test_a_prompt_of_text_or_tokens(prompt, expected):
    body = json.loads(request_body(pb.CompleteRequest(model="tiny", **prompt), stream=False))
    assert body == {"model": "tiny", "prompt": expected, "stream": False}


def test_a_call_without_arguments_is_replayed_as_it_was_answered():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    answer = parsed({"role": "assistant", "content": "", "tool_calls": [call]}, pb.Message())
    asked = pb.Message(role="user", content="call f")
    body = request_body(pb.ChatRequest(model="tiny", messages=[asked, answer]), stream=False)
    assert json.loads(body)["messages"][1]["tool_calls"] == [call]
    read(body, ChatCompletionRequest, LimitsConfig(), ANONYMOUS)


def test_zero_is_sent_and_what_is_not_set_is_not():
    body = json.loads(request_body(pb.CompleteRequest(prompt="", max_tokens=0, temperature=0), stream=False))
    assert body == {"prompt": "", "max_tokens": 0, "temperature": 0.0, "stream": False}


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (5, b"5"),
        (-5.0, b"-5"),
        (0.5, b"0.5"),
        (2**53 - 1, b"9007199254740991"),
        (2**53, b"9007199254740992.0"),
        (1e300, b"1e+300"),
        (True, b"true"),
        ({"enum": [1, 2.5]}, b'{"enum": [1, 2.5]}'),
    ],
)
def test_a_whole_number_is_one_in_the_body_too(given, sent):
    """A Struct has floating-point numbers only, and no grammar can be made of `{"minItems": 1.0}`."""
    request = pb.ChatRequest()
    request.tools.add().update({"a": given})
    request.response_format.update({"a": given})
    request.extra.update({"a": [given]})
    expected = b'{"tools":[{"a": X}],"response_format":{"a": X},"stream":false,"a":[X]}'
    assert request_body(request, stream=False) == expected.replace(b"X", sent)


@pytest.mark.parametrize("extra", [{"prompt": "there"}, {"stream": True}])
def test_what_is_given_twice_is_refused_as_in_any_body(extra):
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    request = pb.CompleteRequest(model="tiny", prompt="here")
    request.extra.update(extra)
    with pytest.raises(FieldError, match="is given more than once"):
        parse(request_body(request, stream=False), CompletionRequest, LimitsConfig())


ORDERED = (
    '{"type": "object", "properties": {"reasoning": {}, "answer": {}, "a": {"maximum": 9007199254740993}}}'
)


def test_a_schema_that_is_written_as_text_keeps_its_order_and_its_numbers():
    """A Struct has neither: the properties of an answer are generated in the order of its schema."""
    request = pb.ChatRequest(model="m", extra_json=f' {{"tools":[{ORDERED}], "top_k": 5}}\n')
    request.extra.update({"min_p": 0.5})
    expected = '{"model":"m","stream":false,"min_p":0.5,"tools":[' + ORDERED + '], "top_k": 5}'
    assert request_body(request, stream=False).decode() == expected
    assert request_body(pb.CompleteRequest(extra_json=" {} "), stream=True) == b'{"stream":true}'


@pytest.mark.parametrize("text", ["[1]", "5", '"a"', "{", '{"a": 1}, {"b": 2}', "{} x", "}{"])
def test_text_that_is_no_object_is_refused_as_such_a_body(text):
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    from deployments.http.errors import HTTPError

    request = pb.CompleteRequest(model="tiny", prompt="here", extra_json=text)
    with pytest.raises(HTTPError) as refused:
        parse(request_body(request, stream=False), CompletionRequest, LimitsConfig())
    assert refused.value.status == 400


@pytest.mark.parametrize("text", ['{"prompt": "there"}', '{"stream": true}', '{"top_k": 5}'])
def test_what_is_given_in_the_text_too_is_refused(text):
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    request = pb.CompleteRequest(model="tiny", prompt="here", extra_json=text)
    request.extra.update({"top_k": 5})
    with pytest.raises(FieldError, match="is given more than once"):
        parse(request_body(request, stream=False), CompletionRequest, LimitsConfig())


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["extra", "temperature", "logit_bias"])
def test_a_number_that_json_does_not_have_is_refused_as_in_any_body(name, number):
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    from deployments.http.errors import HTTPError

    fields = {"extra": {"min_p": number}, "temperature": number, "logit_bias": {"5": number}}
    request = pb.CompleteRequest(model="tiny", prompt="here", **{name: fields[name]})
    with pytest.raises(HTTPError, match="NaN is not a number in JSON"):
        parse(request_body(request, stream=False), CompletionRequest, LimitsConfig())


def test_metadata_and_a_typed_objective_are_headers():
    request = pb.ChatRequest(objective=pb.Objective(tier="premium", ttft_ms=250, tpot_ms=0.5))
    metadata = [
        ("authorization", "Bearer k"),
        ("trace-bin", b"\0"),
        ("content-length", "7"),
        ("content_length", "7"),
        ("content-encoding", "gzip"),
        ("origin", "https://page.example"),
    ]
    assert request_headers(metadata, request) == [
        (b"authorization", b"Bearer k"),
        (b"x-slo-tier", b"premium"),
        (b"x-slo-ttft-ms", b"250.0"),
        (b"x-slo-tpot-ms", b"0.5"),
    ]


def test_a_key_in_the_metadata_and_in_the_objective_is_there_twice():
    request = pb.ChatRequest(objective=pb.Objective(ttft_ms=250))
    names = [name for name, _ in request_headers([("x-slo-ttft-ms", "5")], request)]
    assert names == [b"x-slo-ttft-ms", b"x-slo-ttft-ms"]


def test_an_answer_with_what_the_api_does_not_type():
    answer = parsed(
        {
            "id": "x",
            "object": "chat.completion",
            "created": 1_800_000_000,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": None, "tool_calls": [], "audio": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": 7,
                }
            ],
            "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
        },
        pb.ChatResponse(),
    )
    assert answer.created == 1_800_000_000
    assert answer.usage.total_tokens == 4
    (choice,) = answer.choices
    assert not choice.message.HasField("body")
    assert (choice.finish_reason, choice.stop_reason.number_value) == ("stop", 7)


@pytest.mark.parametrize("kind", [pb.ChatResponse, pb.CompleteResponse])
def test_nothing_of_an_answer_is_lost(kind):
    values = {
        "id": "x",
        "object": "text_completion",
        "prompt_logprobs": [None, {"12": {"logprob": -0.5, "rank": 1}}],
        "kv_transfer_params": None,
        "choices": [{"index": 0, "prompt_token_ids": [1, 12]}],
        "usage": {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    }
    answer = MessageToDict(parsed(values, kind()), preserving_proto_field_name=True)
    assert answer["extra"] == {"prompt_logprobs": values["prompt_logprobs"]}
    assert answer["choices"][0]["extra"] == {"prompt_token_ids": [1, 12]}
    assert answer["usage"]["extra"] == {"prompt_tokens_details": {"cached_tokens": 1}}


def test_nothing_of_a_models_card_is_lost():
    said = {"root": "tiny", "parent": "tiny", "max_model_len": 2048}
    card = {"id": "sql", "object": "model", "created": 1_800_000_000, "owned_by": "slackserve", **said}
    (model,) = parsed({"object": "list", "data": [card]}, pb.ListModelsResponse()).data
    assert (model.id, MessageToDict(model)["extra"]) == ("sql", said)


def test_nothing_of_a_chunk_is_lost():
    delta = {"role": "assistant", "annotations": ["a"]}
    chunk = {"id": "x", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}
    answer = MessageToDict(parsed({"chunks": [chunk]}, pb.ChatStreamResponse()))
    ((told,),) = [each["choices"] for each in answer["chunks"]]
    assert told["delta"] == {"role": "assistant", "extra": {"annotations": ["a"]}}
    assert "extra" not in answer["chunks"][0]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"extra": {"temprature": 1}}, "temprature"),
        ({"extra": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"extra_json": '{"chat_template": "{{ 1 }}"}'}, "chat_template"),
        ({"extra": {"structured_outputs": {"regex": "a" * 70_000}}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "a": "a" * 70_000}}, "response_format"),
        ({"n": 17}, "n"),
    ],
)
def test_the_limits_of_http_hold(fields, field):
    request = pb.ChatRequest(model="m", messages=[pb.Message(role="user", content="hi")])
    json_format.ParseDict(fields, request)
    with pytest.raises(FieldError) as refused:
        read(request_body(request, stream=False), ChatCompletionRequest, LimitsConfig(), ANONYMOUS)
    assert refused.value.field == field


def test_fields_that_nobody_knows_are_ignored_as_over_http():
    request = pb.ChatRequest(model="m", messages=[pb.Message(role="user", content="hi")])
    json_format.ParseDict({"extra": {"verbosity": "low", "top_k": 5}}, request)
    limits = LimitsConfig(unknown_fields="ignore")
    chat = read(request_body(request, stream=False), ChatCompletionRequest, limits, ANONYMOUS)
    assert chat.top_k == 5
    assert "verbosity" not in (chat.model_extra or {})


def test_media_of_parts_are_held_to_the_same_hosts():
    part = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}
    request = pb.ChatRequest(model="m", messages=[pb.Message(role="user")])
    json_format.ParseDict(part, request.messages[0].content_parts.parts.add())
    with pytest.raises(FieldError, match="the server does not fetch from"):
        read(request_body(request, stream=False), ChatCompletionRequest, LimitsConfig(), ANONYMOUS)


@pytest.mark.parametrize("kind", [pb.ChatResponse, pb.ChatChunk, pb.CompleteResponse])
def test_every_answer_may_say_its_fingerprint(kind):
    assert parsed({"system_fingerprint": "vllm"}, kind()).system_fingerprint == "vllm"
