"""How a fleet that is asked for more than it can do is divided: by class, and within each by tenant.

Owns the parts of classes and tenants, and from them the chance that a request is refused. Draws nothing and
refuses nobody (`slo.admission.controller`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from slo.admission.demand import divide
from slo.admission.rules import AdmissionRules
from slo.errors import RejectionReason
from slo.tiers import Tier, TierSet

_LEAST: Final = 1e-9


class Odds(NamedTuple):
    """Probabilities of refusing a request of a class: for its share, and with the reservation besides.

    `by_tenant` has those of the class's tenants that ask for something; another's is `with_reserve`.
    """

    over_share: float
    with_reserve: float
    by_tenant: Mapping[str, float]

    def of(self, tenant: str) -> float:
        """The part of what a tenant asks for that is too much."""
        return self.by_tenant.get(tenant, self.with_reserve)

    def beside(self, shed: float, asked: float, tenant: str) -> float:
        """The part that a tenant loses of what is left when some of its class was refused before.

        Of the class both together refuse no more than the larger of the two does alone.

        Args:
            shed: That, as a part of all that comes.
            asked: Of all that comes, what is asked of the fleet; `shed` included.
            tenant: Who.
        """
        if shed >= self.with_reserve * asked:
            return 0.0
        return self.of(tenant) * (asked - shed / self.with_reserve) / (asked - shed)

    def reason(self, drawn: float) -> RejectionReason:
        """What somebody is refused for, by a number that was drawn from 0 to below what is too much."""
        if drawn < self.over_share:
            return RejectionReason.OVER_SHARE
        return RejectionReason.RESERVED if drawn < self.with_reserve else RejectionReason.TENANT_SHARE


NO_ODDS: Final = Odds(0.0, 0.0, {})


@dataclass(frozen=True, slots=True)
class Shared:
    """What a division has come to; by itself that of a fleet of which nothing is asked.

    Attributes:
        load: Work that arrives per second, over what the fleet can do in a second.
        kept: That of classes that may not be shed.
        odds: By class, where somebody may be refused for a share.
        parts: Of the fleet, by class that may be shed: its share, or what others leave.
        above_share: By such a class, the part of what it asks for that is above its share of the fleet, what
            is shed of it for decode alone included.
        over_part: Who asks for more than their part, of the classes that may not be shed, when these ask for
            more than the fleet can do. All others of them together ask for less, so that what is late is
            served beside them.
    """

    load: float = 0.0
    kept: float = 0.0
    odds: Mapping[Tier, Odds] = field(default_factory=dict)
    parts: Mapping[Tier, float] = field(default_factory=dict)
    above_share: Mapping[Tier, float] = field(default_factory=dict)
    over_part: frozenset[tuple[Tier, str]] = frozenset()


class Sharing:
    """Divides a fleet.

    Args:
        tiers: The share of each class, and whether it may be shed.
        rules: When the fleet is under pressure, and how much may be refused.
        weight: Of a tenant, relative to the others.
    """

    def __init__(self, tiers: TierSet, rules: AdmissionRules, weight: Callable[[str], float]) -> None:
        self._rules = rules
        self._weight = weight
        self._shares = {tier: max(policy.share, _LEAST) for tier, policy in tiers.items()}
        self._sheddable = frozenset(tiers.sheddable)

    def divided(
        self,
        asked: Mapping[Tier, Mapping[str, float]],
        for_decode: Mapping[Tier, float],
        capacity: float,
        reserved: float,
    ) -> Shared:
        """Divide the fleet.

        Args:
            asked: Work that arrives by class and tenant, seconds per second.
            for_decode: What arrives beside that and is shed for decode alone, by class.
            capacity: What the fleet can do, in the same unit; with none nobody is refused for a share.
            reserved: Fraction of the fleet that is kept for the top tier.
        """
        if capacity <= 0:
            return Shared()
        tenants = {
            tier: {name: work / capacity for name, work in by_name.items()} for tier, by_name in asked.items()
        }
        demands = {tier: math.fsum(by_name.values()) for tier, by_name in tenants.items()}
        load = math.fsum(demands.values())
        shed = {tier: demand for tier, demand in demands.items() if tier in self._sheddable and demand > 0}
        kept = load - math.fsum(shed.values())
        parts = {
            tier: max(
                self._shares[tier],
                1.0
                - max(kept, reserved)
                - math.fsum(demand for other, demand in shed.items() if other != tier),
            )
            for tier in self._sheddable
        }
        wanted = {
            tier: demands.get(tier, 0.0) + for_decode.get(tier, 0.0) / capacity for tier in self._sheddable
        }
        above_share = {
            tier: max(0.0, 1.0 - self._shares[tier] / demand) for tier, demand in wanted.items() if demand > 0
        }
        over_part = self._asking_for_too_much(tenants) if kept > 1 else frozenset()
        odds = self._odds(tenants, shed, load, kept, reserved)
        return Shared(load, kept, odds, parts, above_share, over_part)

    def _odds(
        self,
        tenants: Mapping[Tier, Mapping[str, float]],
        shed: Mapping[Tier, float],
        load: float,
        kept: float,
        reserved: float,
    ) -> dict[Tier, Odds]:
        if load <= self._rules.pressure:
            return {}
        plain = self._of_each(shed, load, kept, reserved)
        with_reserve = self._of_each(shed, load, max(kept, reserved), reserved)
        return {
            tier: Odds(
                self._chance(plain[tier], demand),
                self._chance(with_reserve[tier], demand),
                self._by_tenant(with_reserve[tier], tenants[tier]),
            )
            for tier, demand in shed.items()
        }

    def _asking_for_too_much(
        self, demands: Mapping[Tier, Mapping[str, float]]
    ) -> frozenset[tuple[Tier, str]]:
        kept = {tier: math.fsum(demands[tier].values()) for tier in demands if tier not in self._sheddable}
        found = set[tuple[Tier, str]]()
        for tier, part in divide(1.0, kept, self._shares).items():
            asking = demands[tier]
            parts = divide(part, asking, {name: self._weight(name) for name in asking})
            found |= {(tier, name) for name, demand in asking.items() if demand > parts[name] + _LEAST}
        return frozenset(found)

    def _of_each(
        self, demands: Mapping[Tier, float], load: float, taken: float, reserved: float
    ) -> dict[Tier, float]:
        """What each class may have of the fleet, `taken` of it being others'; at least its share.

        What is admitted in total follows the load up to `AdmissionRules.pressure`, and then comes near to
        1 without reaching it.
        """
        room = 1.0 - self._rules.pressure
        whole = 1.0 - room * math.exp((self._rules.pressure - load) / room) if room > 0 else 1.0
        entitled = min(math.fsum(self._shares[tier] for tier in demands), 1.0 - reserved)
        return divide(max(whole - taken, entitled), demands, self._shares)

    def _by_tenant(self, part: float, demands: Mapping[str, float]) -> dict[str, float]:
        """Chances by tenant: those that ask for more than a fair part of their class bear its excess."""
        asking = {name: demand for name, demand in demands.items() if demand > 0}
        parts = divide(part, asking, {name: self._weight(name) for name in asking})
        return {name: self._chance(parts[name], demand) for name, demand in asking.items()}

    def _chance(self, part: float, demand: float) -> float:
        """The fraction of `demand` that is too much for `part`, within limits."""
        return min(self._rules.max_refusal, max(0.0, 1.0 - part / demand))
