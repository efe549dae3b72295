"""What a request has taken, by vLLM's own events, and what of them its client sees."""

import json
from types import SimpleNamespace

import pytest
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.completion.protocol import (
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo, PromptTokenUsageInfo, UsageInfo

from deployments.config.limits import LimitsConfig
from deployments.http.messages import request as messages
from deployments.http.responses import request as responses
from deployments.http.token_meter import TokenMeter
from slo.admission.tenant_limits import NO_USAGE, Usage
from slo.admission.tenants import ANONYMOUS

ADMITTED = Usage(1000, 4096)


def usage(prompt, output):
    details = CompletionTokenUsageInfo(reasoning_tokens=1)
    return UsageInfo(
        prompt_tokens=prompt,
        total_tokens=prompt + output,
        completion_tokens=output,
        completion_tokens_details=details,
    )


def chat(**fields):
    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "hi"}], **fields)


def sse(chunk, **how):
    return f"data: {chunk.model_dump_json(**how)}\n\n"


def chat_event(index, output, text="a", prompt=7):
    choice = ChatCompletionResponseStreamChoice(index=index, delta=DeltaMessage(content=text))
    chunk = ChatCompletionStreamResponse(id="c", created=1, model="m", choices=[choice])
    chunk.usage = usage(prompt, output)
    return sse(chunk, exclude_unset=True)


def text_event(index, output, prompt):
    choice = CompletionResponseStreamChoice(index=index, text="a")
    chunk = CompletionStreamResponse(id="c", created=1, model="m", choices=[choice])
    chunk.usage = usage(prompt, output)
    return sse(chunk, exclude_unset=True)


def totals(prompt, output):
    chunk = CompletionStreamResponse(id="c", created=1, model="m", choices=[], usage=usage(prompt, output))
    return sse(chunk, exclude_none=True)


def values(event):
    return json.loads(event.removeprefix("data: "))


def test_a_stream_is_counted_and_its_client_sees_nothing_of_it():
    meter = TokenMeter(chat(stream=True), ADMITTED)
    assert "usage" not in values(meter.read(chat_event(0, 1)))
    assert meter.used(is_cancelled=True) == Usage(7, 1)
    meter.read(chat_event(0, 5))
    assert meter.read(totals(7, 5)) == ""
    assert meter.read("data: [DONE]\n\n") == "data: [DONE]\n\n"
    assert meter.used(is_cancelled=True) == Usage(7, 5)


@pytest.mark.parametrize("continuous", [False, True])
def test_who_asks_for_usage_gets_what_was_asked_for(continuous):
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    meter = TokenMeter(chat(stream=True, stream_options=options), ADMITTED)
    assert ("usage" in values(meter.read(chat_event(0, 1)))) is continuous
    assert values(meter.read(totals(7, 5)))["usage"]["total_tokens"] == 12


@pytest.mark.parametrize("media", [None, {}, {"image": 64}, {"image": 64, "audio": 9}])
def test_the_totals_of_a_prompt_with_media_are_read(media):
    """They say how many tokens of it each kind of media has, an object in an object."""
    chunk = CompletionStreamResponse(id="c", created=1, model="m", choices=[], usage=usage(70, 5))
    details = PromptTokenUsageInfo(cached_tokens=0, created_cache_tokens=64, multimodal_tokens=media)
    chunk.usage.prompt_tokens_details = details
    meter = TokenMeter(chat(stream=True), None)
    assert meter.read(sse(chunk, exclude_unset=True)) == ""
    assert (meter.prompt_tokens, meter.output_tokens) == (70, 5)


def test_every_answer_has_its_prompt():
    body = CompletionRequest(model="m", prompt=["a", "bb"], n=2, stream=True)
    meter = TokenMeter(body, ADMITTED)
    for index, (output, prompt) in enumerate([(3, 10), (4, 10), (5, 20)]):
        meter.read(text_event(index, output, prompt))
    assert meter.used(is_cancelled=True) == Usage(ADMITTED.prompt_tokens, 12), (
        "one prompt's length may be unknown"
    )
    assert meter.prompt_tokens == 30
    meter.read(text_event(3, 6, 20))
    assert meter.used(is_cancelled=True) == Usage(60, 18)


def last_event(index, **given):
    choice = CompletionResponseStreamChoice(index=index, text="a", finish_reason="length")
    chunk = CompletionStreamResponse(id="c", created=1, model="m", choices=[choice], **given)
    return sse(chunk, exclude_unset=True)


def totals_of(fingerprint):
    chunk = CompletionStreamResponse(
        id="c", created=1, model="m", choices=[], usage=usage(7, 5), system_fingerprint=fingerprint
    )
    return sse(chunk, exclude_none=True)


@pytest.mark.parametrize("admitted", [None, ADMITTED])
@pytest.mark.parametrize("fingerprint", ["vllm-0.29-tp1", 'a "name" \\ of one'])
def test_who_sees_no_totals_has_the_fingerprint_where_each_answer_ends(admitted, fingerprint):
    """As decode replicas send it; nothing waits for what is still to come."""
    meter = TokenMeter(CompletionRequest(model="m", prompt="a", n=2, stream=True), admitted)
    counts = {} if admitted is None else {"usage": usage(7, 5)}
    for index in (1, 0):
        told = values(meter.read(last_event(index, **counts, system_fingerprint=fingerprint)))
        assert told == {**values(last_event(index)), "system_fingerprint": fingerprint}
    assert meter.read(totals_of(fingerprint)) == ""
    assert meter.output_tokens == 5


def test_who_sees_the_totals_has_the_fingerprint_in_them_alone():
    asked = {"include_usage": True}
    body = CompletionRequest(model="m", prompt="a", n=2, stream=True, stream_options=asked)
    meter = TokenMeter(body, None)
    for index in (1, 0):
        assert meter.read(last_event(index, system_fingerprint='a "name"')) == last_event(index)
    assert meter.read(totals_of('a "name"')) == totals_of('a "name"')


