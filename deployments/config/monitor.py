"""The settings of the cluster-wide SLO monitor.

Owns their names and ranges; the defaults are those of the rules.
"""

from typing import Annotated

from pydantic import Field

from deployments.config.preemption import PreemptionConfig
from slo.files.strict_yaml import Section
from slo.monitor.settings import MonitorSettings
from slo.tiers import BACKGROUND, CLIENT_TIERS, PREMIUM, STANDARD

_MONITOR = MonitorSettings()
Target = Annotated[float, Field(gt=0, lt=1)]


class TargetsConfig(Section):
    """By tier, the fraction of requests that shall meet their objectives."""

    premium: Target = _MONITOR.targets[PREMIUM]
    standard: Target = _MONITOR.targets[STANDARD]
    background: Target = _MONITOR.targets[BACKGROUND]


class MonitorConfig(Section):
    """The cluster-wide SLO monitor: what it measures against, and what it may do."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        9465, description="Where it exports metrics to Prometheus; 0 for nowhere."
    )
    targets: TargetsConfig = TargetsConfig()
    window_s: Annotated[float, Field(ge=12, le=86_400)] = Field(
        _MONITOR.window_s, description="The long window; the short one is a twelfth of it."
    )
    shed: bool = Field(_MONITOR.steers, description="Shed and reserve when a tier misses its target.")
    correct: bool = Field(_MONITOR.corrects, description="Correct predictions by measured forward passes.")
    direct: bool = Field(
        _MONITOR.directs,
        description="Order running prefills to stop for more urgent requests.",
    )

    def settings(self, preemption: PreemptionConfig) -> MonitorSettings:
        """The same in the vocabulary of the decision rules."""
        return MonitorSettings(
            targets={tier: getattr(self.targets, tier) for tier in CLIENT_TIERS},
            window_s=self.window_s,
            steers=self.shed,
            corrects=self.correct,
            directs=self.direct,
            preemption=preemption.policy,
            margin=preemption.margin,
        )
