"""Each prompt is rendered once, as vLLM's OpenAI layer would render it."""

import base64
import json
import struct
import zlib
from types import SimpleNamespace

import pytest
from jinja2 import TemplateError, UndefinedError
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import QueueOverflowError
from vllm.multimodal.media import MediaConnector
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from decode_node import rendering
from decode_node.answers import REQUEST_FAILED
from decode_node.rendering import LocalReason, Rendered
from decode_node.requests.openai_layer import OpenAILayer
from slo.model_digest import OTHER_MODEL
from slo.request import ENGINE_DIED, ReplicaId


class Layer:
    """vLLM's OpenAI layer: both services, and what they rendered."""

    def __init__(self):
        self.rendered = []
        self._oai_serving_chat = self._oai_serving_completion = self
        self.renderer = SimpleNamespace(tokenizer=SimpleNamespace(max_chars_per_token=10))

    async def render_chat_request(self, request):
        self.rendered.append(request)
        request.skip_special_tokens = False  # as a parser of tool calls asks for
        return [], [{"type": "token", "prompt_token_ids": [1, 2, 3]}]

    async def render_completion_request(self, request):
        self.rendered.append(request)
        return [{"type": "token", "prompt_token_ids": [1, 2]}]


CHAT = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "hello"}])
TEXT = CompletionRequest(model="m", prompt="hello")


@pytest.mark.parametrize(("request_", "is_chat", "tokens"), [(CHAT, True, [1, 2, 3]), (TEXT, False, [1, 2])])
async def test_the_layer_takes_what_was_rendered_before(request_, is_chat, tokens):
    layer, known = Layer(), {}
    rendered = await rendering.render(layer, request_, is_chat=is_chat, max_model_len=64)
    assert isinstance(rendered, Rendered)
    assert rendered.token_ids == tokens
    rendering.stand_before(layer, lambda request: known.get(id(request)))
    known[id(rendered.request)] = rendered.prompt
    ask = layer.render_chat_request if is_chat else layer.render_completion_request
    assert await ask(rendered.request) is rendered.prompt
    assert len(layer.rendered) == 1
    other = request_.model_copy()
    assert await ask(other) is not rendered.prompt
    assert layer.rendered[1:] == [other]


async def test_what_rendering_changes_is_run_and_the_clients_request_stays():
    rendered = await rendering.render(Layer(), CHAT, is_chat=True, max_model_len=64)
    assert CHAT.skip_special_tokens
    assert not rendered.request.skip_special_tokens


async def test_what_decode_computes_itself_is_rendered_once_too():
    layer = Layer()
    asked = CHAT.model_copy(update={"n": 2})
    rendered = await rendering.render(layer, asked, is_chat=True, max_model_len=64)
    assert (rendered.token_ids, rendered.local) == ([], LocalReason.SEVERAL_SEQUENCES)
    assert rendered.request is layer.rendered[0]
    rendering.stand_before(layer, lambda request: rendered.prompt if request is rendered.request else None)
    assert await layer.render_chat_request(rendered.request) is rendered.prompt
    assert len(layer.rendered) == 1


class Forcing(Layer):
    """Its parser of tool calls has the answer conform to what the tools take."""

    async def render_chat_request(self, request):
        if request.tools:
            request.structured_outputs = StructuredOutputsParams(json=request.tools[0].function.parameters)
        return await super().render_chat_request(request)


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "call", "parameters": SCHEMA}}]


