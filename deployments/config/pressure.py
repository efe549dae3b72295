"""The section `pressure`: what decode replicas do when KV memory or pace runs short."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from slo.decode.drop import droppable_tiers
from slo.files.strict_yaml import Section
from slo.tiers import Tier, TierSet


class PressureConfig(Section):
    """Who yields on a decode replica, and who gets on it first."""

    enabled: bool = Field(
        default=False,
        description="Memory is taken by tier and cost and given back in order, newcomers wait for the "
        "predicted peak, and TPOT objectives act; otherwise vLLM's own scheduler decides.",
    )
    swap_gib: Annotated[float, Field(ge=0, le=1024)] | None = Field(
        None,
        description="Host memory of a decode replica in which the KV of streams waits that lose theirs; by "
        "default a quarter of the KV cache and at most 8 on cuda, and none on cpu, where kv_cache_gib makes "
        "better use of it. What has no room there, or is computed sooner, is computed again.",
    )

    reprefill: bool = Field(
        default=True,
        description="The prefill tier computes the KV of streams again that lose it, where that costs less "
        "than computing it among other streams' tokens.",
    )
    drop_after_s: Annotated[float, Field(gt=0, le=86_400)] | None = Field(
        300.0,
        description="A stream without any objective, of a tier that has none and may be shed, ends with an "
        "error when it has waited for so long for memory that was taken from it, and instead of having it "
        "taken for a higher tier a third time; empty: never, for neither.",
    )

    def swap_bytes(self, accelerator: str) -> int | None:
        """The same in bytes; None for as much as the engine's memory suggests."""
        if not self.enabled:
            return 0
        if self.swap_gib is None:
            return 0 if accelerator == "cpu" else None
        return int(self.swap_gib * (1 << 30))

    def droppable(self, tiers: TierSet) -> frozenset[Tier]:
        """The tiers whose streams may be ended for lack of memory."""
        if not self.enabled or self.drop_after_s is None:
            return frozenset()
        return droppable_tiers(tiers)

    @model_validator(mode="after")
    def _all_of_it_is_of_pressure(self) -> Self:
        for key in self.model_fields_set - {"enabled"}:
            if getattr(self, key) and not self.enabled:
                raise ValueError(f"{key} goes with enabled: true")
        return self
