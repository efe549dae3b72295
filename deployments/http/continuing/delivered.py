"""What a client has got of an answer, and so where another replica has to go on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from decode_node.answers import End, Piece, choice_of, has_choice, is_done, is_role
from sampling.carried import CARRIED_XARG, CacheUse, Carried
from slo.model_digest import UNTOLD, ModelDigest

if TYPE_CHECKING:
    from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest

_CREATED: Final = re.compile(r'"created":\d+')
"""When an answer began. A quotation mark inside a text has a backslash before it."""


@dataclass(slots=True)
class Delivered:
    """What the client has got of one streamed answer, taken from its pieces as they pass.

    Attributes:
        has_come: Whether any event of it has come, such as who speaks, so that a replica has had the request.
        has_begun: Whether the client has got some of the answer itself.
        is_over: Whether it has got the last event.
        bound: Why no other replica can go on with what has begun; None when one can.
        digest: Of the model that has generated what has begun.
    """

    has_come: bool = False
    has_begun: bool = False
    is_over: bool = False
    bound: str | None = None
    digest: ModelDigest = UNTOLD
    _token_ids: list[int] = field(default_factory=list)
    _end: End | None = None
    _roles: set[int] = field(default_factory=set)
    _cache: CacheUse | None = None
    _has_usage: bool = False
    _created: str = ""

    @property
    def tokens(self) -> int:
        """How many the client has got, and are prefilled with the prompt where it goes on."""
        return len(self._token_ids)

    def take(self, piece: Piece) -> str | None:
        """The text to hand over for a piece; None when the client has had it from another replica."""
        self.has_come = True
        if is_role(piece.text):
            answer = choice_of(piece.text)
            if answer in self._roles:
                return None
            self._roles.add(answer)
        elif has_choice(piece.text):
            self.has_begun = True
            self._token_ids += piece.token_ids
            self._end, self.bound = piece.end, piece.bound
            self._cache = self._cache or piece.cache
            self.digest = self.digest or piece.digest
        elif is_done(piece.text):
            self.is_over = True
        elif self._has_usage:
            return None
        else:
            self._has_usage = True
        created = _CREATED.search(piece.text)
        if created is None or created[0] == self._created:
            return piece.text
        if not self._created:
            self._created = created[0]
            return piece.text
        return _CREATED.sub(self._created, piece.text, count=1)

    def rest_of(
        self, body: ChatCompletionRequest | CompletionRequest
    ) -> ChatCompletionRequest | CompletionRequest:
        """The request for what is still to come of `body`'s answer."""
        if not self._token_ids:
            return body
        reason, stop = (None, None) if self._end is None else self._end
        if reason == "stop" and isinstance(stop, str):  # the text has it, and is looked through again
            reason = stop = None
        carried = msgspec.to_builtins(Carried(self._token_ids, None, reason, stop, cache=self._cache))
        return body.model_copy(update={"vllm_xargs": {**(body.vllm_xargs or {}), CARRIED_XARG: carried}})
