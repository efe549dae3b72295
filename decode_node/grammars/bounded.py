"""Bounds the computing that a grammar takes while its answer is generated.

An engine follows an answer through its grammar between two steps, beside all streams. That takes some
microseconds for most grammars, and ever longer for one by which a text can be read in many ways: with each
token there are more of them. Owns how long that may take, and the word by which a request ends whose
grammar has taken longer; `decode_node.scheduler` ends it. A call that is under way is not interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

if TYPE_CHECKING:
    import torch

TOKEN_S: Final = 0.001
"""Computing that each token of an answer may take; of most grammars one takes a hundredth of that."""
MOST_S: Final = 0.25
"""Computing that tokens may take beyond that; as much again once others have taken so much less."""
TOO_SLOW: Final = "slackserve_grammar_too_slow"
"""The `stop_reason` with which the engine ends a request whose grammar has taken more."""


class BoundedGrammar(StructuredOutputGrammar):  # type: ignore[misc] # vLLM ships no types for it
    """A request's grammar, which knows whether it has taken too long.

    Args:
        grammar: vLLM's, of any backend.
        clock: Seconds that the calling thread has computed; what others compute meanwhile does not count.
    """

    def __init__(
        self, grammar: StructuredOutputGrammar, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._grammar = grammar
        self._clock = clock
        self._left_s = MOST_S

    @property
    def is_too_slow(self) -> bool:
        """Whether it has taken more than it may."""
        return self._left_s < 0.0

    @contextmanager
    def _counted(self) -> Iterator[None]:
        before_s = self._clock()
        yield
        self._left_s -= self._clock() - before_s

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Go on by these, which may be drafts; whether the answer may."""
        self._left_s = min(MOST_S, self._left_s + TOKEN_S * len(tokens))
        with self._counted():
            return bool(self._grammar.accept_tokens(request_id, tokens))

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Which of these, from the first on, it would accept."""
        with self._counted():
            return list(self._grammar.validate_tokens(tokens))

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Say which tokens may come next."""
        with self._counted():
            self._grammar.fill_bitmask(bitmask, batch_index)

    def rollback(self, num_tokens: int) -> None:
        """Take the latest tokens back."""
        self._grammar.rollback(num_tokens)

    def is_terminated(self) -> bool:
        """Whether nothing may come any more."""
        return bool(self._grammar.is_terminated())

    def reset(self) -> None:
        """Begin anew."""
        self._grammar.reset()
