"""What the `openai` client gets, from a model and two adapters of it, is what one vLLM engine gives it."""

import json
import re
from itertools import groupby
from typing import Any

import anthropic
import httpx
import openai
import pytest
from ports import free_port
from waiting import assert_soon

from benchmarks.harness.local_server import end, environment, start_until
from deployments.local.launcher import get_json

pytestmark = pytest.mark.e2e

MODELS = ("tiny", "a", "b")
UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"]}
SCHEMA = {"type": "object", "properties": {"unit": UNIT}, "required": ["unit"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
ASKED = [{"role": "user", "content": "How warm is it in Graz? " * 20}]
CALL = '[weather(unit="celsius")]'
CHATS = {
    "greedy": {"temperature": 0, "max_tokens": 12},
    "seeded": {"seed": 7, "max_tokens": 12},
    "log-probabilities": {"temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 3},
    "an echo": {"temperature": 0, "max_tokens": 5, "extra_body": {"echo": True}},
    "an echo, log-probabilities null": {
        "temperature": 0,
        "max_tokens": 5,
        "extra_body": {"echo": True, "logprobs": None},
    },
    "several answers": {"seed": 7, "n": 2, "max_tokens": 8},
    "stop string": {"seed": 3, "max_tokens": 40, "stop": ["a", "e"]},
    "a tool that must be called": {"tools": [TOOL], "tool_choice": "required", "temperature": 0},
    "a tool that is named": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "temperature": 0,
    },
    "a tool that is called": {
        "tools": [TOOL],
        "temperature": 0,
        "extra_body": {"structured_outputs": {"choice": [CALL]}},
    },
    "a schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
        "temperature": 0,
    },
    "a choice": {"temperature": 0, "extra_body": {"structured_outputs": {"choice": ["warm", "cold"]}}},
}
COMPLETIONS = {
    "greedy": {"temperature": 0, "max_tokens": 12},
    "penalties": {"temperature": 0, "max_tokens": 12, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    "echo": {"temperature": 0, "max_tokens": 5, "echo": True, "logprobs": 2},
    "several prompts": {"temperature": 0, "max_tokens": 5, "prompt": ["one " * 30, "two"]},
}

FUNCTION = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
RESPONSES = {
    "greedy": {"temperature": 0, "max_output_tokens": 12, "instructions": "Be brief."},
    "a conversation": {
        "temperature": 0,
        "max_output_tokens": 8,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "How warm is it? " * 20}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "20"},
            {"role": "assistant", "content": "20 degrees"},
            {"role": "user", "content": "And tomorrow?"},
        ],
    },
    "a function that must be called": {
        "tools": [FUNCTION],
        "tool_choice": "required",
        "temperature": 0,
    },
    "a function that is called": {
        "tools": [FUNCTION],
        "temperature": 0,
        "extra_body": {"structured_outputs": {"choice": [CALL]}},
    },
    "a schema": {
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}},
        "temperature": 0,
    },
}

ANTHROPICS_TOOL = {"name": "weather", "input_schema": SCHEMA}
MESSAGES = {
    "greedy": {"max_tokens": 12, "system": "Be brief."},
    "a stop sequence": {"max_tokens": 40, "stop_sequences": ["a", "e"]},
    "a conversation": {
        "max_tokens": 8,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "How warm is it? " * 20}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "weather", "input": {}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "20"}]},
        ],
    },
    "a tool that must be called": {
        "max_tokens": 60,
        "tools": [ANTHROPICS_TOOL],
        "tool_choice": {"type": "any"},
    },
    "a schema": {
        "max_tokens": 60,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}


