"""The list of fields that are served, held against the vLLM that is installed."""

import inspect
import json

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from transformers import PreTrainedTokenizerBase, PythonBackend
from transformers.tokenization_mistral_common import MistralCommonBackend
from transformers.utils.chat_template_utils import render_jinja_template
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest
from vllm.renderers import cohere, hf, mistral
from vllm.tokenizers.kimi_audio import KimiAudioTokenizer
from vllm.tokenizers.mistral import MistralTokenizer

from deployments.config.limits import LimitsConfig
from deployments.http.body.allowed import (
    CHAT,
    COMPLETION,
    COUNT_TOKENS,
    KWARGS_REFUSED,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    TOKENIZE_CHAT,
    fields_of,
    served_fields,
)
from deployments.http.body.reading import parse, read, read_chat_to_convert
from deployments.http.messages.request import read as read_messages
from deployments.http.messages.request import read_to_count
from deployments.http.responses.request import read as read_response
from slo.admission.tenants import ANONYMOUS
from slo.errors import FieldError

LIMITS = LimitsConfig(media_domains=("pictures.example",))
SAY = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("model", "allowed"),
    [
        (ChatCompletionRequest, CHAT),
        (CompletionRequest, COMPLETION),
        (ResponsesRequest, RESPONSES),
        (AnthropicMessagesRequest, MESSAGES),
        (AnthropicCountTokensRequest, COUNT_TOKENS),
        (TokenizeChatRequest, TOKENIZE_CHAT),
        (TokenizeCompletionRequest, TOKENIZE),
    ],
)
def test_every_field_of_vllms_is_decided_on(model, allowed):
    """One that upstream adds belongs into one of the lists, once it was read what it does."""
    known = set(model.model_fields)
    fields = fields_of(known)
    assert allowed <= fields.allowed
    assert known - fields.allowed - fields.refused.keys() == set()
    assert allowed - known == set()
    assert not fields.allowed & fields.refused.keys()


def refused(model=ChatCompletionRequest, **fields):
    body = (
        {"model": "m", "messages": SAY} if model is ChatCompletionRequest else {"model": "m", "prompt": "hi"}
    )
    with pytest.raises(FieldError) as caught:
        parse(json.dumps({**body, **fields}).encode(), model, LIMITS)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"best_of": 3}, "best_of", "is not a field that is served here"),
        ({"prompt": "hi"}, "prompt", "is not a field"),
        ({"kv_transfer_params": {}}, "kv_transfer_params", "is set by the server itself"),
        ({"priority": 1}, "priority", "set x-slo-tier"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "is a program"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template", "program"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", "a field of the body"),
        ({"mm_processor_kwargs": {}}, "mm_processor_kwargs", "media"),
        ({"return_assistant_tokens_mask": True}, "return_assistant_tokens_mask", "is not served"),
    ],
)
def test_what_is_refused(fields, field, message):
    error = refused(**fields)
    assert error.field == field
    assert message in str(error)


