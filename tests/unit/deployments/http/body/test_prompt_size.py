"""How large a prompt is, before anybody has made tokens of it."""

import pytest
from bodies import MESSAGES, TOOL, chat, completion

from deployments.http.body.prompt_size import prompt_size, refuse_too_long
from deployments.http.errors import HTTPError
from slo.errors import FieldError


def test_everything_that_a_template_renders_counts():
    alone = prompt_size(chat()).text_bytes
    assert alone >= len("user12345")
    assert prompt_size(chat(tools=[TOOL])).text_bytes >= alone + 60
    assert prompt_size(chat(documents=[{"text": "d" * 1000}])).text_bytes >= alone + 1000
    assert prompt_size(chat(chat_template_kwargs={"k": "v" * 500})).text_bytes >= alone + 500


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}},
        {"type": "input_audio", "input_audio": {"data": "A" * 100_000, "format": "wav"}},
        {"image_url": "data:image/png;base64," + "A" * 100_000},
    ],
)
def test_an_image_is_no_text_of_its_size(part):
    messages = [{"role": "user", "content": [{"type": "text", "text": "12345"}, part]}]
    assert prompt_size(chat(messages=messages)).text_bytes < 200


@pytest.mark.parametrize(
    ("body", "tokens", "text_bytes"),
    [
        (completion(prompt="a" * 4000, truncate_prompt_tokens=100), None, 400),
        (completion(prompt="a" * 40, truncate_prompt_tokens=100), None, 40),
        (completion(prompt="a" * 40, truncate_prompt_tokens=-1), None, 40),
        (completion(prompt=[1] * 4000, truncate_prompt_tokens=100), 100, 0),
        (completion(prompt=[[1] * 4000] * 2, truncate_prompt_tokens=100), 200, 0),
        (chat(messages=[{"role": "user", "content": "a" * 4000}], truncate_prompt_tokens=100), None, 400),
    ],
)
def test_of_a_prompt_that_is_cut_the_rest_counts(body, tokens, text_bytes):
    size = prompt_size(body)
    assert (size.tokens, size.text_bytes) == (tokens, text_bytes)


@pytest.mark.parametrize(
    "body",
    [
        completion(prompt="a" * 4000),
        completion(prompt=["a" * 4000]),
        completion(prompt=[1] * 100),
        completion(prompt=[1] * 4000, truncate_prompt_tokens=-1),
        chat(),
    ],
)
def test_what_may_fit_is_not_too_long(body):
    refuse_too_long(body, 100)


@pytest.mark.parametrize("prompt", [[1] * 101, [[1], [1] * 101]])
def test_what_can_never_fit_is_refused_in_vllms_words(prompt):
    """Clients look for them, to fall back to another model; a 429 would have them try again."""
    with pytest.raises(HTTPError, match="This model's maximum context length is 100 tokens") as refused:
        refuse_too_long(completion(prompt=prompt), 100)
    assert (refused.value.status, refused.value.param) == (400, "prompt")


def test_what_is_not_said_in_a_message_is_text_whatever_its_name():
    hidden = {"type": "object", "properties": {"image_url": {"description": "x" * 5000}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": hidden}}
    assert prompt_size(chat(tools=[tool])).text_bytes > 5000
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": "%s"}' % ("y" * 900)},
    }
    said = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    assert prompt_size(chat(messages=said)).text_bytes > 900
    with pytest.raises(FieldError, match="bytes of grammar"):
        chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": hidden}})