def ways(names):
    """Each name of the model itself in both ways, and of an adapter in one; the rest are long."""
    for at, name in enumerate(names):
        for model in MODELS:
            for is_stream in (False, True):
                often = model == "tiny" or (model, is_stream) == ("ab"[at % 2], at // 2 % 2 == 1)
                way = f"{model}-{name}-{'stream' if is_stream else 'whole'}"
                yield pytest.param(model, name, is_stream, id=way, marks=() if often else pytest.mark.long)


@pytest.fixture(scope="module")
def stock(tmp_path_factory, places, answers):
    """vLLM's own server, with all of it in one engine."""
    port, log = free_port(), tmp_path_factory.mktemp("stock") / "log"
    command = ["vllm.entrypoints.openai.api_server", "--port", str(port), "--model", str(places["tiny"])]
    command += ["--served-model-name", "tiny", "--max-model-len", "4096", "--dtype", "float32"]
    command += ["--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser", "pythonic"]
    command += ["--structured-outputs-config", json.dumps(answers["structured_outputs_config"])]
    command += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "16"]
    command += ["--lora-modules", *(f"{name}={places[name]}" for name in "ab")]
    env = {**environment(), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # One thread, and the worker in the process of the engine: others spin on the cores of the application.
    env |= {"VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    url = f"http://127.0.0.1:{port}"
    process = start_until(lambda: get_json(f"{url}/v1/models") is not None, command, log, env)
    yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    end(process)


def told(answer):
    """What an answer says, without what is drawn anew for each."""
    if isinstance(answer, list):
        return _put_together(answer)
    said = answer.model_dump(exclude_none=True)
    kept = {name: said[name] for name in ("object", "model", "choices", "usage")}
    return {**_without_ids(kept), "fingerprint": "system_fingerprint" in said}


def _without_ids(value):
    """Log-probabilities differ in the last bits with the batch that a token is computed in."""
    if isinstance(value, dict):
        return {name: _without_ids(item) for name, item in value.items() if name != "id"}
    if isinstance(value, list):
        return [_without_ids(item) for item in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


def _put_together(events):
    """A stream's text, tool calls and ends, by answer, however they were cut; whether it names its engine."""
    answers = {"fingerprint": any(event.system_fingerprint for event in events)}
    for event in events:
        for choice in event.choices:
            answer = answers.setdefault(choice.index, {"text": "", "tools": {}, "end": None})
            if hasattr(choice, "delta"):
                answer["text"] += choice.delta.content or ""
                for part in choice.delta.tool_calls or ():
                    call = answer["tools"].setdefault(part.index, ["", ""])
                    call[0] += part.function.name or ""
                    call[1] += part.function.arguments or ""
            else:
                answer["text"] += choice.text
            answer["end"] = choice.finish_reason or answer["end"]
    return answers


def compared(served, stock, create, *, is_stream, **asked):
    """What both say to the same request."""
    both = []
    for client in (served.client(), stock):
        answer = create(client)(**asked, stream=is_stream)
        both.append(told(list(answer) if is_stream else answer))
    return both


@pytest.mark.parametrize(("model", "name", "is_stream"), ways(CHATS))
def test_a_chat_is_answered_as_by_one_engine(served, stock, model, name, is_stream):
    asked = {"model": model, "messages": ASKED, **CHATS[name]}
    answer, expected = compared(
        served, stock, lambda one: one.chat.completions.create, is_stream=is_stream, **asked
    )
    assert answer == expected
    if "tool" in name:
        assert "weather" in str(expected)


@pytest.mark.parametrize(("model", "name", "is_stream"), ways(COMPLETIONS))
def test_a_completion_is_answered_as_by_one_engine(served, stock, model, name, is_stream):
    asked = {"model": model, "prompt": "How warm is it? " * 20, **COMPLETIONS[name]}
    answer, expected = compared(
        served, stock, lambda one: one.completions.create, is_stream=is_stream, **asked
    )
    assert answer == expected


@pytest.mark.parametrize("prompt", ["How warm is it? " * 20, ["one " * 30, "two"]], ids=["one", "two"])
def test_a_beam_search_finds_what_it_does_on_one_engine(served, stock, prompt):
    search = {"temperature": 0, "max_tokens": 5, "n": 2, "extra_body": {"use_beam_search": True}}
    answer, expected = compared(
        served,
        stock,
        lambda one: one.completions.create,
        is_stream=False,
        model="tiny",
        prompt=prompt,
        **search,
    )
    assert answer == expected
    assert len({choice["text"] for choice in answer["choices"][:2]}) == 2


def said(response):
    """What a response says, without what is drawn anew for each."""
    output = [
        _without_ids({name: value for name, value in item.items() if name != "call_id"})
        for item in response.model_dump(mode="json", exclude_none=True)["output"]
    ]
    usage = response.usage
    counts = (usage.input_tokens, usage.output_tokens, usage.total_tokens)
    details = (response.incomplete_details or {}) and response.incomplete_details.reason
    return response.model, response.status, details, output, counts, response.max_output_tokens


def said_by(events):
    """The same of a stream, and what its events told on the way, however they were cut."""
    kinds, text = [], {}
    for event in events:
        if not kinds or kinds[-1] != event.type:
            kinds.append(event.type)
        if event.type.endswith(".delta"):
            text[event.output_index] = text.get(event.output_index, "") + event.delta
    return kinds, text, said(events[-1].response)


@pytest.mark.parametrize(("model", "name", "is_stream"), ways(RESPONSES))
def test_a_response_is_the_one_of_one_engine(served, stock, model, name, is_stream):
    asked = {"model": model, "input": "How warm is it? " * 20, "store": False, **RESPONSES[name]}
    answer, expected = (
        said_by(list(client.responses.create(**asked, stream=True)))
        if is_stream
        else said(client.responses.create(**asked))
        for client in (served.client(), stock)
    )
    assert answer == expected
    if "function" in name:
        assert "weather" in str(expected)


def test_a_response_has_an_objective_and_is_not_kept(served):
    asked = {"model": "tiny", "input": "Once", "max_output_tokens": 4}
    headers = {"x-slo-tier": "premium", "x-slo-ttft-ms": "9000"}
    answer = served.client().responses.with_raw_response.create(**asked, extra_headers=headers)
    assert (answer.headers["x-slo-tier"], answer.headers["x-slo-ttft-budget-ms"]) == ("premium", "9000.0")
    response = answer.parse()
    assert response.status == "incomplete"
    with pytest.raises(openai.NotFoundError):
        served.client().responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError, match="keeps nothing") as refused:
        served.client().responses.create(**asked, previous_response_id=response.id)
    assert refused.value.param == "previous_response_id"


def anthropics(client):
    """Anthropic's client of the same server; it sends the key in a header of its own."""
    url = str(client.base_url).removesuffix("v1/")
    return anthropic.Anthropic(base_url=url, api_key=client.api_key, max_retries=0, timeout=60)


def message_of(answer):
    """What a message says, without what is drawn anew for each, and the order of a stream's events."""
    if isinstance(answer, list):
        told: dict[str, Any] = {"kinds": [kind for kind, _ in groupby(event.type for event in answer)]}
        blocks = [event.content_block.type for event in answer if event.type == "content_block_start"]
        parts = [event.delta for event in answer if event.type == "content_block_delta"]
        text = "".join(getattr(part, "text", None) or getattr(part, "partial_json", "") for part in parts)
        ends = [
            (event.delta.stop_reason, event.delta.stop_sequence)
            for event in answer
            if event.type == "message_delta"
        ]
        counts = [event.usage.output_tokens for event in answer if event.type == "message_delta"]
        return told | {"blocks": blocks, "text": text, "ends": ends, "counts": counts}
    said = answer.model_dump(exclude_none=True)
    return _without_ids({name: said[name] for name in said if name != "id"})


def as_told_here(message, max_tokens):
    """One of vLLM's server, which does not say of a call that `max_tokens` has cut it; here that is said."""
    if message.get("stop_reason") == "tool_use" and message["usage"]["output_tokens"] >= max_tokens:
        return message | {"stop_reason": "max_tokens"}
    if message.get("ends") == [("tool_use", None)] and message["counts"][-1] >= max_tokens:
        return message | {"ends": [("max_tokens", None)]}
    return message


@pytest.mark.parametrize(("model", "name", "is_stream"), ways(MESSAGES))
def test_a_message_is_the_one_of_one_engine(served, stock, model, name, is_stream):
    asked = {"model": model, "messages": ASKED, **MESSAGES[name]}
    asked["extra_body"] = {"temperature": 0}
    answer, expected = (
        message_of(list(made) if is_stream else made)
        for made in (
            anthropics(client).messages.create(**asked, stream=is_stream)
            for client in (served.client(), stock)
        )
    )
    assert answer == as_told_here(expected, asked["max_tokens"])
    if "tool" in name:
        assert "tool_use" in str(expected)


def test_tokens_of_messages_are_counted_as_by_one_engine(served, stock):
    asked = {"model": "tiny", "messages": ASKED, "system": "Be brief.", "tools": [ANTHROPICS_TOOL]}
    counted, expected = (
        anthropics(client).messages.count_tokens(**asked).input_tokens for client in (served.client(), stock)
    )
    assert counted == expected
    chat = {"model": "tiny", "messages": ASKED}
    both = [
        httpx.post(
            str(client.base_url).replace("v1/", "tokenize"),
            json=chat,
            headers={"authorization": f"Bearer {client.api_key}"},
        ).json()
        for client in (served.client(), stock)
    ]
    assert both[0]["tokens"] == both[1]["tokens"] != []


def test_a_message_has_an_objective_a_key_and_errors_of_its_api(served):
    client = anthropics(served.client())
    asked = {"model": "tiny", "messages": ASKED, "max_tokens": 4}
    headers = {"x-slo-tier": "premium", "x-slo-ttft-ms": "9000"}
    sent = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "context_management": {"edits": []}}
    answer = client.messages.with_raw_response.create(**asked, extra_headers=headers, extra_body=sent)
    assert (answer.headers["x-slo-tier"], answer.headers["x-slo-ttft-budget-ms"]) == ("premium", "9000.0")
    with pytest.raises(anthropic.AuthenticationError) as refused:
        client.with_options(api_key="wrong").messages.create(**asked)
    assert refused.value.body["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.messages.create(**{**asked, "model": "other"})
    assert refused.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**asked, "max_tokens": 100_000})


