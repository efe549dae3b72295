"""Conversions have a thread and a tokenizer of their own."""

import asyncio
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from vllm.renderers.base import BaseRenderer
from vllm.utils.async_utils import make_async

from decode_node.tokenizing.conversions import conversions_apart


class Counting:
    """A tokenizer that takes its time for some texts."""

    def __init__(self):
        self.go_on = threading.Event()

    def __deepcopy__(self, _):
        return Counting()

    def __call__(self, text):
        assert text != "long" or self.go_on.wait(10)
        return len(text)


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


@pytest.mark.parametrize("method", ["_tokenize_prompt_async", "_async_tokenizer_decode"])
async def test_prompts_wait_for_no_conversion(method):
    renderer = Renderer()
    service = SimpleNamespace(renderer=renderer, online_renderer=SimpleNamespace(renderer=renderer))
    own = conversions_apart(service)
    assert own.online_renderer.renderer is own.renderer
    converted = asyncio.ensure_future(getattr(own.renderer, method)("long"))
    assert await asyncio.wait_for(service.online_renderer.renderer._tokenize_prompt_async("prompt"), 5) == 6
    assert not converted.done()
    own.renderer.tokenizer.go_on.set()
    assert await converted == 4


def test_vllms_renderer_has_what_conversions_are_taken_apart_by():
    made = inspect.getsource(BaseRenderer.__init__)
    for name in ("_tokenize_prompt", "_decode"):
        assert callable(getattr(BaseRenderer, name))
    for name in ("_tokenize_prompt_async", "_async_tokenizer_decode"):
        assert f"self.{name} = make_async(" in made
