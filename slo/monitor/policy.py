"""What the cluster-wide monitor asks of routers and replicas, as one versioned value.

Owns the policy's fields, their ranges and which of two policies holds. `slo.monitor.shedding` decides on a
policy; the servers apply it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from slo.preemption.types import PreemptionPolicy
from slo.tiers import Tier

MAX_VERSION: Final = 1 << 40
"""One more each second is fewer in thirty thousand years; a higher one could not be outdone."""

RELAX_EVERY_S: Final = 30.0
"""No shed level falls sooner than so long after the last change."""


@dataclass(frozen=True, slots=True)
class ClusterPolicy:
    """What all routers and replicas follow.

    Attributes:
        version: Only grows. 0 holds before a monitor has been heard: all as configured.
        shed: By tier, the fraction to turn away of what it asks for above its share, 0 to 1; a tier that is
            not there has 0.
        reserved: Fraction of the prefill tier's time to keep free for the top tier, 0 to 1.
        preemption: When a running prefill is preempted; None for each replica's configured policy.
        margin: The margin of that policy; None for each replica's configured one.

    Raises:
        ValueError: when a value is out of its range.
    """

    version: int = 0
    shed: Mapping[Tier, float] = field(default_factory=dict)
    reserved: float = 0.0
    preemption: PreemptionPolicy | None = None
    margin: float | None = None

    def __post_init__(self) -> None:  # noqa: D105 - see Raises
        if not 0 <= self.version <= MAX_VERSION:
            raise ValueError(f"a version is at least 0 and at most {MAX_VERSION}, not {self.version}")
        if not all(0.0 <= fraction <= 1.0 for fraction in (self.reserved, *self.shed.values())):
            raise ValueError("shed levels and the reservation are fractions from 0 to 1")
        if self.margin is not None and not 1.0 <= self.margin < math.inf:
            raise ValueError(f"a preemption margin is at least 1 and finite, not {self.margin}")

    def shed_level(self, tier: Tier) -> float:
        """The fraction to turn away of what a tier asks for above its share."""
        return self.shed.get(tier, 0.0)

    def revised(self, **changes: Any) -> ClusterPolicy:
        """The next version with `changes`; this very policy when they change nothing."""
        changed = replace(self, **changes)
        if all(getattr(changed, part.name) == getattr(self, part.name) for part in fields(self)):
            return self
        return replace(changed, version=self.version + 1)

    def raised_to(self, version: int) -> ClusterPolicy:
        """The same content under a higher version, if that is higher."""
        return replace(self, version=max(version, self.version))


UNSTEERED: Final = ClusterPolicy()
"""Holds while no monitor has been heard."""


def newer_of(known: ClusterPolicy, heard: ClusterPolicy | None) -> ClusterPolicy:
    """The policy that holds for whoever knows one and hears of another: the higher version."""
    return heard if heard is not None and heard.version > known.version else known
