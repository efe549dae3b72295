"""The settings of the cluster-wide SLO monitor.

Owns their names and ranges; the defaults are those of the rules.
"""

import dataclasses
from typing import Annotated

from pydantic import Field

from deployments.config.preemption import PreemptionConfig
from slo.files.strict_yaml import Positive, Section
from slo.monitor.settings import MonitorSettings
from slo.monitor.shedding import SteeringRules
from slo.tiers import TierSet

_MONITOR = MonitorSettings()
_STEERING = _MONITOR.rules


class MonitorConfig(Section):
    """The cluster-wide SLO monitor: what it measures over, and what it may do."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        9465, description="Where it exports metrics to Prometheus; 0 for nowhere."
    )
    window_s: Annotated[float, Field(ge=12, le=86_400)] = Field(
        _MONITOR.window_s, description="The long window; the short one is a twelfth of it."
    )
    shed: bool = Field(_MONITOR.steers, description="Shed and reserve when a tier misses its target.")
    correct: bool = Field(_MONITOR.corrects, description="Correct predictions by measured forward passes.")
    direct: bool = Field(_MONITOR.directs, description="Order running prefills to stop for others.")
    quantile: Annotated[float, Field(gt=0, lt=1)] = Field(
        _MONITOR.quantile, description="Of measured over predicted times, that predictions aim at."
    )
    act_at_burn: Annotated[float, Field(gt=1, allow_inf_nan=False)] = Field(
        _STEERING.act_at_burn, description="The burn rate from which on a tier is at risk."
    )
    min_missed: Annotated[int, Field(ge=1)] = Field(
        _STEERING.min_missed, description="Misses in the short window below which it is not."
    )
    step: Annotated[float, Field(gt=0, le=1)] = Field(
        _STEERING.step, description="By how much a shed level changes at a time."
    )
    max_shed: Annotated[float, Field(ge=0, le=1)] = Field(
        _STEERING.max_shed, description="The highest shed level of a tier; that of the lowest tier is 1."
    )
    reserve_step: Annotated[float, Field(gt=0, le=1)] = _STEERING.reserve_step
    max_reserved: Annotated[float, Field(ge=0, le=1)] = _STEERING.max_reserved
    tighten_every_s: Positive = Field(
        _STEERING.tighten_every_s, description="Shortest time between two steps towards more shedding."
    )
    relax_every_s: Positive = Field(
        _STEERING.relax_every_s, description="Shortest time between any step and one towards less."
    )

    def settings(self, preemption: PreemptionConfig, tiers: TierSet) -> MonitorSettings:
        """The same in the vocabulary of the decision rules."""
        names = [field.name for field in dataclasses.fields(SteeringRules)]
        return MonitorSettings(
            tiers=tiers,
            window_s=self.window_s,
            rules=SteeringRules(**{name: getattr(self, name) for name in names}),
            steers=self.shed,
            corrects=self.correct,
            directs=self.direct,
            quantile=self.quantile,
            preemption=preemption.policy,
            margin=preemption.margin,
        )
