"""How much prefill work arrives at the fleet, from whom, and how it would be divided fairly.

Owns the account of arriving work by class and tenant, and weighted max-min division. Refuses nobody
(`slo.admission.controller`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Final, TypeVar

from slo.queue.decay import ExponentialDecay
from slo.tiers import Tier

MEMORY_S: Final = 20.0
"""What arrived this long ago counts 1/e of what arrives now."""
_FORGOTTEN: Final = 1e-6
_Key = TypeVar("_Key")


class RecentDemand:
    """Expects the near future to be like the recent past.

    Args:
        memory_s: Time constant of forgetting.
    """

    def __init__(self, memory_s: float = MEMORY_S) -> None:
        self.memory_s = memory_s
        self._grown: dict[Tier, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._decay = ExponentialDecay(memory_s)

    def arrived(self, tier: Tier, tenant: str, work_s: float, now_s: float) -> None:
        """A request asks for `work_s` seconds of prefill, whether or not it will get them."""
        if (factor := self._decay.rescale(now_s)) < 1:
            self._rescale(factor)
        self._grown[tier][tenant] += work_s * self._decay.grown(now_s)

    def withdrawn(self, tier: Tier, tenant: str, work_s: float, asked_s: float) -> None:
        """What was asked for at `asked_s` is not prefill's to do after all."""
        if (tenants := self._grown.get(tier)) is not None and tenant in tenants:
            tenants[tenant] = max(0.0, tenants[tenant] - work_s * self._decay.grown(asked_s))

    def by_tenant(self, now_s: float) -> dict[Tier, dict[str, float]]:
        """Arriving work, seconds per second."""
        scale = self._decay.kept(now_s) / self.memory_s
        return {
            tier: {name: grown * scale for name, grown in tenants.items()}
            for tier, tenants in self._grown.items()
        }

    def _rescale(self, factor: float) -> None:
        for tenants in self._grown.values():
            for name, grown in list(tenants.items()):
                if grown * factor < _FORGOTTEN:
                    del tenants[name]
                else:
                    tenants[name] = grown * factor


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
