"""How much prefill work arrives at the fleet, from whom, and how it would be divided fairly.

Owns the account of arriving work by class and tenant, weighted max-min division, and how what is too much is
spread over requests of different sizes. Refuses nobody (`slo.admission.controller`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from slo.queue.decay import ExponentialDecay
from slo.tiers import Tier

MEMORY_S: Final = 20.0
"""What arrived this long ago counts 1/e of what arrives now."""
_FORGOTTEN: Final = 1e-6
_Key = TypeVar("_Key")


@dataclass(slots=True)
class _OfASize:
    """What was asked for in requests of about the same work: its sum, and that of its squares."""

    work: float = 0.0
    squares: float = 0.0

    @property
    def of_each(self) -> float:
        """Work of a request, the mean over work."""
        return self.squares / self.work


class RecentDemand:
    """Expects the near future to be like the recent past.

    Args:
        memory_s: Time constant of forgetting.
    """

    def __init__(self, memory_s: float = MEMORY_S) -> None:
        self.memory_s = memory_s
        self._grown: dict[Tier, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._sizes: dict[Tier, dict[str, dict[int, _OfASize]]] = defaultdict(lambda: defaultdict(dict))
        """By tier, tenant, and power of two of the seconds that each takes."""
        self._shed_for_decode: dict[Tier, float] = defaultdict(float)
        self._refused = 0.0
        self._decay = ExponentialDecay(memory_s)

    def arrived(self, tier: Tier, tenant: str, work_s: float, now_s: float) -> None:
        """A request asks for `work_s` seconds of prefill, whether or not it will get them."""
        if (factor := self._decay.rescale(now_s)) < 1:
            self._rescale(factor)
        grown = work_s * self._decay.grown(now_s)
        self._grown[tier][tenant] += grown
        if grown > 0:
            of_a_size = self._sizes[tier][tenant].setdefault(math.frexp(work_s)[1], _OfASize())
            of_a_size.work += grown
            of_a_size.squares += grown * work_s

    def withdrawn(self, tier: Tier, tenant: str, work_s: float, asked_s: float) -> None:
        """What was asked for at `asked_s` is not prefill's to do after all."""
        if (tenants := self._grown.get(tier)) is not None and tenant in tenants:
            grown = work_s * self._decay.grown(asked_s)
            tenants[tenant] = max(0.0, tenants[tenant] - grown)
            sizes, size = self._sizes[tier].get(tenant, {}), math.frexp(work_s)[1]
            if (of_a_size := sizes.get(size)) is not None:
                of_a_size.work -= grown
                of_a_size.squares -= grown * work_s
                if min(of_a_size.work, of_a_size.squares) <= _FORGOTTEN * grown:
                    del sizes[size]

    def refused(self, work_s: float, asked_s: float) -> None:
        """What was asked for at `asked_s` will not be done."""
        self._refused += work_s * self._decay.grown(asked_s)

    def shed_for_decode(self, tier: Tier, tenant: str, work_s: float, asked_s: float) -> None:
        """What was asked for at `asked_s` is not prefill's to do, as its class has its share of decode."""
        self.withdrawn(tier, tenant, work_s, asked_s)
        self._shed_for_decode[tier] += work_s * self._decay.grown(asked_s)

    def shed_for_decode_work(self, now_s: float) -> dict[Tier, float]:
        """Work that arrives beside that of `by_tenant` and is shed for decode alone, seconds per second."""
        scale = self._decay.kept(now_s) / self.memory_s
        return {tier: grown * scale for tier, grown in self._shed_for_decode.items()}

    def refused_work(self, now_s: float) -> float:
        """Of the arriving work, what is refused, seconds per second."""
        return self._refused * self._decay.kept(now_s) / self.memory_s

    def by_tenant(self, now_s: float) -> dict[Tier, dict[str, float]]:
        """Arriving work, seconds per second."""
        scale = self._decay.kept(now_s) / self.memory_s
        return {
            tier: {name: grown * scale for name, grown in tenants.items()}
            for tier, tenants in self._grown.items()
        }

    def chance(self, tier: Tier, tenant: str, work_s: float, fraction: float, most: float) -> float:
        """With what probability a request is refused, so that a tenant loses `fraction` of what it asks for.

        It goes with the work, and is `most` at most: refusing one request of 8,000 tokens makes as much room
        as refusing forty of 200, which are forty answers.
        """
        if work_s <= 0:
            return 0.0
        sizes = sorted(self._sizes[tier].get(tenant, {}).values(), key=lambda size: size.of_each)
        if fraction >= most or not sizes:
            return most if fraction > 0 else 0.0
        wanted = fraction * math.fsum(size.work for size in sizes)
        per_s = wanted / math.fsum(size.squares for size in sizes)
        # The largest are refused as far as may be, and the others the more for it. What is left of others
        # beside one that is nearly all may be nothing but rounding, and takes nothing back.
        while len(sizes) > 1 and per_s * sizes[-1].of_each > most:
            wanted -= most * sizes.pop().work
            per_s = max(per_s, wanted / math.fsum(size.squares for size in sizes))
        return min(most, per_s * work_s)

    def _rescale(self, factor: float) -> None:
        self._refused *= factor
        for tier in self._shed_for_decode:
            self._shed_for_decode[tier] *= factor
        for tier, tenants in self._grown.items():
            for name, grown in list(tenants.items()):
                if grown * factor < _FORGOTTEN:
                    del tenants[name]
                    self._sizes[tier].pop(name, None)
                    continue
                tenants[name] = grown * factor
                sizes = self._sizes[tier].get(name, {})
                for size, asked in list(sizes.items()):
                    asked.work *= factor
                    asked.squares *= factor
                    if min(asked.work, asked.squares) < _FORGOTTEN**2:
                        del sizes[size]


def divide(
    capacity: float, demands: Mapping[_Key, float], weights: Mapping[_Key, float]
) -> dict[_Key, float]:
    """Divide `capacity` by weighted max-min fairness.

    Nobody gets more than they ask for; what one leaves goes to the others in proportion to their weights. So
    each gets at least the lesser of its demand and its weighted part of the whole.
    """
    parts: dict[_Key, float] = {}
    left, weight = max(0.0, capacity), math.fsum(weights[key] for key in demands)
    for key in sorted(demands, key=lambda key: demands[key] / weights[key]):
        part = min(demands[key], left * weights[key] / weight) if weight > 0 else 0.0
        parts[key] = part
        left -= part
        weight -= weights[key]
    return parts