@pytest.mark.parametrize(
    ("asked", "grammar"),
    [
        ({}, None),
        ({"response_format": FORMAT}, SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
        ({"tools": TOOLS, "tool_choice": "required"}, SCHEMA),
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, None),
        ({"response_format": FORMAT, "use_beam_search": True}, None),
    ],
    ids=["nothing", "format", "ours", "tools", "two", "search"],
)
async def test_what_an_answer_must_conform_to_is_known_before_an_image_is_given_away(asked, grammar):
    layer, image = Forcing(), {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    chat = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": [image]}], **asked)
    found = await rendering.grammar_of(layer, chat, max_model_len=64)
    assert (found and found.json) == grammar
    assert not any(map(rendering.has_media, layer.rendered))
    if found is not None:
        await layer.render_chat_request(chat)
        assert chat.to_sampling_params(9, {}).structured_outputs == found


async def test_of_a_chat_that_the_renderer_refuses_no_grammar_is_known():
    class Refusing(Layer):
        async def render_chat_request(self, request):
            raise ValueError(request)

        create_error_response = staticmethod(create_error_response)

    assert await rendering.grammar_of(Refusing(), CHAT, max_model_len=64) is None


@pytest.mark.parametrize(
    ("asked", "changes", "is_local"),
    [
        (CHAT, {"echo": True}, True),
        (CHAT, {"echo": True, "logprobs": None}, True),
        (CHAT, {"echo": True, "logprobs": True, "top_logprobs": 2}, True),
        (CHAT, {"echo": True, "top_logprobs": None}, False),
        (CHAT, {"prompt_logprobs": 0}, True),
        (CHAT, {"logprobs": True, "top_logprobs": 2}, False),
        (TEXT, {"echo": True}, False),
        (TEXT, {"echo": True, "logprobs": 0}, True),
        (TEXT, {"prompt_logprobs": 1}, True),
        (TEXT, {"logprobs": 2}, False),
    ],
)
async def test_log_probabilities_of_the_prompt_are_computed_where_the_prompt_is(asked, changes, is_local):
    """An engine that has pulled the prompt's KV has none, and vLLM gives memory that was never written to."""
    is_chat, asked = asked is CHAT, asked.model_copy(update=changes)
    rendered = await rendering.render(Layer(), asked, is_chat=is_chat, max_model_len=64)
    assert (rendered.local is LocalReason.PROMPT_LOGPROBS) == is_local
    params = asked.to_sampling_params(9, {})
    assert (params.prompt_logprobs is not None) == is_local


@pytest.mark.parametrize(
    "error", [OverflowError("can't convert"), TypeError("not a number"), ValueError("no")]
)
async def test_what_a_renderer_does_not_take_is_the_clients_error(error):
    class Refusing(Layer):
        async def render_completion_request(self, request):
            raise error

        create_error_response = staticmethod(create_error_response)

    answer = await rendering.render(Refusing(), TEXT, is_chat=False, max_model_len=64)
    assert answer.error.code == rendering.BAD_REQUEST


@pytest.mark.parametrize(("request_", "is_chat"), [(CHAT, True), (TEXT, False)])
@pytest.mark.parametrize("is_raised", [False, True])
async def test_a_name_that_the_ingress_knows_and_the_engine_does_not_is_another_configurations(
    request_, is_chat, is_raised
):
    """Such as that of an adapter which a configuration adds, on a replica that it has yet to replace."""

    class Unaware(BaseServing):
        def __init__(self):
            self._oai_serving_chat = self._oai_serving_completion = self
            self.models = SimpleNamespace(lora_requests={}, is_base_model=lambda _: False)

        async def render_chat_request(self, request):
            return self._maybe_get_adapters(request) if is_raised else await self._check_model(request)

        render_completion_request = render_chat_request

    layer = OpenAILayer(ReplicaId("d"), Unaware())
    answer = await layer.rendered(request_, is_chat=is_chat, max_model_len=64)
    assert (answer.error.code, answer.error.type, answer.error.param) == (503, OTHER_MODEL, "d")
    assert request_.model in answer.error.message


@pytest.mark.parametrize("error", [TemplateError("no system messages"), UndefinedError("no role")])
async def test_what_a_template_refuses_is_the_clients_error(error):
    """vLLM makes a ValueError of it in its renderer of Jinja templates, and lets it out of others."""

    class Refusing(Layer):
        async def render_chat_request(self, request):
            raise error

        create_error_response = staticmethod(create_error_response)

    answer = await rendering.render(Refusing(), CHAT, is_chat=True, max_model_len=64)
    assert (answer.error.code, answer.error.message) == (rendering.BAD_REQUEST, str(error))


async def test_media_in_a_form_that_vllm_does_not_read_are_the_clients_error():
    class Fetching(Layer):
        async def render_chat_request(self, request):
            return await MediaConnector().fetch_image_async("data:image/svg+xml,%3Csvg/%3E")

        create_error_response = staticmethod(create_error_response)

    answer = await rendering.render(Fetching(), CHAT, is_chat=True, max_model_len=64)
    assert answer.error.code == rendering.BAD_REQUEST
    assert "base64" in answer.error.message


async def test_what_is_nested_too_deep_is_the_clients_error():
    class Parsing(Layer):
        async def render_chat_request(self, request):
            json.loads("[" * 100_000)

        create_error_response = staticmethod(create_error_response)

    answer = await rendering.render(Parsing(), CHAT, is_chat=True, max_model_len=64)
    assert answer.error.code == rendering.BAD_REQUEST
    assert "recursion" in answer.error.message


@pytest.mark.parametrize(("side", "told"), [(101, "10201 pixels"), (20_000, "400000000 pixels")])
async def test_a_picture_that_is_too_large_is_the_clients_error(monkeypatch, side, told):
    """One of more than 179 million pixels is refused by Pillow before vLLM looks at its size."""
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "10000")

    class Loading(Layer):
        async def render_chat_request(self, request):
            url = f"data:image/png;base64,{blank_picture(side)}"
            return await MediaConnector().fetch_image_async(url)

        create_error_response = staticmethod(create_error_response)

    answer = await rendering.render(Loading(), CHAT, is_chat=True, max_model_len=64)
    assert answer.error.code == rendering.BAD_REQUEST
    assert told in answer.error.message


