"""What the monitor works with."""

from __future__ import annotations

from dataclasses import dataclass, field

from slo.monitor.shedding import SteeringRules
from slo.preemption.types import PreemptionPolicy
from slo.tiers import DEFAULT_TIERS, Tier, TierSet


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    """What the monitor works with.

    Attributes:
        models: The names of the model that is served, and of its adapters.
        window_s: The long window.
        steers: Whether it sheds and reserves at all.
        corrects: Whether it corrects predictors, and the margin with them.
        directs: Whether it orders running prefills to stop for others.
        preemption: The configured policy of preemption.
        exported_at: Host and port where metrics are exported, port 0 for nowhere; None leaves it as it is.
    """

    tiers: TierSet = DEFAULT_TIERS
    window_s: float = 300.0
    rules: SteeringRules = field(default_factory=SteeringRules)
    steers: bool = True
    corrects: bool = True
    directs: bool = True
    preemption: PreemptionPolicy = PreemptionPolicy.FEASIBLE_SET
    margin: float = 3.0
    models: tuple[str, ...] = ()
    exported_at: tuple[str, int] | None = None

    @property
    def targets(self) -> dict[Tier, float]:
        """By tier, the fraction of requests that shall meet their objectives."""
        return self.tiers.targets
