"""What a body may have beside its prompt."""

import json

import pytest
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest

from deployments.config.limits import LimitsConfig
from deployments.http.body.reading import parse, read
from deployments.http.responses import request as responses
from slo.admission.tenants import ANONYMOUS
from slo.errors import FieldError

LIMITS = LimitsConfig()
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}
RESPONSE = {"model": "m", "input": "hi"}
LARGEST = "x" * (LIMITS.max_body_bytes - 1000)
AS_LARGE_AS_OPENAIS = {f"{n:x<64}": "v" * 512 for n in range(16)}


def taken(body):
    raw = json.dumps(body).encode()
    if "input" in body:
        return responses.read(raw, LIMITS, ANONYMOUS)
    return read(raw, ChatCompletionRequest if "messages" in body else CompletionRequest, LIMITS, ANONYMOUS)


@pytest.mark.parametrize("body", [CHAT, COMPLETION, RESPONSE], ids=["chat", "completion", "response"])
@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"metadata": {"a": LARGEST}}, "metadata.a", "has 2096152 characters; give at most 512"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a", "has 513 characters"),
        ({"metadata": {"k" * 65: "v"}}, "metadata", "has a key of 65 characters; give keys of at most 64"),
        ({"metadata": {f"k{n}": "v" for n in range(17)}}, "metadata", "has 17 pairs; give at most 16"),
        ({"metadata": {"a": [LARGEST]}}, "metadata.a", "is not text"),
        ({"metadata": LARGEST}, "metadata", "is not an object"),
        ({"user": "x" * 513}, "user", "has 513 characters; give at most 512"),
        ({"safety_identifier": LARGEST}, "safety_identifier", "give at most 512"),
        ({"prompt_cache_key": LARGEST}, "prompt_cache_key", "give at most 512"),
        ({"prompt_cache_retention": LARGEST}, "prompt_cache_retention", "give at most 512"),
        ({"session_id": LARGEST}, "session_id", "give at most 512"),
        ({"service_tier": LARGEST}, "service_tier", "give at most 512"),
        ({"cache_salt": LARGEST}, "cache_salt", "give at most 512"),
        ({"store": LARGEST}, "store", "takes the fields beside the prompt beyond 16384 characters"),
        ({"safety_identifier": {"a": [LARGEST]}}, "safety_identifier", "beyond 16384"),
        ({"store": [1] * 200_000}, "store", "beyond 16384"),
        ({"store": {f"k{n}": 1 for n in range(40_000)}}, "store", "beyond 16384"),
        ({"vllm_xargs": {"a": LARGEST}}, "vllm_xargs", "beyond 16384"),
        ({"client_metadata": {"a": LARGEST}}, "client_metadata", "beyond 16384"),
    ],
)
def test_what_is_too_large_beside_the_prompt_is_refused_by_name(body, fields, field, message):
    with pytest.raises(FieldError) as caught:
        taken({**body, **fields})
    assert caught.value.field == field
    assert message in str(caught.value)


def test_all_of_it_together_is_bounded_too():
    fields = {f"a{n}": "x" * 500 for n in range(40)}
    with pytest.raises(FieldError, match="beyond 16384"):
        taken({**CHAT, "stream": True, "stream_options": fields})


@pytest.mark.parametrize("body", [CHAT, COMPLETION, RESPONSE], ids=["chat", "completion", "response"])
def test_what_openai_takes_is_taken(body):
    hints = {
        "metadata": AS_LARGE_AS_OPENAIS,
        "user": "u" * 64,
        "safety_identifier": "s" * 64,
        "client_metadata": {"x-codex-turn-metadata": "{}"},
        "prompt_cache_key": "k" * 64,
        "store": True,
        "service_tier": "auto",
    }
    taken({**body, **hints})
    taken({**body, **dict.fromkeys(hints)})


def test_metadata_that_vllm_takes_is_taken():
    taken({**CHAT, "metadata": {"run": 3, "retry": False, "parent": None}})


def test_prompts_tools_and_lists_are_counted_elsewhere():
    """A `logit_bias` of more entries ends an engine, and so is refused whatever is counted here."""
    text = "x" * 500_000
    tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": {}}}
    taken({**CHAT, "messages": [{"role": "user", "content": text}], "tools": [tool]})
    taken({**COMPLETION, "prompt": [1] * 200_000, "logit_bias": {str(n): 1 for n in range(1_024)}})
    taken({**RESPONSE, "input": text, "instructions": text})


def test_a_text_to_be_converted_is_no_hint():
    from ray.llm._internal.serve.core.configs.openai_api_models import (
        DetokenizeRequest,
        TokenizeCompletionRequest,
    )

    parse(json.dumps({"model": "m", "prompt": LARGEST}).encode(), TokenizeCompletionRequest, LIMITS)
    parse(json.dumps({"model": "m", "tokens": [1] * 200_000}).encode(), DetokenizeRequest, LIMITS)
