"""Placement policies by the names that the configuration uses."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from router.least_harm import LeastHarm
from router.placement import (
    LeastOutstandingTokens,
    LeastSlackLoss,
    PowerOfTwoChoices,
    PrefixAffinity,
    RoundRobin,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from router.placement import PlacementPolicy

PlacementName: TypeAlias = Literal[
    "least_harm",
    "least_slack_loss",
    "round_robin",
    "least_outstanding_tokens",
    "power_of_two_choices",
    "prefix_affinity",
]
SEED: Final = 1
"""Of the policies that draw; a run can be repeated."""

POLICIES: Final[Mapping[str, Callable[[], PlacementPolicy]]] = {
    "least_harm": LeastHarm,
    "least_slack_loss": LeastSlackLoss,
    "round_robin": RoundRobin,
    "least_outstanding_tokens": LeastOutstandingTokens,
    "power_of_two_choices": lambda: PowerOfTwoChoices(random.Random(SEED)),  # noqa: S311 - reproducible
    "prefix_affinity": PrefixAffinity,
}
"""Makes a policy with a state of its own."""
