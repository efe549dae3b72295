"""The settings of preemption: whether and when a running prefill is stopped, and how often at most.

Owns their names and ranges; the defaults are those of the rules.
"""

import dataclasses
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from slo.files.strict_yaml import Positive, Section
from slo.preemption.types import (
    CPU_STOP_WITHIN_S,
    LAUNCH_AHEAD_S,
    PATIENCE,
    STOP_WITHIN_S,
    Limits,
    PreemptionMode,
    PreemptionPolicy,
    PreemptionRules,
)
from slo.queue.order import DEFAULT_ORDER, Aim, QueueOrder
from slo.tiers import Tier, TierSet

_RULES = PreemptionRules()
_LIMITS = Limits.default_for(PreemptionMode.RESUME)
_RECOMPUTE_LIMITS = Limits.default_for(PreemptionMode.RECOMPUTE)


class PreemptionLimitsConfig(Section):
    """How much preemption is allowed; past one of these a step runs to its end, whatever waits."""

    max_preemptions: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Stops of one request; by default "
        f"{_LIMITS.max_preemptions}, and {_RECOMPUTE_LIMITS.max_preemptions} with mode: recompute.",
    )
    max_suspended_mib: Annotated[int, Field(ge=0)] = Field(
        _LIMITS.max_suspended_bytes >> 20,
        description="Memory of their checkpoints beside KV blocks, MiB on each rank.",
    )


class PreemptionConfig(Section):
    """Whether and when a running prefill is preempted by a more urgent request."""

    mode: PreemptionMode = Field(
        _RULES.mode,
        description="A stopped prefill continues, starts again (recompute), or none is stopped.",
    )
    policy: PreemptionPolicy = Field(
        _RULES.policy,
        description="When a waiter that can be met takes over from one that can be met.",
    )
    margin: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        _RULES.margin,
        description="How much more urgent a waiter must be, or how far predictions are trusted.",
    )
    patience: Annotated[float, Field(ge=0, le=0.75)] | None = Field(
        None,
        description="A stop waits while the first token that it is for still comes within this part of its "
        f"objective; 0 for at once; by default {PATIENCE} on cuda and 0 on cpu.",
    )
    order: QueueOrder = Field(DEFAULT_ORDER, description="Which waiting prefill goes first.")
    aim: Aim = Field(
        Aim.REQUESTS, description="What feasible_set aims at: most requests on time, or each tier's target."
    )
    granularity: Literal["layer", "sublayer", "operator"] = Field(
        "operator",
        description="Where a forward pass can stop: before each layer, also before each MLP, or also within.",
    )
    compiled: bool = Field(
        default=False,
        description="Prefill runs compiled forward passes, which stop before and behind each attention only.",
    )
    launch_ahead_ms: Annotated[float, Field(gt=0, le=1000)] = Field(
        LAUNCH_AHEAD_S * 1e3, description="On an accelerator, work that may be launched ahead of it."
    )
    stop_within_ms: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Long prompts are cut into chunks that can stop within this; by default "
        f"{STOP_WITHIN_S * 1e3:.0f} on cuda and {CPU_STOP_WITHIN_S * 1e3:.0f} on cpu.",
    )
    join_tokens: Annotated[int, Field(ge=1)] = Field(
        2048, description="Prompts are prefilled together while they have no more tokens together."
    )
    vote_timeout_s: Positive = Field(
        20.0, description="A tensor-parallel rank that stays away from a vote for longer has failed."
    )
    limits: PreemptionLimitsConfig = PreemptionLimitsConfig()

    @field_validator("mode", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        """YAML reads a bare `off` as false."""
        return PreemptionMode.OFF if value is False else value

    @model_validator(mode="after")
    def _something_comes_of_it(self) -> Self:
        is_by_sets = self.policy is PreemptionPolicy.FEASIBLE_SET
        if self.compiled and self.mode is PreemptionMode.OFF:
            msg = (
                "compiled is how passes run that can be stopped; with mode: off vLLM runs them as it does by "
                "itself, so leave out one"
            )
            raise ValueError(msg)
        if self.aim is Aim.TARGETS and not is_by_sets and self.order is not QueueOrder.FEASIBLE_SET:
            msg = (
                f"aim: targets is feasible_set's; with order: {self.order} and policy: {self.policy} "
                "leave it out"
            )
            raise ValueError(msg)
        if self.patience and not is_by_sets:
            raise ValueError(f"patience is feasible_set's; with policy: {self.policy} leave it out")
        return self

    def stop_within_s(self, accelerator: str) -> float:
        """How long a stop may take."""
        if self.stop_within_ms is not None:
            return self.stop_within_ms / 1e3
        return CPU_STOP_WITHIN_S if accelerator == "cpu" else STOP_WITHIN_S

    def targets(self, tiers: TierSet) -> dict[Tier, float]:
        """What the queue aims at, by tier; empty when all requests are alike."""
        return dict(tiers.targets) if self.aim is Aim.TARGETS else {}

    def rules(self, accelerator: str) -> PreemptionRules:
        """The same in the vocabulary of the decision rules."""
        given = self.limits
        limits = dataclasses.replace(
            Limits.default_for(self.mode),
            max_suspended_bytes=given.max_suspended_mib << 20,
        )
        if given.max_preemptions is not None:
            limits = dataclasses.replace(limits, max_preemptions=given.max_preemptions)
        patience = self.patience
        if patience is None:
            patience = 0.0 if accelerator == "cpu" else PATIENCE
        return PreemptionRules(self.mode, self.policy, self.margin, limits, patience=patience)