def blank_picture(side):
    """A PNG of one bit a pixel, of which there is the header alone."""
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n\0\0\0\r" + header + struct.pack(">I", zlib.crc32(header))
    return base64.b64encode(data + b"\0\0\0\0IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))).decode()


@pytest.mark.parametrize(("request_", "is_chat"), [(CHAT, True), (TEXT, False)])
@pytest.mark.parametrize(
    ("error", "dead", "code", "kind"),
    [
        (EngineDeadError(), True, 500, ENGINE_DIED),
        (EngineGenerateError("broke"), False, 500, REQUEST_FAILED),
        (QueueOverflowError(), False, 503, "Service Unavailable"),
    ],
)
async def test_what_the_engine_fails_with_before_it_renders_is_answered(
    request_, is_chat, error, dead, code, kind
):
    class Failing(Layer):
        _engine_client = SimpleNamespace(errored=dead)
        create_error_response = staticmethod(create_error_response)

        async def render_chat_request(self, request):
            raise error

        render_completion_request = render_chat_request

    layer = OpenAILayer(ReplicaId("a"), Failing())
    answer = await layer.rendered(request_, is_chat=is_chat, max_model_len=64)
    assert (answer.error.code, answer.error.type) == (code, kind)


async def test_a_prompt_without_room_for_an_answer_is_refused():
    error = await rendering.render(Layer(), CHAT, is_chat=True, max_model_len=3)
    assert error.error.code == rendering.BAD_REQUEST
    assert "at most 2" in error.error.message


def test_a_text_longer_than_any_prompt_is_not_read():
    assert rendering.too_much_text(640, 10, 64) is None
    refused = rendering.too_much_text(641, 10, 64).error
    assert (refused.code, refused.param) == (rendering.BAD_REQUEST, "prompt")
    assert "641 characters" in refused.message


LONG = "a" * 641
"""Longer than 64 tokens of 10 characters."""


@pytest.mark.parametrize(
    ("asked", "changes"),
    [
        (TEXT, {"prompt": LONG}),
        (TEXT, {"prompt": ["a", LONG]}),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 320}] * 2}] * 2}),
        (CHAT, {"documents": [{"text": LONG}]}),
    ],
)
@pytest.mark.parametrize("most", [1, -1])
async def test_of_a_text_longer_than_any_prompt_no_part_is_made_a_prompt(asked, changes, most):
    """All of it would be tokenised for the part, one after the other, and only the part be paid for."""
    layer, is_chat = Layer(), asked is CHAT
    asked = asked.model_copy(update={**changes, "truncate_prompt_tokens": most})
    refused = (await rendering.render(layer, asked, is_chat=is_chat, max_model_len=64)).error
    assert (refused.code, refused.param) == (rendering.BAD_REQUEST, "messages" if is_chat else "prompt")
    assert layer.rendered == []


