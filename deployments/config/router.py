"""How requests are placed: the settings of the router."""

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from deployments.config.degraded import DegradedConfig
from router.fleet.view import SILENT_AFTER_S, RouterLimits
from router.placement.registry import PlacementName
from slo.files.strict_yaml import Positive, Section
from telemetry.reporting.reporter import HEARTBEAT_S


class RouterSection(Section):
    """How requests are placed."""

    placement: PlacementName = "least_harm"
    timeout_ms: Positive | None = Field(
        None,
        description="Whoever waits longer for the router's word places the request without it; by default "
        "50, and 500 on cpu, where the router shares its cores with engines.",
    )
    stale_after_s: Positive = Field(10.0, description="A replica that is silent for longer is not used.")
    silent_after_s: Positive = Field(
        SILENT_AFTER_S,
        description="One that is silent for longer is used only if all are; they report every 0.5 s.",
    )
    max_replacements: Annotated[int, Field(ge=0, le=10)] = Field(
        2, description="How often a request whose prefill replica is lost is placed again."
    )
    stretch: Annotated[float, Field(ge=1)] = Field(
        2.0,
        description=(
            "A tier's own objective is not held against a request below this multiple of what the request "
            "takes on an idle replica; objectives that the client names are held as they are."
        ),
    )

    @field_validator("stale_after_s", "silent_after_s")
    @classmethod
    def _longer_than_between_reports(cls, value: float) -> float:
        if value < (least_s := 2 * HEARTBEAT_S):
            msg = (
                f"replicas report every {HEARTBEAT_S:g} s and would not be used between two reports; "
                f"give at least {least_s:g}, or leave it out"
            )
            raise ValueError(msg)
        return value

    @model_validator(mode="after")
    def _silent_before_stale(self) -> Self:
        if "silent_after_s" in self.model_fields_set and self.silent_after_s > self.stale_after_s:
            msg = (
                f"silent_after_s ({self.silent_after_s:g}) is more than stale_after_s "
                f"({self.stale_after_s:g}), after which a replica is not used; lower it, or leave it out"
            )
            raise ValueError(msg)
        return self

    def limits(self, degraded: DegradedConfig) -> RouterLimits:
        """The same in the router's vocabulary."""
        return RouterLimits(
            stale_after_s=self.stale_after_s,
            silent_after_s=self.silent_after_s,
            stretch=self.stretch,
            local_prefill=degraded.local_prefill,
            max_local_prefills=degraded.max_prompts,
        )
