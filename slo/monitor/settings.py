"""What the monitor works with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from slo.monitor.shedding import SteeringRules
from slo.predict.prediction_error import (
    QUANTILE,
)
from slo.preemption.types import PreemptionPolicy
from slo.tiers import BACKGROUND, PREMIUM, STANDARD, Tier

if TYPE_CHECKING:
    from collections.abc import Mapping


DEFAULT_TARGETS: Final = {PREMIUM: 0.99, STANDARD: 0.95, BACKGROUND: 0.9}


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    """What the monitor works with.

    Attributes:
        targets: By tier, the fraction of requests that shall meet their objectives, below 1.
        window_s: The long window.
        rules: How the policy is steered.
        steers: Whether it sheds and reserves at all.
        corrects: Whether it corrects predictors, and the margin with them.
        directs: Whether it orders running prefills to make way.
        quantile: Of the residuals, that corrections aim at.
        preemption: The configured policy of preemption.
        margin: The configured margin.
    """

    targets: Mapping[Tier, float] = field(default_factory=lambda: dict(DEFAULT_TARGETS))
    window_s: float = 300.0
    rules: SteeringRules = field(default_factory=SteeringRules)
    steers: bool = True
    corrects: bool = True
    directs: bool = True
    quantile: float = QUANTILE
    preemption: PreemptionPolicy = PreemptionPolicy.FEASIBLE_SET
    margin: float = 3.0
