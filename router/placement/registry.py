"""Placement policies by the names that the configuration uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, TypeAlias

from router.placement.least_harm import LeastHarm
from router.placement.policies import (
    Draw,
    LeastOutstandingTokens,
    PlacementPolicy,
    PowerOfTwoChoices,
    PrefixAffinity,
    RoundRobin,
)

PlacementName: TypeAlias = Literal[
    "least_harm",
    "round_robin",
    "least_outstanding_tokens",
    "power_of_two_choices",
    "prefix_affinity",
]
POLICIES: Final[Mapping[str, Callable[[Draw], PlacementPolicy]]] = {
    "least_harm": lambda _: LeastHarm(),
    "round_robin": lambda _: RoundRobin(),
    "least_outstanding_tokens": lambda _: LeastOutstandingTokens(),
    "power_of_two_choices": PowerOfTwoChoices,
    "prefix_affinity": lambda _: PrefixAffinity(),
}
"""Makes a policy with a state of its own, given what draws for it."""
