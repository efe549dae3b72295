"""In which order requests get onto a decode engine: those whose memory was taken, and newcomers.

By tier, which rises with waiting as in `slo.queue.ageing`, and by one for those whose memory was taken twice,
but never to the top tier, and only while streams of its own hold less than a part of the memory: in an
overload that lasts all of a lower tier have waited for long, and would stand before all that come of a higher
one. Within a tier those whose memory was taken come first: the one that is least ahead of its TPOT objective,
then the smallest. Newcomers come in the order of their arrival; a step of a beam search has the place of its
search, and rises with its own wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from slo.decode.predicted_peak import Holding
from slo.decode.victims import IMMUNE_AFTER
from slo.queue.ageing import Ageing
from slo.tiers import Tier, TierSet

STARVES_AFTER_S: Final = 20.0
"""After so long a request is admitted whatever the pace of the others; see `slo.decode.newcomers`."""
RISING_PART: Final = 0.1
"""Of the memory: a tier whose streams hold so much does not starve, and rises no further."""


class Parked(NamedTuple):
    """A request that waits for memory.

    Attributes:
        request_id: The engine's name for it.
        since_s: Since when it waits.
        is_newcomer: Whether it has not started yet.
        preemptions: How often its memory was taken.
        credit_s: By how much it is ahead of its TPOT objective; infinite without one.
        tokens: Its sequence so far.
        may_drop: Whether it may be ended for good, see `slo.decode.drop`.
        ahead_s: By how much earlier than that a newcomer has its place.
        level: The rank to which it has risen, once it is in order.
    """

    request_id: str
    tier: Tier
    since_s: float
    is_newcomer: bool
    preemptions: int = 0
    credit_s: float = float("inf")
    tokens: int = 0
    may_drop: bool = False
    ahead_s: float = 0.0
    level: int = 0


def restore_order(
    parked: Sequence[Parked],
    tiers: TierSet,
    ageing: Ageing,
    now_s: float,
    held: Iterable[Holding],
    pool_tokens: int,
) -> list[Parked]:
    """All of them with their levels, the first to be admitted first.

    Args:
        parked: They.
        tiers: Ranks.
        ageing: How they rise with waiting.
        now_s: Now.
        held: Those that have memory.
        pool_tokens: All memory.
    """

    def aged(one: Parked) -> int:
        level = int(ageing.effective_tier(tiers, one.tier, now_s - one.since_s))
        if one.preemptions >= IMMUNE_AFTER and one.tier != tiers.top:
            level = max(level, min(tiers.rank(one.tier) + 1, tiers.top_rank - 1))
        return level

    levels = {one.request_id: aged(one) for one in parked}

    def key(one: Parked) -> tuple[int, bool, float, float]:
        level = -levels[one.request_id]
        if one.is_newcomer:
            return level, True, one.since_s - one.ahead_s, 0.0
        return level, False, one.credit_s, one.tokens

    left = dict.fromkeys(range(tiers.top_rank + 1), RISING_PART * pool_tokens)
    for holding in held:
        left[holding.rank] -= holding.tokens
    ordered = sorted(parked, key=key)
    for one in ordered:
        rank = tiers.rank(one.tier)
        if levels[one.request_id] > rank:
            if left[rank] <= 0:
                levels[one.request_id] = rank
            left[rank] -= one.tokens
    in_order = sorted(ordered, key=lambda one: -levels[one.request_id])
    return [one._replace(level=levels[one.request_id]) for one in in_order]
