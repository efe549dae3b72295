"""Which generated tokens each event of a stream stands for, so that another replica can go on after it.

vLLM's OpenAI layer takes an output of the engine, makes its events, and asks for the next one only then. So
what it has taken when an event comes out is all that the event and those before it say; but a chat's role,
which comes before the event of the same output.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from decode_node.answers import End, Piece, has_choice, is_role
from slo.model_digest import UNTOLD, ModelDigest
from slo.request import ReplicaId

if TYPE_CHECKING:
    from sampling.carried import CacheUse


@dataclass(slots=True)
class Progress:
    """Which tokens of one stream its events have told so far, and which are still to be told.

    Attributes:
        known: So many tokens the client has got already, from another replica; their events are not sent.
        bound: Why no other replica can go on after this one; None when one can.
        cache: What the prompt's first prefill had to do with the prefix cache; None before that.
        digest: Of the model that generates it.
        replica: Who sends it.
    """

    known: int = 0
    bound: str | None = None
    cache: CacheUse | None = None
    digest: ModelDigest = UNTOLD
    replica: ReplicaId | None = None
    _taken: int = 0
    _untold: list[int] = field(default_factory=list)
    _end: End | None = None
    _has_told: bool = False

    def take(self, completion: Any) -> None:
        """Note what the layer gets next, vLLM's `CompletionOutput` of a stream."""
        token_ids = list(completion.token_ids)
        self._untold += token_ids[max(0, self.known - self._taken) :]
        self._taken += len(token_ids)
        if completion.finish_reason is not None:
            self._end = End(completion.finish_reason, completion.stop_reason)

    def piece(self, text: str) -> Piece | None:
        """What to send for an event; None when the client has it already."""
        if not has_choice(text):
            return Piece(text)
        if self.known and self._taken <= self.known:
            return None
        if is_role(text):
            return Piece(text)
        told, self._untold = self._untold, []
        if self._has_told:
            return Piece(text, told, self._end, self.bound)
        self._has_told = True
        return Piece(text, told, self._end, self.bound, self.cache, self.digest, self.replica)
