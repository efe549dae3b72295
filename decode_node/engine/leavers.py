"""Who has left a decode engine for lack of memory, until they come back with KV that prefill has computed.

Owns what is remembered of them, and how long such a way takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from decode_node.engine.accounts import Away, StreamAccount
    from slo.request import JobId

_AT_FIRST: Final = 4.0
_LEARNING_RATE: Final = 0.1
_AT_MOST: Final = 4.0
"""So many times what was learned before, one alone may teach: a slow client keeps its stream away too."""
_FORGETTING_RATE: Final = 0.01
"""Of what was learned, with each victim that stays: after a bad hour nobody would leave any more."""
_MOST_AWAY: Final = 10_000
"""So many are remembered, the last to leave: nobody says that the client of one has gone meanwhile."""


class Leavers:
    """Those of one engine.

    Attributes:
        away: What is remembered of each, by job, in the order in which they left.
        takes: How many times as long the way to the prefill tier and back is as computing the KV alone. What
            one waits for memory after it, as it would have here, is no part of that.
    """

    def __init__(self) -> None:
        self.away: dict[JobId, Away] = {}
        self.takes = _AT_FIRST

    def leave(self, request: Request, account: StreamAccount, preemptions: int, now_s: float) -> None:
        """A request leaves, perhaps while it computes its sequence again, of which prefill computes all."""
        tokens = max(request.num_computed_tokens, request.num_tokens - 1)
        self._remember(account, preemptions, tokens, now_s)

    def leave_again(self, account: StreamAccount, now_s: float) -> None:
        """One that was back has got no KV and will try again."""
        self._remember(account, account.preemptions_before, account.lost_tokens, now_s)

    def _remember(self, account: StreamAccount, preemptions: int, tokens: int, now_s: float) -> None:
        self.away.pop(account.job, None)  # it is the last to leave, not where it was
        if len(self.away) >= _MOST_AWAY:
            del self.away[next(iter(self.away))]
        self.away[account.job] = account.leaves(preemptions, tokens, now_s)

    def is_back(self, account: StreamAccount, now_s: float) -> bool:
        """Whether a request that arrives had left; its account then goes on."""
        if (away := self.away.pop(account.job, None)) is None:
            return False
        account.is_back(away, now_s)
        return True

    def stays(self) -> None:
        """A victim did not leave."""
        self.takes += _FORGETTING_RATE * (_AT_FIRST - self.takes)

    def took(self, account: StreamAccount, alone_s: float, now_s: float) -> None:
        """One has its KV again, which takes `alone_s` to compute."""
        if account.pulls_since_s is None:
            return
        way_s = account.way_s + now_s - account.pulls_since_s
        times = min(way_s / alone_s, _AT_MOST * self.takes)
        self.takes += _LEARNING_RATE * (times - self.takes)
