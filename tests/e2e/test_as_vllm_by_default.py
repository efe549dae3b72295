"""A model that reads images, with nothing configured about it: images, and grammars in any order."""

import base64
import io

import httpx
import openai
import pytest
from PIL import Image
from serving import serving_tiny
from waiting import assert_soon

from benchmarks.harness.tiny_models import build_tiny

pytestmark = pytest.mark.e2e

SCHEMA = {"type": "object", "patternProperties": {"^a": {"type": "string"}}}
"""Valid, and not known to what is taken for all grammars."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    directory = tmp_path_factory.mktemp("images")
    model = build_tiny(directory / "model", "idefics3", layers=2, context=2048)
    with serving_tiny(directory, "key-of-acme", model=str(model)) as running:
        yield running


def picture(colour):
    written = io.BytesIO()
    Image.new("RGB", (40, 30), colour).save(written, "PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


def look(served, colour, **more):
    parts = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": picture(colour)}},
    ]
    return served.client("acme").chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": parts}],
        max_tokens=6,
        logprobs=True,
        extra_body={"ignore_eos": True},
        **{"temperature": 0, **more},
    )


def numbers(choice):
    return [token.logprob for token in choice.logprobs.content]


def test_an_image_is_looked_at_and_again_from_the_cache(served):
    red, blue, again = look(served, "red"), look(served, "blue"), look(served, "red")
    assert red.usage.prompt_tokens > len("user: What is it?assistant: ")
    assert numbers(red.choices[0]) == pytest.approx(numbers(again.choices[0]), abs=1e-4)
    assert numbers(red.choices[0]) != pytest.approx(numbers(blue.choices[0]), abs=1e-6)
    assert_soon(lambda: served.metric("slackserve_local_prefills_total", reason="not_text") >= 3, 10)


def test_several_answers_to_an_image_and_a_stream(served):
    both = look(served, "red", n=2, temperature=1, seed=7).choices
    assert [len(numbers(choice)) for choice in both] == [6, 6]
    red = look(served, "red").choices[0]
    streamed = [chunk.choices[0].delta.content or "" for chunk in look(served, "red", stream=True)]
    assert "".join(streamed) == red.message.content


def test_what_one_asks_for_decides_for_nobody_else(served):
    client = served.client("acme")
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 20}
    odd = {"type": "json_schema", "json_schema": {"name": "odd", "schema": SCHEMA}}
    with pytest.raises(openai.BadRequestError, match="not supported by xgrammar"):
        client.chat.completions.create(**ask, response_format=odd)
    answer = client.chat.completions.create(**ask, extra_body={"structured_outputs": {"choice": ["warm"]}})
    assert answer.choices[0].message.content == "warm"
    assert client.chat.completions.create(**ask, response_format={"type": "json_object"}).choices
    health = httpx.get(f"{served.url}/ready", headers={"authorization": "Bearer key-of-acme"})
    assert health.status_code == 200
