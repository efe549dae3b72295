"""Who may lengthen a queue that is full: who has no more in it than their part.

Owns that one rule. How long a queue may be, and what it is of, is its caller's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

from slo.request import Party

HARD_LIMIT: Final = 2.0
"""No queue is longer than so many times what is full, whoever has something more."""
_Key = TypeVar("_Key")


def excess(
    held: Mapping[_Key, float],
    asker: _Key,
    most: float,
    limit: float,
    weight: Callable[[_Key], float] = lambda _: 1.0,
) -> float:
    """How much of a queue has to be done before `asker` may lengthen it; 0 or less when it may now.

    Anybody may while there is no more than `most`. Beyond it, up to `limit`, those may whose own is within
    their weighted part of `most`: who has filled the queue keeps nobody else out.

    Args:
        held: What waits, by whose it is.
        asker: Who has something more.
        most: What is a full queue, in the unit of `held`.
        limit: Beyond which nobody may.
        weight: Of one of them, relative to the others.
    """
    whole = math.fsum(held.values())
    others = math.fsum(weight(name) for name in held if name != asker)
    part = most * weight(asker) / (weight(asker) + others)
    return min(whole - most, max(whole - limit, held.get(asker, 0.0) - part))


def by_tenant(
    parties: Iterable[Party], weight: Callable[[str], float] = lambda _: 1.0
) -> Callable[[Party], float]:
    """The weights of parties to one queue: the tiers of a tenant share alike what is the tenant's.

    Args:
        parties: All of them, who asks included.
        weight: Of a tenant, relative to the others.
    """
    tiers = Counter(party.tenant for party in set(parties))
    return lambda party: weight(party.tenant) / tiers[party.tenant]


def prompts_excess(
    held: Mapping[Party, int], asker: Party, most: int, weight: Callable[[str], float] = lambda _: 1.0
) -> float:
    """As `excess`, for prompts of which there may be `most`, and a request with any number of them."""
    return excess(held, asker, most - 1, HARD_LIMIT * most - 1, by_tenant([*held, asker], weight))
