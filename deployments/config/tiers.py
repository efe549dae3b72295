"""The section `tiers`: what each tier is promised, and what a request of it is worth."""

from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import Field, RootModel, model_validator

from slo.files.strict_yaml import ObjectiveMs, Positive, TierName
from slo.files.tiers import TierSection, tier_set
from slo.tiers import TierPolicy, TierSet


class TierConfig(TierSection):
    """What a tier is promised. `ttft_ms` and `ttft_scale` exclude each other; neither means no deadline."""

    ttft_ms: ObjectiveMs | None = Field(None, description="Time to first token, milliseconds.")
    ttft_scale: Positive | None = Field(
        None, description="Instead: a multiple of the request's own predicted prefill time, for example 1.3."
    )
    e2e_ms: ObjectiveMs | None = Field(None, description="Time to the end of the answer, milliseconds.")
    target: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.9, description="Fraction of its requests that shall meet their objectives."
    )
    service_tiers: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = Field(
        (), description="Values of OpenAI's service_tier that ask for it."
    )

    @model_validator(mode="after")
    def _one_ttft_objective(self) -> Self:
        if self.ttft_ms is not None and self.ttft_scale is not None:
            msg = "give ttft_ms or ttft_scale, not both"
            raise ValueError(msg)
        return self

    def over(self, policy: TierPolicy) -> TierPolicy:
        """`policy` with what is given here."""
        names = self.model_fields_set & {"target", "service_tiers"}
        changes: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.ttft_scale is not None:
            changes |= {"ttft_s": None, "ttft_scale": self.ttft_scale}
        elif "ttft_ms" in self.model_fields_set:
            changes["ttft_s"] = None if self.ttft_ms is None else self.ttft_ms / 1e3
        if "e2e_ms" in self.model_fields_set:
            changes["e2e_s"] = None if self.e2e_ms is None else self.e2e_ms / 1e3
        return replace(super().over(policy), **changes)


class TiersConfig(RootModel[dict[TierName, TierConfig]]):
    """The tiers by name."""

    root: dict[TierName, TierConfig] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        self.tier_set()
        return self

    def tier_set(self) -> TierSet:
        """The same in the vocabulary of the decision rules."""
        return tier_set(self.root)
