"""Keeps an answer that does not become text from being decoded from its beginning at each of its tokens.

vLLM's detokenizer decodes at each token all that have come since the text last grew, as a character may take
several. Where none is ever complete, as with lone bytes or special tokens that are left out, these are all
of the answer, and of the prompt too if that ends so; meanwhile all streams of the replica wait.
"""

from __future__ import annotations

import codecs
from functools import cache
from itertools import dropwhile, islice, takewhile
from typing import TYPE_CHECKING, Any, Final

from tokenizers import decoders
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_PENDING: Final = 24
"""Tokens without text; behind them one is decoded only if text may come. A character has at most four."""
CONTEXT: Final = 8
"""Tokens that give text with which decoding begins: the four of a character, and as many before them."""
_BROKEN: Final = "\N{REPLACEMENT CHARACTER}"
_WITHIN: Final = [bytes([byte]) for byte in range(0x80, 0xC0)]
"""Bytes with which no character begins."""


def bound_detokenizers(processor: Any) -> None:
    """Have vLLM's `OutputProcessor` make the text of each request so."""
    take_in = processor.add_request

    def add_request(request: Any, *rest: Any, **options: Any) -> None:
        take_in(request, *rest, **options)
        state = processor.request_states.get(request.request_id)
        if state is not None and type(state.detokenizer) is FastIncrementalDetokenizer:
            state.detokenizer = BoundedDetokenizer(state.detokenizer, request.prompt_token_ids or ())

    processor.add_request = add_request


class BoundedDetokenizer(FastIncrementalDetokenizer):  # type: ignore[misc] # vLLM ships no types for it
    """vLLM's, but for how often it decodes what gives no text.

    While nothing that is pending can be a text, its tokens are kept from vLLM's stream, which gets them all
    as soon as it can. The text is vLLM's, with one exception: behind a prompt that ends within a character,
    an answer does not begin with all of the prompt.

    Args:
        own: vLLM's, of a request without tokens yet.
        prompt_token_ids: Of that request.
    """

    _pending: list[int]
    """The tokens since the text last grew."""
    _held_back: list[int]
    """The last of these, which vLLM's stream has not been given yet."""
    _character: bytes | None
    """Where tokens are bytes, those of the last, incomplete character; `None` if no other can mend them."""
    _of_prompt: tuple[str, ...]
    """What the prompt may have of the next text: all it shows, or that without its incomplete character."""

    def __init__(self, own: FastIncrementalDetokenizer, prompt_token_ids: Sequence[int]) -> None:
        self.__dict__.update(vars(own))
        self._left_out = _special_tokens(self.tokenizer) if self.skip_special_tokens else frozenset()
        self._bytes = _byte_tokens(self.tokenizer)
        self._begin_behind(prompt_token_ids)

    def _protected_step(self, next_token_id: int) -> str | None:
        if not self._is_shown(next_token_id):
            return None
        are_many = len(self._pending) >= MOST_PENDING
        if are_many and not self._is_whole_with(next_token_id):
            self._pending.append(next_token_id)
            self._held_back.append(next_token_id)
            return None
        if self._held_back:
            super()._protected_step(self._held_back)  # no text, as what they end with is not whole
            self._held_back = []
        text: str | None = super()._protected_step(next_token_id)
        if text is None:
            if not are_many:
                self._is_whole_with(next_token_id)
            self._pending.append(next_token_id)
            return None
        if self._of_prompt:
            text = text[max(_same(text, told) for told in self._of_prompt) :]
        if are_many:
            self._begin_behind([*self._pending, next_token_id])
        else:
            self._forget()
        return text

    def _begin_behind(self, token_ids: Sequence[int]) -> None:
        """Decode what comes next with the last few of these, not with all."""
        self._forget()
        last = [*islice(filter(self._is_shown, reversed(token_ids)), CONTEXT)][::-1]
        run = [*takewhile(self._bytes.__contains__, filter(self._is_shown, reversed(token_ids)))][::-1]
        try:
            codecs.utf_8_decode(b"".join(self._bytes[one] for one in run))
            context = [*dropwhile(lambda one: self._bytes.get(one) in _WITHIN, last)]
        except UnicodeDecodeError as error:
            context = run[error.start : error.end + 1]
        self.stream = decoders.DecodeStream(ids=context, skip_special_tokens=self.skip_special_tokens)
        told = self._decoded(context)
        if told.endswith(_BROKEN):  # the next text is that of all tokens
            for one in context:
                self._is_whole_with(one)
                self._pending.append(one)
            self._of_prompt = told, self._decoded(context[: len(context) - len(self._character or b"")])

    def _forget(self) -> None:
        """All tokens so far have become text."""
        self._pending, self._held_back = [], []
        self._character, self._of_prompt = b"", ()

    def _is_whole_with(self, token_id: int) -> bool:
        """Whether what is pending ends with a whole character behind this token, which is to follow it.

        Where tokens are bytes, a run of them is a text only if all of it is valid.
        """
        byte = self._bytes.get(token_id)
        if byte is None:
            self._character = b""
            return not self._decoded([*self._pending[-3:], token_id]).endswith(_BROKEN)
        if self._character is None:
            return False
        self._character += byte
        try:
            text, length = codecs.utf_8_decode(self._character)
        except UnicodeDecodeError:
            self._character = None
            return False
        self._character = self._character[length:]
        return text not in ("", _BROKEN)

    def _is_shown(self, token_id: int) -> bool:
        """Whether a token has a part in the text at all; vLLM passes over others."""
        try:
            is_known = self.tokenizer.id_to_token(token_id) is not None
        except OverflowError:  # it is negative
            return False
        return is_known and token_id not in self._left_out

    def _decoded(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=self.skip_special_tokens)
        return text


def _same(text: str, other: str) -> int:
    """With how many characters both begin."""
    return sum(1 for _ in takewhile(lambda each: each[0] == each[1], zip(text, other, strict=False)))


@cache
def _special_tokens(tokenizer: Any) -> frozenset[int]:
    return frozenset(one for one, added in tokenizer.get_added_tokens_decoder().items() if added.special)


@cache
def _byte_tokens(tokenizer: Any) -> dict[int, bytes]:
    """The tokens of which each is a byte, as in Llama 2, if the tokenizer has such."""
    named = {tokenizer.token_to_id(f"<0x{byte:02X}>"): bytes([byte]) for byte in range(256)}
    lone = tokenizer.token_to_id("<0x80>")
    if lone is None or tokenizer.decode([lone], skip_special_tokens=False) != _BROKEN:
        return {}  # to other decoders these are names
    return {one: byte for one, byte in named.items() if one is not None}