def test_no_parameter_of_what_renders_a_chat_is_taken_for_a_variable_of_its_template():
    """One that upstream adds is refused, or is a variable, once it was read what it does."""
    renderers = (
        PythonBackend.apply_chat_template,
        MistralCommonBackend.apply_chat_template,
        KimiAudioTokenizer.apply_chat_template,
        MistralTokenizer.apply_chat_template,
        render_jinja_template,
        hf.safe_apply_chat_template,
        mistral.safe_apply_chat_template,
    )
    taken = [each for renderer in renderers for each in inspect.signature(renderer).parameters.values()]
    names = {each.name for each in taken if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
    names |= {*PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES}
    names |= {
        cohere.MESSAGES_CITATIONS_KEY,
        cohere.POSITION_TO_SOURCE_KEY,
        cohere.TOOL_MESSAGE_V2_CONTENT_KEY,
    }
    variables = {"add_generation_prompt", "continue_final_message", "documents", "reasoning_effort"}
    assert names - variables == KWARGS_REFUSED.keys()


def advice(model, name):
    fields = fields_of(model.model_fields)
    with pytest.raises(FieldError) as caught:
        served_fields({name: [1]}, fields, ignores=False)
    return caught.value.valid


@pytest.mark.parametrize(
    ("model", "name", "instead"),
    [
        (CompletionRequest, "max_completion_tokens", "max_tokens"),
        (CompletionRequest, "max_output_tokens", "max_tokens"),
        (CompletionRequest, "guided_grammar", "structured_outputs.grammar"),
        (CompletionRequest, "best_of", "n"),
        (CompletionRequest, "messages", "prompt"),
        (CompletionRequest, "input", "prompt"),
        (CompletionRequest, "prompt_token_ids", "prompt"),
        (ChatCompletionRequest, "max_output_tokens", "max_completion_tokens"),
        (ChatCompletionRequest, "guided_json", "structured_outputs.json"),
        (ChatCompletionRequest, "guided_choice", "structured_outputs.choice"),
        (ChatCompletionRequest, "guided_regex", "structured_outputs.regex"),
        (ChatCompletionRequest, "guided_whitespace_pattern", "structured_outputs.whitespace_pattern"),
        (ChatCompletionRequest, "structural_tag", "structured_outputs.structural_tag"),
        (ChatCompletionRequest, "functions", "tools"),
        (ChatCompletionRequest, "function_call", "tool_choice"),
        (ChatCompletionRequest, "prompt", "messages"),
        (ChatCompletionRequest, "reasoning", "reasoning_effort"),
        (ChatCompletionRequest, "truncation", "truncate_prompt_tokens"),
        (ResponsesRequest, "response_format", "text.format"),
        (ResponsesRequest, "reasoning_effort", "reasoning.effort"),
        (ResponsesRequest, "max_completion_tokens", "max_output_tokens"),
        (ResponsesRequest, "max_tokens", "max_output_tokens"),
        (ResponsesRequest, "messages", "input"),
        (ResponsesRequest, "guided_json", "structured_outputs.json"),
    ],
)
def test_a_field_of_another_api_or_version_is_told_what_to_give_instead(model, name, instead):
    assert advice(model, name) == f"give {instead!r} instead"
    assert instead.partition(".")[0] in fields_of(model.model_fields).allowed


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest, ResponsesRequest])
@pytest.mark.parametrize(
    "name", ["prediction", "web_search_options", "modalities", "guided_decoding_backend", "foo", "audio"]
)
def test_a_field_that_looks_like_no_other_is_not_taken_for_one(model, name):
    assert advice(model, name) == "leave it out"


def test_a_completion_has_no_tools_to_give_instead():
    assert advice(CompletionRequest, "functions") == "leave it out"


@pytest.mark.parametrize("name", ["modle", "top_logprob", "max_new_tokens", "tempreature"])
def test_a_slip_of_the_pen_is_told(name):
    assert advice(ChatCompletionRequest, name).startswith("did you mean ")


def openais(params):
    return {name for each in params.__args__ for name in each.__annotations__} - {"model"}


@pytest.mark.parametrize(
    ("model", "body", "names"),
    [
        (ChatCompletionRequest, {"messages": SAY}, openais(chat_params.CompletionCreateParams)),
        (CompletionRequest, {"prompt": "hi"}, openais(completion_params.CompletionCreateParams)),
    ],
)
def test_what_openais_client_sends_as_null_asks_for_nothing(model, body, names):
    unserved = names - fields_of(model.model_fields).allowed
    assert unserved & {"modalities", "prediction", "verbosity", "best_of"}
    parse(json.dumps({"model": "m", **body, **dict.fromkeys(unserved)}).encode(), model, LIMITS)


@pytest.mark.parametrize("name", ["temprature", "max_token", "max_completion_token", "stream_option"])
def test_a_misspelt_field_is_told_of_though_it_is_null(name):
    assert "did you mean" in refused(**{name: None}).valid


def test_many_fields_that_nobody_knows_are_refused_though_they_are_null():
    parse(json.dumps({"model": "m", "messages": SAY, "xyz": None}).encode(), ChatCompletionRequest, LIMITS)
    assert refused(**{f"xyz{number}": None for number in range(100)}).field.startswith("xyz")


@pytest.mark.parametrize(
    ("fields", "is_refused"),
    [
        ({"best_of": 1}, False),
        ({"best_of": 2, "n": 2}, False),
        ({"best_of": 2}, True),
        ({"best_of": 1, "n": 2}, True),
        ({"best_of": True}, True),
        ({"modalities": ["text"]}, False),
        ({"modalities": ["text", "audio"]}, True),
    ],
)
def test_what_holds_without_a_field_may_be_said(fields, is_refused):
    if is_refused:
        assert refused(CompletionRequest, **fields).field in fields
    else:
        parse(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), CompletionRequest, LIMITS)


IGNORING = LimitsConfig(unknown_fields="ignore")


def read_ignoring(model, body):
    raw = json.dumps({"model": "m", **body}).encode()
    if model is ResponsesRequest:
        return read_response(raw, IGNORING, ANONYMOUS)
    if model is AnthropicMessagesRequest:
        return read_messages(raw, IGNORING, ANONYMOUS)
    return (read(raw, model, IGNORING, ANONYMOUS),)


BODIES = pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatCompletionRequest, {"messages": SAY}),
        (CompletionRequest, {"prompt": "hi"}),
        (ResponsesRequest, {"input": "hi"}),
        (AnthropicMessagesRequest, {"messages": SAY, "max_tokens": 7}),
    ],
)


