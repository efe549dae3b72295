"""Each prompt is rendered once, as vLLM's OpenAI layer would render it."""

import pytest
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest

from decode_node import rendering
from decode_node.rendering import LocalReason, Rendered


class Layer:
    """vLLM's OpenAI layer: both services, and what they rendered."""

    def __init__(self):
        self.rendered = []
        self._oai_serving_chat = self._oai_serving_completion = self

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


async def test_a_prompt_without_room_for_an_answer_is_refused():
    error = await rendering.render(Layer(), CHAT, is_chat=True, max_model_len=3)
    assert error.error.code == rendering.BAD_REQUEST
    assert "at most 2" in error.error.message


async def test_a_request_of_no_run_is_rendered():
    layer = Layer()
    rendering.stand_before(layer, lambda _: None)
    assert await layer.render_completion_request(TEXT)
    assert len(layer.rendered) == 1
