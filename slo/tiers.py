"""Service tiers and the objectives that a deployment gives them.

Owns the names of the tiers, their order, and the policy values attached to each. Does not resolve a
request's own objective (see `slo.objectives`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NewType

if TYPE_CHECKING:
    from collections.abc import Mapping


Tier = NewType("Tier", str)
"""The name of a tier, as clients and metrics see it."""

PREMIUM: Final = Tier("premium")
STANDARD: Final = Tier("standard")
BACKGROUND: Final = Tier("background")
SYSTEM: Final = Tier("system")
"""What the server does for itself, probes and warm-up; no client can ask for it."""

_RANK: Final[Mapping[Tier, int]] = {SYSTEM: 0, BACKGROUND: 0, STANDARD: 1, PREMIUM: 2}
CLIENT_TIERS: Final = (PREMIUM, STANDARD, BACKGROUND)
"""The tiers that a request can ask for, the most valuable first."""


def rank_of(tier: Tier) -> int:
    """Position in the order of value: a larger rank is worth more."""
    return _RANK[tier]


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """What a deployment promises a tier.

    Attributes:
        ttft_s: Time to first token, seconds; None promises nothing.
        ttft_scale: Instead of `ttft_s`, a multiple of the request's own predicted prefill time.
        tpot_s: Time per output token after the first, seconds; None promises nothing.
        sheddable: Whether a request that cannot meet its deadline may be refused with 429.
        weight: Worth of one request on time, in any unit shared by the tiers.
        share: Fraction of prefill time that its requests get, if they want it, however much the others want.

    Raises:
        ValueError: if both `ttft_s` and `ttft_scale` are given, or `share` is not a fraction.
    """

    ttft_s: float | None
    tpot_s: float | None
    sheddable: bool
    weight: float
    ttft_scale: float | None = None
    share: float = 0.0

    def __post_init__(self) -> None:  # noqa: D105 - see Raises
        if self.ttft_s is not None and self.ttft_scale is not None:
            msg = "a tier has either ttft_s or ttft_scale, not both"
            raise ValueError(msg)
        if not 0.0 <= self.share <= 1.0:
            raise ValueError(f"a tier's share is a fraction, not {self.share}")


DEFAULT_TIER_POLICIES: Final[Mapping[Tier, TierPolicy]] = {
    PREMIUM: TierPolicy(ttft_s=0.200, tpot_s=0.030, sheddable=False, weight=4.0, share=0.50),
    STANDARD: TierPolicy(ttft_s=0.500, tpot_s=0.080, sheddable=True, weight=2.0, share=0.35),
    BACKGROUND: TierPolicy(ttft_s=None, tpot_s=None, sheddable=True, weight=1.0, share=0.15),
    SYSTEM: TierPolicy(ttft_s=None, tpot_s=None, sheddable=False, weight=1.0),
}
