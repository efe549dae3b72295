"""The work that no scheduler and no placement can spare: what the bounds on all of them reckon with."""

from __future__ import annotations

from collections.abc import Iterable

from simulator.cost.passes import CostModel
from simulator.workload.arrivals import Arrival


def least_works(cost: CostModel, arrivals: Iterable[Arrival]) -> list[float]:
    """Of each request, the seconds that it adds to a large pass; prefixes are cached once they were seen."""
    seen: set[int] = set()
    found = []
    for arrival in arrivals:
        known = next((n for n, block in enumerate(arrival.blocks) if block not in seen), len(arrival.blocks))
        seen.update(arrival.blocks)
        cached = min(known * arrival.block_tokens, arrival.tokens - 1)
        found.append(cost.added_s(arrival.tokens - cached, cached))
    return found
