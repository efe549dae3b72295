"""Conversions have a thread and a tokenizer of their own."""

import asyncio
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.tokenize.protocol import TokenizeCompletionRequest, TokenizeResponse
from vllm.renderers.base import BaseRenderer
from vllm.utils.async_utils import make_async

from decode_node.tokenizing.conversions import conversions_apart


class Counting:
    """A tokenizer that takes its time for some texts."""

    def __init__(self):
        self.go_on = threading.Event()
        self.converted = []

    def __deepcopy__(self, _):
        return Counting()

    def __call__(self, text):
        assert text != "long" or self.go_on.wait(10)
        return len(text)

    def convert_ids_to_tokens(self, token_ids):
        self.converted.append((threading.current_thread().name, len(token_ids)))
        return [f"<{one}>" for one in token_ids]


class Renderer:
    """As vLLM's: one thread of it has its tokenizer."""

    def __init__(self):
        self.tokenizer = Counting()
        executor = ThreadPoolExecutor(1)
        self._tokenize_prompt_async = make_async(self._tokenize_prompt, executor=executor)
        self._async_tokenizer_decode = make_async(self._decode, executor=executor)

    def _tokenize_prompt(self, text):
        return self.tokenizer(text)

    _decode = _tokenize_prompt

    def get_tokenizer(self):
        return self.tokenizer


class Service:
    """As vLLM's: it makes strings on the event loop if it is asked for them."""

    def __init__(self, answer=None):
        self.renderer = Renderer()
        self.online_renderer = SimpleNamespace(renderer=self.renderer)
        self.answer = answer

    async def create_tokenize(self, request, raw_request):
        assert not request.return_token_strs
        return self.answer


@pytest.mark.parametrize("method", ["_tokenize_prompt_async", "_async_tokenizer_decode"])
async def test_prompts_wait_for_no_conversion(method):
    service = Service()
    own = conversions_apart(service)
    assert own.online_renderer.renderer is own.renderer
    converted = asyncio.ensure_future(getattr(own.renderer, method)("long"))
    assert await asyncio.wait_for(service.online_renderer.renderer._tokenize_prompt_async("prompt"), 5) == 6
    assert not converted.done()
    own.renderer.tokenizer.go_on.set()
    assert await converted == 4


@pytest.mark.parametrize("tokens", [0, 1, 1024, 3000])
async def test_the_strings_of_tokens_are_made_in_the_thread_of_conversions_some_at_a_time(tokens):
    token_ids = list(range(tokens))
    own = conversions_apart(Service(TokenizeResponse(count=tokens, max_model_len=64, tokens=token_ids)))
    asked = TokenizeCompletionRequest(prompt="a", return_token_strs=True)
    answer = await own.create_tokenize(asked, raw_request=None)
    assert answer.token_strs == [f"<{one}>" for one in token_ids]
    assert asked.return_token_strs
    threads, counts = zip(*own.renderer.tokenizer.converted, strict=True) if tokens else ((), ())
    assert all(name.startswith("conversions") for name in threads)
    assert (sum(counts), max(counts, default=0) <= 1024) == (tokens, True)


async def test_who_asks_for_no_strings_has_none_and_an_error_has_none():
    counted = TokenizeResponse(count=1, max_model_len=64, tokens=[1])
    answer = await conversions_apart(Service(counted)).create_tokenize(
        TokenizeCompletionRequest(prompt="a"), raw_request=None
    )
    assert answer.token_strs is None
    refused = create_error_response("no")
    asked = TokenizeCompletionRequest(prompt="a", return_token_strs=True)
    assert await conversions_apart(Service(refused)).create_tokenize(asked, raw_request=None) is refused


def test_vllms_renderer_has_what_conversions_are_taken_apart_by():
    made = inspect.getsource(BaseRenderer.__init__)
    for name in ("_tokenize_prompt", "_decode"):
        assert callable(getattr(BaseRenderer, name))
    for name in ("_tokenize_prompt_async", "_async_tokenizer_decode"):
        assert f"self.{name} = make_async(" in made
