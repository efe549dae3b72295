"""Service tiers: their names and order, and what a deployment promises each of them.

Owns what a tier is, what a set of tiers may hold, and the default set. No rule names a tier: rules ask the
set for ranks, for the top tier and for policies. Does not resolve a request's own objective (see
`slo.objectives`).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NewType

Tier = NewType("Tier", str)
"""The name of a tier, as clients and metrics see it."""

SYSTEM: Final = Tier("system")
"""What the server does for itself, probes and warm-up; no client can ask for it."""
MAX_TIERS: Final = 8
"""Tiers label metrics."""
TIER_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,31}", re.ASCII)
RESERVED_NAMES: Final = frozenset({SYSTEM, "none"})
"""Label values of metrics that mean no client's tier."""
DEFAULT_ALIASES: Final = ("auto", "default")
"""Values of OpenAI's `service_tier` that mean the default tier in every set."""
_ROUNDING: Final = 1e-9


class ObjectiveName(enum.StrEnum):
    """What a request may be promised; the values label metrics."""

    TTFT = "ttft"
    TPOT = "tpot"
    E2E = "e2e"


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """What a deployment promises a tier.

    Attributes:
        ttft_s: Time to first token, seconds; None promises nothing.
        ttft_scale: Instead of `ttft_s`, a multiple of the request's own predicted prefill time.
        tpot_s: Time per output token after the first, seconds; None promises nothing.
        e2e_s: Time to the end of the answer, seconds; None promises nothing.
        sheddable: Whether a request that cannot meet its deadline may be refused with 429.
        weight: Value of one request on time, in any unit shared by the tiers.
        share: Fraction of prefill time that its requests get, if they want it, however much the others want.
            What is within it, and within as large a part of decode, the monitor never sheds.
        target: The fraction of its requests that shall meet their objectives.
        service_tiers: Values of OpenAI's `service_tier` that ask for it.

    Raises:
        ValueError: if both `ttft_s` and `ttft_scale` are given, or a number is out of its range.
    """

    ttft_s: float | None
    tpot_s: float | None
    sheddable: bool
    weight: float
    ttft_scale: float | None = None
    share: float = 0.0
    target: float = 0.9
    service_tiers: tuple[str, ...] = ()
    e2e_s: float | None = None

    def __post_init__(self) -> None:  # noqa: D105 - see Raises
        if self.ttft_s is not None and self.ttft_scale is not None:
            raise ValueError("a tier has either ttft_s or ttft_scale, not both")
        if not 0.0 <= self.share <= 1.0:
            raise ValueError(f"a tier's share is a fraction, not {self.share}")
        if not 0.0 < self.target < 1.0:
            raise ValueError(f"a tier's target is above 0 and below 1, not {self.target}")
        if not self.weight > 0.0:
            raise ValueError(f"a tier's weight is above 0, not {self.weight}")

    @property
    def has_deadline(self) -> bool:
        """Whether its first tokens are due: an end-to-end objective is a deadline of theirs, too."""
        return self.ttft_scale is not None or self.due_s is not None

    @property
    def due_s(self) -> float | None:
        """Seconds within which its first tokens are due at the latest; None where that is no fixed time."""
        return min((each for each in (self.ttft_s, self.e2e_s) if each is not None), default=None)


