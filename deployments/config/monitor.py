"""The settings of the cluster-wide SLO monitor.

Owns their names and ranges; the defaults are those of the rules.
"""

from typing import Annotated, Literal

from pydantic import Field

from deployments.config.preemption import PreemptionConfig
from slo.files.strict_yaml import Address, Section
from slo.monitor.settings import MonitorSettings
from slo.tiers import TierSet

_MONITOR = MonitorSettings()


class MonitorConfig(Section):
    """The cluster-wide SLO monitor: what it measures over, and what it may do."""

    enabled: bool = True
    node: Literal["head", "any"] = Field(
        "head", description="Where it runs: on Ray's head node, or wherever Ray puts it."
    )
    host: Address = Field("127.0.0.1", description="Address on which it exports; 0.0.0.0 for other machines.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        9465, description="Where it exports metrics to Prometheus; 0 for nowhere."
    )
    window_s: Annotated[float, Field(ge=12, le=86_400)] = Field(
        _MONITOR.window_s, description="The long window; the short one is a twelfth of it."
    )
    shed: bool = Field(_MONITOR.steers, description="Shed and reserve when a tier misses its target.")
    correct: bool = Field(_MONITOR.corrects, description="Correct predictions by measured forward passes.")
    direct: bool = Field(
        _MONITOR.directs,
        description="Order running prefills to stop for more urgent requests.",
    )

    def settings(
        self, preemption: PreemptionConfig, tiers: TierSet, models: tuple[str, ...] = ()
    ) -> MonitorSettings:
        """The same in the vocabulary of the decision rules."""
        return MonitorSettings(
            tiers=tiers,
            window_s=self.window_s,
            steers=self.shed,
            corrects=self.correct,
            directs=self.direct,
            preemption=preemption.policy,
            margin=preemption.margin,
            models=models,
            exported_at=(self.host, self.port),
        )
