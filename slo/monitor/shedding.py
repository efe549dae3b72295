"""When the cluster sheds, whom, and how much of it is kept for premium.

Owns the rules that turn burn rates into the next policy. Does not measure (see `slo.monitor.attainment`) and
does not turn anybody away.

A tier is at risk when it burns through the misses that its target allows too fast, in a long and in a short
window (Site Reliability Workbook, chapter 5, "Multiwindow, Multi-Burn-Rate Alerts"): the long one says that
it matters, the short one that it goes on. It is calm when the short window's rate is down to what the target
allows. Between the two nothing is changed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from slo.tiers import BACKGROUND, PREMIUM, STANDARD, Tier

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slo.monitor.attainment import Burn
    from slo.monitor.policy import ClusterPolicy

ALLOWED: Final = 1.0
"""The burn rate at which a tier just keeps its target."""


class SteerReason(enum.StrEnum):
    """Why the policy is changed, or left as it is; the values label metrics."""

    PREMIUM_AT_RISK = "premium_at_risk"
    STANDARD_AT_RISK = "standard_at_risk"
    PREMIUM_CALM = "premium_calm"
    """Standard is let in again."""
    ALL_CALM = "all_calm"
    """Background is let in again, and the reservation given back."""
    NOTHING_TO_DO = "nothing_to_do"
    TOO_SOON = "too_soon"
    """After the last change, whose effect does not show yet."""
    UNDECIDED = "undecided"
    """Nobody is at risk, and not everybody is calm."""
    EXHAUSTED = "exhausted"
    """A tier is at risk, and everything that the rules allow is done."""


@dataclass(frozen=True, slots=True)
class SteeringRules:
    """How the policy is steered.

    Attributes:
        act_at_burn: The burn rate from which on a tier is at risk.
        min_missed: Misses in the short window below which it is not: one is no trend.
        step: By how much a shed level changes at a time.
        max_shed_standard: The highest shed level of standard; background's is 1.
        reserve_step: By how much the reservation changes at a time.
        max_reserved: The largest reservation.
        tighten_every_s: Least time between two steps towards more shedding.
        relax_every_s: Least time between any change and a step towards less.
    """

    act_at_burn: float = 2.0
    min_missed: int = 3
    step: float = 0.25
    max_shed_standard: float = 0.75
    reserve_step: float = 0.15
    max_reserved: float = 0.3
    tighten_every_s: float = 10.0
    relax_every_s: float = 30.0


@dataclass(frozen=True, slots=True)
class TierBurn:
    """A tier's burn rates."""

    long: Burn
    short: Burn

    def at_risk(self, rules: SteeringRules) -> bool:
        """Whether it misses too much, and still does."""
        return (
            self.short.missed >= rules.min_missed
            and min(self.long.rate, self.short.rate) >= rules.act_at_burn
        )

    @property
    def is_calm(self) -> bool:
        """Whether it misses no more than its target allows, of late."""
        return self.short.rate <= ALLOWED


@dataclass(frozen=True, slots=True)
class Steered:
    """The policy to follow from now on, and why it is that one."""

    policy: ClusterPolicy
    reason: SteerReason


def steer(
    policy: ClusterPolicy,
    burns: Mapping[Tier, TierBurn],
    since_change_s: float,
    rules: SteeringRules,
) -> Steered:
    """Take one step, or none.

    Premium at risk sheds background, and standard once background is shed altogether, and reserves more for
    premium each time. Standard at risk sheds background. What was shed last is let in first: standard as soon
    as premium is calm, background and the reservation when both are. Premium is never shed.

    Args:
        policy: What is followed now.
        burns: Of every tier.
        since_change_s: Seconds since these rules last changed something.
        rules: The rules.
    """
    changes, reason = _wanted(policy, burns, rules)
    if not changes:
        return Steered(policy, reason)
    tightens = reason in {SteerReason.PREMIUM_AT_RISK, SteerReason.STANDARD_AT_RISK}
    if since_change_s < (rules.tighten_every_s if tightens else rules.relax_every_s):
        return Steered(policy, SteerReason.TOO_SOON)
    return Steered(policy.revised(**changes), reason)


def _wanted(
    policy: ClusterPolicy, burns: Mapping[Tier, TierBurn], rules: SteeringRules
) -> tuple[dict[str, Any], SteerReason]:
    """What to change in the policy, if time allows, and why; nothing is an empty mapping."""
    premium, standard = burns[PREMIUM], burns[STANDARD]
    if premium.at_risk(rules):
        changes = _more_for_premium(policy, rules)
        return changes, SteerReason.PREMIUM_AT_RISK if changes else SteerReason.EXHAUSTED
    if premium.is_calm and policy.shed_level(STANDARD) > 0:
        return {"shed": _shifted(policy, STANDARD, -rules.step)}, SteerReason.PREMIUM_CALM
    if standard.at_risk(rules):
        changes = _more_of(policy, BACKGROUND, rules.step, 1.0)
        return changes, SteerReason.STANDARD_AT_RISK if changes else SteerReason.EXHAUSTED
    if premium.is_calm and standard.is_calm:
        changes = _less_of_all(policy, rules)
        return changes, SteerReason.ALL_CALM if changes else SteerReason.NOTHING_TO_DO
    return {}, SteerReason.UNDECIDED


def _more_for_premium(policy: ClusterPolicy, rules: SteeringRules) -> dict[str, Any]:
    changes = _more_of(policy, BACKGROUND, rules.step, 1.0) or _more_of(
        policy, STANDARD, rules.step, rules.max_shed_standard
    )
    if policy.reserved < rules.max_reserved:
        changes["reserved"] = _tidy(min(rules.max_reserved, policy.reserved + rules.reserve_step))
    return changes


def _more_of(policy: ClusterPolicy, tier: Tier, step: float, most: float) -> dict[str, Any]:
    if policy.shed_level(tier) >= most:
        return {}
    return {"shed": _shifted(policy, tier, step, most)}


def _less_of_all(policy: ClusterPolicy, rules: SteeringRules) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if policy.shed_level(BACKGROUND) > 0:
        changes["shed"] = _shifted(policy, BACKGROUND, -rules.step)
    if policy.reserved > 0:
        changes["reserved"] = _tidy(max(0.0, policy.reserved - rules.reserve_step))
    return changes


def _shifted(policy: ClusterPolicy, tier: Tier, by: float, most: float = 1.0) -> dict[Tier, float]:
    level = _tidy(min(most, max(0.0, policy.shed_level(tier) + by)))
    return {**policy.shed, tier: level}


def _tidy(fraction: float) -> float:
    """Without the dust of repeated additions, so that what goes up comes down to 0."""
    return round(fraction, 6)
