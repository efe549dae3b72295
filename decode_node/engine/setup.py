"""What the engine of a decode replica is told at its start: through vLLM's `additional_config`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from slo.tiers import DEFAULT_TIERS, Tier, TierPolicy, TierSet

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_KEY: Final = "slackserve"


def weights_of(tiers: TierSet) -> dict[str, float]:
    """The weight by the name of the tier, the most valuable first."""
    return {tier: policy.weight for tier, policy in tiers.clients.items()}


@dataclass(frozen=True, slots=True)
class DecodeSetup:
    """Settings inside a decode engine.

    Attributes:
        weights: Weight of each tier by name, the most valuable first.
        drop_after_s: A stream that may be dropped is when it has waited for longer for memory that was taken
            from it; None for no limit.
    """

    weights: dict[str, float] = field(default_factory=lambda: weights_of(DEFAULT_TIERS))
    drop_after_s: float | None = None

    def tiers(self) -> TierSet:
        """The tiers, as far as rank and weight go."""
        policies = {
            Tier(name): TierPolicy(None, None, sheddable=False, weight=weight)
            for name, weight in self.weights.items()
        }
        return TierSet(policies, default=next(iter(policies)))

    def encode(self) -> dict[str, Any]:
        """The `additional_config` engine argument."""
        return {_KEY: asdict(self)}

    @staticmethod
    def of(vllm_config: VllmConfig) -> DecodeSetup:
        """What was encoded; the defaults when nothing was."""
        return msgspec.convert((vllm_config.additional_config or {}).get(_KEY, {}), DecodeSetup)