@pytest.mark.parametrize(
    ("asked", "changes"),
    [
        (TEXT, {"prompt": "a" * 640}),
        (TEXT, {"prompt": ["a" * 640] * 2}),
        (TEXT, {"prompt": [1] * 1000}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": LONG}]}]}),
    ],
)
async def test_what_may_be_a_prompt_is_cut(asked, changes):
    is_chat, asked = asked is CHAT, asked.model_copy(update={**changes, "truncate_prompt_tokens": 1})
    assert isinstance(await rendering.render(Layer(), asked, is_chat=is_chat, max_model_len=64), Rendered)


@pytest.mark.parametrize("changes", [{}, {"truncate_prompt_tokens": 1}])
@pytest.mark.parametrize(
    ("prompt", "is_refused"),
    [
        ([1] * 65, True),
        ([[1], [1] * 65], True),
        ([1] * 64, False),
        ([[1] * 64] * 3, False),
        ("a" * 65, False),
    ],
    ids=["one", "several", "as long", "several as long", "text"],
)
@pytest.mark.parametrize("echo", [True, False])
async def test_of_more_token_ids_than_a_prompt_has_no_text_is_made_for_an_echo(
    changes, prompt, is_refused, echo
):
    """vLLM decodes them before it looks at how many there are."""
    layer = Layer()
    asked = TEXT.model_copy(update={"prompt": prompt, "echo": echo, **changes})
    answer = await rendering.render(layer, asked, is_chat=False, max_model_len=64)
    if not (echo and is_refused):
        assert isinstance(answer, Rendered)
        return
    as_ids = asked.model_copy(update={"return_token_ids": True})
    assert isinstance(await rendering.render(Layer(), as_ids, is_chat=False, max_model_len=64), Rendered)
    assert (answer.error.code, answer.error.param) == (rendering.BAD_REQUEST, "prompt")
    assert "contains 65 input tokens" in answer.error.message
    assert layer.rendered == []


@pytest.mark.parametrize(
    ("inputs", "tokens"),
    [
        ([{"type": "token", "prompt_token_ids": [1, 2]}], 2),
        ([{"type": "token", "prompt_token_ids": [1, 2]}, {"type": "token", "prompt_token_ids": [3]}], 3),
        ([{"type": "multimodal", "prompt_token_ids": [1, 2, 3]}], 3),
        ([{"type": "embeds", "prompt_embeds": [[0.5], [0.25]]}], 2),
    ],
)
@pytest.mark.parametrize("n", [1, 3])
async def test_all_prompts_count_wherever_they_are_computed(inputs, tokens, n):
    class Given(Layer):
        async def render_completion_request(self, request):
            return inputs

    asked = TEXT.model_copy(update={"n": n})
    rendered = await rendering.render(Given(), asked, is_chat=False, max_model_len=64)
    assert rendered.input_tokens == tokens, "as its usage says"


async def test_a_request_of_no_run_is_rendered():
    layer = Layer()
    rendering.stand_before(layer, lambda _: None)
    assert await layer.render_completion_request(TEXT)
    assert len(layer.rendered) == 1