def test_text_that_looks_like_the_end_of_an_answer_is_text():
    meter = TokenMeter(chat(stream=True), ADMITTED)
    tricky = '","finish_reason":"stop"'
    assert values(meter.read(chat_event(0, 9, tricky)))["choices"][0]["delta"]["content"] == tricky


def test_text_that_looks_like_usage_is_text():
    meter = TokenMeter(chat(stream=True), ADMITTED)
    tricky = '","usage":{"prompt_tokens":0,"total_tokens":0,"completion_tokens":0}'
    assert values(meter.read(chat_event(0, 9, tricky)))["choices"][0]["delta"]["content"] == tricky
    assert meter.used(is_cancelled=True) == Usage(7, 9)


def test_a_stream_that_is_left_before_its_first_token():
    assert TokenMeter(chat(stream=True), ADMITTED).used(is_cancelled=True) == Usage(1000, 0)


def test_of_hidden_reasoning_nobody_here_knows_how_much_there_was_until_the_end():
    meter = TokenMeter(chat(stream=True, include_reasoning=False), ADMITTED)
    assert meter.used(is_cancelled=True) == Usage(1000, 0), "the first event comes with the first token"
    meter.read(chat_event(0, 0, ""))
    assert meter.used(is_cancelled=True) is None, "no event comes while it reasons"
    meter.read(chat_event(0, 300))
    assert meter.used(is_cancelled=True) is None, "nor tells the next one what comes after it"
    meter.read(totals(7, 400))
    assert meter.used(is_cancelled=True) == Usage(7, 400)


def test_reasoning_that_is_shown_is_counted():
    meter = TokenMeter(chat(stream=True, include_reasoning=True), ADMITTED)
    meter.read(chat_event(0, 0, ""))
    meter.read(chat_event(0, 3))
    assert meter.used(is_cancelled=True) == Usage(7, 3)


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("choice", [None, "auto", "required", "none"])
def test_of_a_call_that_a_parser_holds_back_nobody_here_knows_how_long_it_was_until_the_end(choice):
    """vLLM sends no event of tokens that its parser of tools has not yet made a delta of."""
    meter = TokenMeter(chat(stream=True, tools=[TOOL], tool_choice=choice), ADMITTED)
    assert meter.used(is_cancelled=True) == Usage(1000, 0), "the first event comes with the first token"
    meter.read(chat_event(0, 0, ""))
    assert meter.used(is_cancelled=True) is None, "no event comes until the call is whole"
    meter.read(chat_event(0, 300))
    assert meter.used(is_cancelled=True) is None, "another call may have begun"
    assert meter.used(is_cancelled=False) == Usage(7, 300), "no replica tells of one that failed"
    meter.read(totals(7, 400))
    assert meter.used(is_cancelled=True) == Usage(7, 400)


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (
            responses.read,
            {"input": "hi", "tools": [{"type": "function", "name": "weather", "parameters": {}}]},
        ),
        (
            messages.read,
            {
                "max_tokens": 9,
                "messages": [{"role": "user", "content": "hi"}],
                "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
            },
        ),
    ],
)
def test_so_it_is_in_the_other_apis_which_are_answered_by_chats(read, body):
    _, asked = read(json.dumps({"model": "m", "stream": True, **body}).encode(), LimitsConfig(), ANONYMOUS)
    meter = TokenMeter(asked, ADMITTED)
    meter.read(chat_event(0, 0, ""))
    assert meter.used(is_cancelled=True) is None


def test_an_answer_that_comes_whole():
    meter = TokenMeter(chat(n=3), ADMITTED)
    assert meter.used(is_cancelled=True) is None, "what a cancelled one has generated its replica says"
    meter.answered(SimpleNamespace(prompt_tokens=7, completion_tokens=20))
    assert meter.used(is_cancelled=True) == Usage(21, 20)
    assert meter.prompt_tokens == 7
    refused = TokenMeter(chat(), ADMITTED)
    refused.answered(None)
    assert refused.used(is_cancelled=True) == NO_USAGE


@pytest.mark.parametrize("asked", [None, {"include_usage": True}])
def test_where_nothing_is_limited_a_stream_is_counted_at_its_end(asked):
    body = CompletionRequest(model="m", prompt="a", n=2, stream=True, stream_options=asked)
    meter = TokenMeter(body, None)
    assert body.stream_options.include_usage
    assert not body.stream_options.continuous_usage_stats, "a count in each event is for those who pay for it"
    chunk = CompletionStreamResponse(
        id="c", created=1, model="m", choices=[CompletionResponseStreamChoice(index=0, text="a")]
    )
    assert meter.read(sse(chunk)) == sse(chunk)
    assert (meter.prompt_tokens, meter.output_tokens) == (None, None), "nobody knows yet"
    assert bool(meter.read(totals(7, 5))) is (asked is not None)
    assert (meter.prompt_tokens, meter.output_tokens) == (7, 5)
    assert meter.used(is_cancelled=True) is None


def test_who_asks_for_a_count_in_each_event_gets_it_where_nothing_is_limited():
    options = {"include_usage": True, "continuous_usage_stats": True}
    meter = TokenMeter(chat(stream=True, stream_options=options), None)
    assert "usage" in values(meter.read(chat_event(0, 3)))
    assert meter.output_tokens == 3


def test_a_model_may_say_all_counts_to_everybody():
    meter = TokenMeter(chat(stream=True), None, shows_all=True)
    assert "usage" in values(meter.read(chat_event(0, 3)))
    assert meter.read(totals(7, 3))
