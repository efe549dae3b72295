"""Keeps an answer that does not become text from being decoded from its beginning at each of its tokens.

vLLM's detokenizer decodes at each token all that have come since the text last grew, as a character may take
several. Where none is ever complete, as with lone bytes or special tokens that are left out, these are all
of the answer, and of the prompt too if that ends so; meanwhile all streams of the replica wait.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from tokenizers import decoders
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_PENDING: Final = 24
"""Tokens in a row that give no text before their decoding begins anew. Characters have four at most."""
CONTEXT: Final = 8
"""Tokens that give text with which decoding begins: the four of a character, and as many before them."""
_LOOKED_AT: Final = 256
"""The last tokens of a prompt, among which these are looked for."""
_BROKEN: Final = "\N{REPLACEMENT CHARACTER}"


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
    """vLLM's, but for how many tokens it decodes at once.

    The text is vLLM's, with one exception: behind a prompt that ends within a character, an answer does not
    begin with all of the prompt.

    Args:
        own: vLLM's, of a request without tokens yet.
        prompt_token_ids: Of that request.
    """

    def __init__(self, own: FastIncrementalDetokenizer, prompt_token_ids: Sequence[int]) -> None:
        self.__dict__.update(vars(own))
        self._context: list[int] = []
        self._pending: list[int] = []
        self._held = ""
        self._repeats = False
        self._begin_behind(prompt_token_ids[-_LOOKED_AT:])

    def _protected_step(self, next_token_id: int) -> str | None:
        text: str | None = super()._protected_step(next_token_id)
        self._pending.append(next_token_id)
        if text is None:
            if len(self._pending) == MOST_PENDING:
                behind = [*self._context, *self._pending]
                self._held = self._new_in(self._decoded(behind))
                self._begin_behind(behind)
            return None
        if self._repeats:
            text = self._new_in(text)
        elif self._held:
            text = self._held + text
        self._context = [*self._context, *self._pending][-CONTEXT:]
        self._pending, self._held, self._repeats = [], "", False
        return text

    def _begin_behind(self, token_ids: Sequence[int]) -> None:
        """Decode what comes next with the last few of these, not with all."""
        shown = [*islice((one for one in reversed(token_ids) if self._decoded([one])), CONTEXT)][::-1]
        # where each token is a byte, one that begins within a character has vLLM's decoder take none for text
        cuts = [shown[-most:] for most in range(CONTEXT, CONTEXT - 4, -1)]
        whole = (cut for cut in cuts if not self._decoded(cut).endswith(_BROKEN))
        self._context, self._pending = next(whole, shown), []
        self.stream = decoders.DecodeStream(ids=self._context, skip_special_tokens=self.skip_special_tokens)
        # behind what does not end with a character, the next text is that of all tokens
        self._repeats = self._decoded(self._context).endswith(_BROKEN)

    def _new_in(self, text: str) -> str:
        """What has not been given yet of the text of all tokens from the context on."""
        known = self._decoded(self._context)
        if text.startswith(known):
            return self._held + text[len(known) :]
        return self._held[:-1] + text[len(known) - 1 :]  # the last character has been completed

    def _decoded(self, token_ids: Sequence[int]) -> str:
        known = [one for one in token_ids if one >= 0]  # vLLM passes over one that is not
        text: str = self.tokenizer.decode(known, skip_special_tokens=self.skip_special_tokens)
        return text
