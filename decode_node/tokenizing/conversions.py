"""What answers `/tokenize` and `/detokenize`: vLLM's service, with a thread and a tokenizer of its own.

Owns that these do not make prompts wait.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm.renderers.hf import HfRenderer, safe_apply_chat_template
from vllm.utils.async_utils import make_async

from decode_node.tokenizing import decoding


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
    return own
