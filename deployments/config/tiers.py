"""The settings of the tiers: what each is promised, and what it is worth.

Owns their names and limits; the defaults are those of the rules.
"""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from slo.files.strict_yaml import ObjectiveMs, Positive, Section
from slo.tiers import (
    BACKGROUND,
    CLIENT_TIERS,
    DEFAULT_TIER_POLICIES,
    PREMIUM,
    STANDARD,
    SYSTEM,
    Tier,
    TierPolicy,
)


class TierConfig(Section):
    """What a tier is promised. `ttft_ms` and `ttft_scale` exclude each other; neither means no deadline."""

    ttft_ms: ObjectiveMs | None = Field(None, description="Time to first token, milliseconds.")
    ttft_scale: Positive | None = Field(
        None, description="Instead: a multiple of the request's own predicted prefill time, for example 1.3."
    )
    tpot_ms: ObjectiveMs | None = Field(None, description="Time per output token, milliseconds.")
    sheddable: bool = Field(default=True, description="May be refused when its deadline cannot be met.")
    weight: Positive = Field(1.0, description="Worth of one request on time, relative to other tiers.")
    share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Fraction of prefill time that its requests get when they want it."
    )

    @model_validator(mode="after")
    def _one_ttft_objective(self) -> Self:
        if self.ttft_ms is not None and self.ttft_scale is not None:
            msg = "give ttft_ms or ttft_scale, not both"
            raise ValueError(msg)
        return self

    def policy(self) -> TierPolicy:
        """The same in the vocabulary of the decision rules, seconds."""
        return TierPolicy(
            ttft_s=None if self.ttft_ms is None else self.ttft_ms / 1e3,
            ttft_scale=self.ttft_scale,
            tpot_s=None if self.tpot_ms is None else self.tpot_ms / 1e3,
            sheddable=self.sheddable,
            weight=self.weight,
            share=self.share,
        )


def _default_tier(tier: Tier) -> TierConfig:
    policy = DEFAULT_TIER_POLICIES[tier]
    return TierConfig(
        ttft_ms=None if policy.ttft_s is None else policy.ttft_s * 1e3,
        tpot_ms=None if policy.tpot_s is None else policy.tpot_s * 1e3,
        sheddable=policy.sheddable,
        weight=policy.weight,
        share=policy.share,
    )


def _over_defaults(name: str, given: Any) -> Any:
    if not isinstance(given, dict) or name not in CLIENT_TIERS:
        return given
    defaults = _default_tier(Tier(name)).model_dump()
    if given.get("ttft_scale") is not None:
        defaults.pop("ttft_ms")
    return {**defaults, **given}


class TiersConfig(Section):
    """The three tiers that clients can ask for."""

    premium: TierConfig = Field(default_factory=lambda: _default_tier(PREMIUM))
    standard: TierConfig = Field(default_factory=lambda: _default_tier(STANDARD))
    background: TierConfig = Field(default_factory=lambda: _default_tier(BACKGROUND))

    @model_validator(mode="before")
    @classmethod
    def _keep_what_is_not_given(cls, values: Any) -> Any:
        """A tier that is given in part keeps its defaults for the rest."""
        if not isinstance(values, dict):
            return values
        return {name: _over_defaults(name, given) for name, given in values.items()}

    @model_validator(mode="after")
    def _shares_of_one(self) -> Self:
        total = self.premium.share + self.standard.share + self.background.share
        if total > 1 + 1e-9:
            msg = f"the shares of all tiers together are at most 1, not {total:g}"
            raise ValueError(msg)
        return self

    def policies(self) -> dict[Tier, TierPolicy]:
        """Policies by tier."""
        system = DEFAULT_TIER_POLICIES[SYSTEM]
        return {tier: getattr(self, tier).policy() for tier in CLIENT_TIERS} | {SYSTEM: system}