@BODIES
def test_fields_that_nobody_knows_are_left_out_where_they_are_ignored(model, body):
    """In no form do they travel on: vLLM's models keep what they do not know."""
    unknown = {"verbosity": "low", "prediction": {"content": "x" * 50_000}, "provider": {"order": ["a"]}}
    for each in read_ignoring(model, {**body, **unknown}):
        assert not unknown.keys() & (each.model_extra or {}).keys()


@BODIES
@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        pytest.param({"kv_transfer_params": {"a": 1}}, "leave it out", id="the server's own"),
        pytest.param({"chat_template": "{{ 1 }}"}, "chat_template_kwargs", id="a program"),
        pytest.param({"temprature": 1}, "did you mean 'temperature'?", id="misspelt"),
    ],
)
def test_what_is_meant_is_refused_though_unknown_fields_are_ignored(model, body, fields, advice):
    with pytest.raises(FieldError) as caught:
        read_ignoring(model, {**body, **fields})
    assert caught.value.field in fields
    assert advice in caught.value.valid


PADDED = {"enable_thinking": False, "tokenize": True, "padding": "max_length", "max_length": 4_000_000_000}


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatCompletionRequest, {"messages": SAY}),
        (ResponsesRequest, {"input": "hi"}),
        (AnthropicMessagesRequest, {"messages": SAY, "max_tokens": 7}),
    ],
)
def test_no_chat_has_a_tokenizer_pad_its_prompt(model, body):
    with pytest.raises(FieldError, match=r"chat_template_kwargs\.\w+: is set by the server itself"):
        read_ignoring(model, {**body, "chat_template_kwargs": PADDED})


@pytest.mark.parametrize(
    "converted",
    [
        lambda raw: read_chat_to_convert(json.loads(raw), LIMITS),
        lambda raw: read_to_count(raw, LIMITS),
    ],
    ids=["tokenize", "count_tokens"],
)
def test_neither_has_one_that_is_to_be_converted(converted):
    body = {"model": "m", "messages": SAY}
    thinking = {"enable_thinking": False, "documents": [], "reasoning_effort": "low"}
    raw = json.dumps({**body, "chat_template_kwargs": thinking}).encode()
    assert converted(raw).chat_template_kwargs == thinking
    with pytest.raises(FieldError, match=r"chat_template_kwargs\.\w+: is set by the server itself"):
        converted(json.dumps({**body, "chat_template_kwargs": PADDED}).encode())


@pytest.mark.parametrize(
    ("model", "body", "fields", "instead"),
    [
        (ChatCompletionRequest, {"messages": SAY}, {"guided_json": {}}, "structured_outputs.json"),
        (ChatCompletionRequest, {"messages": SAY}, {"functions": []}, "tools"),
        (CompletionRequest, {"prompt": "hi"}, {"max_completion_tokens": 9}, "max_tokens"),
        (ResponsesRequest, {"input": "hi"}, {"max_tokens": 9}, "max_output_tokens"),
        (AnthropicMessagesRequest, {"messages": SAY, "max_tokens": 7}, {"stop": "a"}, "stop_sequences"),
    ],
)
def test_what_another_field_says_is_refused_though_unknown_fields_are_ignored(model, body, fields, instead):
    with pytest.raises(FieldError) as caught:
        read_ignoring(model, {**body, **fields})
    assert caught.value.valid == f"give {instead!r} instead"


def test_no_more_fields_are_ignored_than_can_be_looked_at():
    body = {"messages": SAY, **{f"xyz{number}": 1 for number in range(33)}}
    with pytest.raises(FieldError, match="xyz32"):
        read_ignoring(ChatCompletionRequest, body)


@pytest.mark.parametrize("hides_lengths", [False, True])
def test_a_stream_of_a_response_is_never_padded(hides_lengths):
    body = {"model": "m", "input": "hi", "stream": True}
    raw = json.dumps({**body, "stream_options": {"include_obfuscation": hides_lengths}}).encode()
    if not hides_lengths:
        parse(raw, ResponsesRequest, LIMITS)
        return
    with pytest.raises(FieldError) as caught:
        parse(raw, ResponsesRequest, LIMITS)
    assert caught.value.field == "stream_options"


def test_a_completion_takes_no_tensors():
    assert refused(CompletionRequest, prompt_embeds="AAAA").field == "prompt_embeds"
    assert refused(CompletionRequest, messages=SAY).field == "messages"


def test_hints_and_nothings_pass():
    body = {"model": "m", "messages": SAY, "metadata": {"a": "b"}, "store": False, "priority": 0}
    parse(json.dumps({**body, "kv_transfer_params": None}).encode(), ChatCompletionRequest, LIMITS)