def test_each_adapter_says_something_of_its_own(served):
    texts = {
        served.client()
        .completions.create(model=model, prompt="Once", max_tokens=20, temperature=0)
        .choices[0]
        .text
        for model in MODELS
    }
    assert len(texts) == len(MODELS)


def test_adapters_are_models_of_their_own_name(served):
    cards = {card.id: card for card in served.client().models.list()}
    assert set(cards) == {*MODELS, "small", "small-lora"}
    assert (cards["a"].parent, cards["a"].root, cards["tiny"].parent) == ("tiny", "tiny", None)
    assert cards["a"].metadata["parent"] == "tiny"
    assert served.client().models.retrieve("b").id == "b"
    with pytest.raises(openai.NotFoundError):
        served.client().chat.completions.create(model="c", messages=ASKED)


def test_who_names_no_model_gets_the_one_without_an_adapter(served):
    asked = {"prompt": "Once", "max_tokens": 8, "temperature": 0}
    key = {"authorization": f"Bearer {served.keys['acme']}"}
    answer = httpx.post(f"{served.url}/v1/completions", json=asked, headers=key, timeout=60).json()
    named = served.client().completions.create(model="tiny", **asked)
    assert (answer["model"], answer["choices"][0]["text"]) == ("tiny", named.choices[0].text)


def test_prefill_computes_with_the_adapter_and_its_first_token_is_kept(served):
    log = served.log.read_text()
    asked = {"model": "b", "prompt": "Twice " * 60, "max_tokens": 5, "temperature": 0}
    resampled = served.metric("slackserve_first_tokens_resampled_total")
    served.client().completions.create(**asked)
    assert_soon(lambda: served.log.read_text()[len(log) :].count("prefill_ended "), 10)
    assert served.metric("slackserve_first_tokens_resampled_total") == resampled


def test_objectives_are_counted_by_the_name_that_was_asked_for(served, monitor_port):
    def judged():
        return re.findall(
            r'slackserve_slo_judged_total\{met="yes",model="a",objective="ttft".*\} (\d+)', scraped()
        )

    def scraped():
        return httpx.get(f"http://127.0.0.1:{monitor_port}/metrics").text

    asked = {"model": "a", "prompt": "Thrice", "max_tokens": 3, "stream": True}
    assert list(served.client().completions.create(**asked))
    assert_soon(judged, 30, "the monitor has judged no request of the adapter")
