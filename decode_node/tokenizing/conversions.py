"""What answers `/tokenize` and `/detokenize`: vLLM's service, with a thread and a tokenizer of its own.

Owns that these neither make prompts wait nor hold the event loop that all streams share.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from vllm.entrypoints.serve.tokenize.protocol import TokenizeResponse
from vllm.renderers.hf import HfRenderer, safe_apply_chat_template
from vllm.utils.async_utils import make_async

from decode_node.tokenizing import decoding

if TYPE_CHECKING:
    from concurrent.futures import Executor

_AT_A_TIME: Final = 1024
"""Tokens whose strings are made before the thread is somebody else's."""


def conversions_apart(service: Any) -> Any:
    """The service of conversions that vLLM has, with a thread and a tokenizer of its own.

    vLLM has one thread for all prompts, which would wait for the longest text that somebody has converted. A
    tokenizer releases the interpreter while it works, and none may be used by two threads. That of the
    embedded model takes 12 MiB.
    """
    own, renderer = copy.copy(service), copy.copy(service.renderer)
    executor = ThreadPoolExecutor(1, thread_name_prefix="conversions")
    renderer.tokenizer = copy.deepcopy(renderer.tokenizer)
    # No public way in: a renderer that is built anew has processors of media and their caches, too.
    if isinstance(renderer, HfRenderer):  # others have templates of their own, which stay where they are
        template = make_async(safe_apply_chat_template, executor=executor)
        renderer._apply_chat_template_async = template  # noqa: SLF001
    renderer._tokenize_prompt_async = make_async(renderer._tokenize_prompt, executor=executor)  # noqa: SLF001
    decoding.stand_before(renderer, executor)
    own.renderer, own.online_renderer = renderer, copy.copy(service.online_renderer)
    own.online_renderer.renderer = renderer
    _strings_apart(own, executor)
    return own


def _strings_apart(service: Any, executor: Executor) -> None:
    """Have the strings of tokens made in a thread of `executor`; vLLM makes them on the event loop."""
    count = service.create_tokenize
    strings_of = make_async(_strings_of, executor=executor)

    async def create_tokenize(request: Any, raw_request: Any) -> Any:
        counted = await count(request.model_copy(update={"return_token_strs": False}), raw_request)
        if request.return_token_strs and isinstance(counted, TokenizeResponse):
            counted.token_strs = []
            for first in range(0, len(counted.tokens), _AT_A_TIME):
                some = counted.tokens[first : first + _AT_A_TIME]
                counted.token_strs += await strings_of(service.renderer, some)
        return counted

    service.create_tokenize = create_tokenize


def _strings_of(renderer: Any, token_ids: list[int]) -> list[str]:
    strings: list[str] = renderer.get_tokenizer().convert_ids_to_tokens(token_ids)
    return strings