@dataclass(frozen=True, slots=True)
class TierSet(Mapping[Tier, TierPolicy]):
    """All tiers of a deployment; as a mapping it has the policies of the clients' tiers and of `SYSTEM`.

    Ranks count from 0, the least valuable tier, without gaps.

    Attributes:
        clients: The tiers that a request can ask for, the most valuable first.
        default: The tier of a request that asks for none.

    Raises:
        ValueError: when there are no tiers or too many, a name or an alias is not allowed or stands twice,
            the default is none of them, or their shares exceed the whole.
    """

    clients: Mapping[Tier, TierPolicy]
    default: Tier
    names: tuple[Tier, ...] = field(init=False)
    _policies: Mapping[Tier, TierPolicy] = field(init=False, repr=False, compare=False)
    _ranks: Mapping[Tier, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:  # noqa: D105 - see Raises
        names = tuple(self.clients)
        if not 1 <= len(names) <= MAX_TIERS:
            raise ValueError(f"there are 1 to {MAX_TIERS} tiers, not {len(names)}")
        for name in names:
            check_tier_name(name)
        if self.default not in names:
            raise ValueError(f"the default tier {self.default!r} is none of {', '.join(names)}")
        _check_aliases(self.clients)
        total = sum(policy.share for policy in self.clients.values())
        if total > 1 + _ROUNDING:
            raise ValueError(f"the shares of all tiers together are at most 1, not {total:g}")
        lowest = min(policy.weight for policy in self.clients.values())
        system = TierPolicy(ttft_s=None, tpot_s=None, sheddable=False, weight=lowest)
        ranks = {name: rank for rank, name in enumerate(reversed(names))}
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "_policies", {**self.clients, SYSTEM: system})
        object.__setattr__(self, "_ranks", ranks)

    def __getitem__(self, tier: Tier) -> TierPolicy:
        """What a tier is promised."""
        return self._policies[tier]

    def __iter__(self) -> Iterator[Tier]:
        """The clients' tiers, the most valuable first, then `SYSTEM`."""
        return iter(self._policies)

    def __len__(self) -> int:
        """How many there are, with `SYSTEM`."""
        return len(self._policies)

    @property
    def top(self) -> Tier:
        """The most valuable tier: it is never overtaken, shed or refused for lack of capacity."""
        return self.names[0]

    @property
    def lowest(self) -> Tier:
        """The least valuable tier."""
        return self.names[-1]

    @property
    def top_rank(self) -> int:
        """The rank of the top tier."""
        return len(self.names) - 1

    @property
    def sheddable(self) -> tuple[Tier, ...]:
        """The tiers whose requests may be refused for lack of capacity, the least valuable first."""
        return tuple(tier for tier in reversed(self.names[1:]) if self.clients[tier].sheddable)

    @property
    def targets(self) -> dict[Tier, float]:
        """The fraction of each client tier's requests that shall meet their objectives."""
        return {tier: policy.target for tier, policy in self.clients.items()}

    @property
    def weights(self) -> dict[Tier, float]:
        """The value of a request on time, by tier, `SYSTEM` included."""
        return {tier: policy.weight for tier, policy in self.items()}

    def rank(self, tier: Tier) -> int:
        """Position in the order of value, 0 for the lowest.

        `SYSTEM` ranks with the lowest, and so does a name that is not in the set: while a deployment changes
        its tiers, some of its processes still use the old ones.
        """
        return self._ranks.get(tier, 0)

    def service_tiers(self) -> dict[str, Tier]:
        """The tier by each value of `service_tier` that asks for one."""
        named = {alias: tier for tier, policy in self.clients.items() for alias in policy.service_tiers}
        return dict.fromkeys(DEFAULT_ALIASES, self.default) | named

    def revised(self, changes: Mapping[Tier, TierPolicy]) -> TierSet:
        """The same tiers, some with another policy.

        Raises:
            KeyError: for a tier that is not among them.
        """
        if unknown := changes.keys() - self.clients.keys():
            raise KeyError(min(unknown))
        return replace(self, clients={**self.clients, **changes})


def check_tier_name(name: str) -> None:
    """Check that clients may use a tier of this name.

    Raises:
        ValueError: when they may not.
    """
    if name in RESERVED_NAMES:
        raise ValueError(f"{name!r} cannot be a client's tier: the server uses the name itself")
    if not TIER_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a tier's name: a lower-case letter, then up to 31 of a-z, 0-9, '_' and '-'"
        )


def _check_aliases(clients: Mapping[Tier, TierPolicy]) -> None:
    owners: dict[str, Tier] = {}
    for tier, policy in clients.items():
        for alias in policy.service_tiers:
            if alias in DEFAULT_ALIASES:
                raise ValueError(f"service_tier {alias!r} always asks for the default tier, not for {tier!r}")
            if owners.setdefault(alias, tier) != tier:
                raise ValueError(f"service_tier {alias!r} asks for both {owners[alias]!r} and {tier!r}")


def weight_of(weights: Mapping[Tier, float], tier: Tier) -> float:
    """A tier's weight; the least for one that only another version of the configuration has."""
    known = weights.get(tier)
    return min(weights.values()) if known is None else known


PREMIUM: Final = Tier("premium")
STANDARD: Final = Tier("standard")
BACKGROUND: Final = Tier("background")

DEFAULT_TIERS: Final = TierSet(
    {
        PREMIUM: TierPolicy(
            ttft_s=0.200,
            tpot_s=0.030,
            sheddable=False,
            weight=4.0,
            share=0.50,
            target=0.99,
            service_tiers=("priority",),
        ),
        STANDARD: TierPolicy(ttft_s=0.500, tpot_s=0.080, sheddable=True, weight=2.0, share=0.35, target=0.95),
        BACKGROUND: TierPolicy(
            ttft_s=None,
            tpot_s=None,
            sheddable=True,
            weight=1.0,
            share=0.15,
            target=0.90,
            service_tiers=("flex",),
        ),
    },
    default=STANDARD,
)
"""The tiers of a deployment that configures none of its own."""
