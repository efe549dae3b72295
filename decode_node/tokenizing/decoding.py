"""The text of tokens, made without holding the interpreter, which all streams of a replica share.

A tokenizer in Rust lets go of the interpreter while it decodes a batch, and not while it decodes one text.
Owns that the text is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from transformers import TokenizersBackend
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin
from vllm.utils.async_utils import make_async

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor


def stand_before(renderer: Any, executor: Executor) -> None:
    """Have vLLM's renderer make the text of tokens so, in a thread of `executor`."""
    renderer._async_tokenizer_decode = make_async(_decode_of(renderer), executor=executor)  # noqa: SLF001


def _decode_of(renderer: Any) -> Callable[..., str]:
    """What decodes as vLLM's renderer does, which tokenizers in Python are left to."""
    tokenizer = renderer.tokenizer
    if not isinstance(tokenizer, TokenizersBackend) or not isinstance(tokenizer.backend_tokenizer, Tokenizer):
        return renderer._decode  # type: ignore[no-any-return] # noqa: SLF001 - no public way in
    # The class of vLLM's pool, over the tokenizer's own, would decode with a copy.
    kind: Any = next(
        each for each in type(tokenizer).__mro__ if not issubclass(each, ThreadSafeHFTokenizerMixin)
    )
    apart = kind.__new__(kind)
    vars(apart).update(vars(tokenizer), _tokenizer=_LettingGo(tokenizer.backend_tokenizer))
    return apart.decode  # type: ignore[no-any-return]


class _LettingGo:
    """A tokenizer in Rust that decodes one text as a batch of one."""

    def __init__(self, own: Tokenizer) -> None:
        self._own = own

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        (text,) = self._own.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
