"""When the cluster sheds, which tiers, and how much of its time is reserved for the top tier.

Owns the rules that turn burn rates into the next policy. Does not measure (see `slo.monitor.attainment`) and
does not turn anybody away.

A tier is at risk when it burns through the misses that its target allows too fast, in a long and in a short
window (Site Reliability Workbook, chapter 5, "Multiwindow, Multi-Burn-Rate Alerts"): the long one says that
it matters, the short one that it goes on. It is calm when the short window's rate is down to what the target
allows. Between the two nothing is changed. A tier may miss its target without any load, as by requests that
fail: then nobody is shed for it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from slo.autoscaling.need import FleetLoad
from slo.monitor.attainment import Burn
from slo.monitor.easing import UNTRIED, Easing, EasingRules
from slo.monitor.policy import RELAX_EVERY_S, ClusterPolicy
from slo.tiers import Tier, TierSet

ALLOWED: Final = 1.0
"""The burn rate at which a tier just keeps its target."""


class SteerReason(enum.StrEnum):
    """Why the policy is changed, or left as it is; the values label metrics."""

    TOP_TIER_AT_RISK = "top_tier_at_risk"
    LOWER_TIER_AT_RISK = "lower_tier_at_risk"
    """A tier between the top and the lowest one."""
    HIGHER_TIERS_CALM = "higher_tiers_calm"
    """More of a tier above the lowest one is admitted again."""
    ALL_CALM = "all_calm"
    """More of the lowest tier is admitted again, and the reservation shrinks."""
    NOTHING_TO_DO = "nothing_to_do"
    TOO_SOON = "too_soon"
    """After the last change, whose effect does not show yet."""
    UNDECIDED = "undecided"
    """No tier is at risk, and not every tier is calm."""
    NOT_FOR_LOAD = "not_for_load"
    """A tier is at risk, and the fleet is not known to be loaded: to shed others might mend nothing."""
    EXHAUSTED = "exhausted"
    """A tier is at risk, and everything that the rules allow is done."""


_TIGHTENS: Final = frozenset({SteerReason.TOP_TIER_AT_RISK, SteerReason.LOWER_TIER_AT_RISK})


@dataclass(frozen=True, slots=True)
class SteeringRules:
    """How the policy is steered.

    Attributes:
        act_at_burn: The burn rate from which on a tier is at risk.
        min_missed: Misses in the short window below which it is not: one is no trend.
        step: By how much a shed level changes at a time.
        max_shed: The highest shed level of a tier; that of the lowest tier is 1.
        reserve_step: By how much the reservation changes at a time.
        max_reserved: The largest reservation.
        tighten_every_s: Shortest time between two steps towards more shedding.
        relax_every_s: Shortest time between any change and a step towards less.
        relax_at_most_s: The same for one that has not held (see `EasingRules`).
    """

    act_at_burn: float = 2.0
    min_missed: int = 3
    step: float = 0.25
    max_shed: float = 0.75
    reserve_step: float = 0.15
    max_reserved: float = 0.3
    tighten_every_s: float = 10.0
    relax_every_s: float = RELAX_EVERY_S
    relax_at_most_s: float = 480.0

    @property
    def easing(self) -> EasingRules:
        """Those for steps towards less."""
        return EasingRules(self.relax_every_s, self.relax_at_most_s)


@dataclass(frozen=True, slots=True)
class TierBurn:
    """A tier's burn rates."""

    long: Burn
    short: Burn

    def at_risk(self, rules: SteeringRules) -> bool:
        """Whether it has missed too much, and still does."""
        return (
            self.short.missed >= rules.min_missed
            and min(self.long.rate, self.short.rate) >= rules.act_at_burn
        )

    @property
    def is_calm(self) -> bool:
        """Whether it misses no more than its target allows in the short window."""
        return self.short.rate <= ALLOWED


@dataclass(frozen=True, slots=True)
class Steered:
    """The policy to follow from now on, why it is that one, and what is known of steps towards less."""

    policy: ClusterPolicy
    reason: SteerReason
    easing: Easing


def steer(
    policy: ClusterPolicy,
    burns: Mapping[Tier, TierBurn],
    load: FleetLoad,
    since_change_s: float,
    rules: SteeringRules,
    tiers: TierSet,
    easing: Easing = UNTRIED,
) -> Steered:
    """Take one step, or none.

    Tiers are looked at from the top down, and the first one at risk decides. The sheddable tiers below it are
    shed from the lowest one upwards, each as far as the rules allow before the next; for the top tier more is
    reserved, too. What was shed last is admitted first: a tier as soon as all above it are calm, the lowest
    one and the reservation last. The top tier is never shed, and nothing is shed for the lowest.
    `since_change_s` counts from the last change by these rules. What was too little to shed is tried again
    later each time.

    What is missed otherwise than for load, shedding would not mend: a step towards more is taken only while
    the fleet is loaded, and while it is idle all tiers count as calm.
    """
    changes, reason = _wanted(policy, burns, load, rules, tiers)
    if not changes:
        return Steered(policy, reason, easing)
    revised = policy.revised(**changes)
    if reason in _TIGHTENS:
        waits_s = rules.tighten_every_s
        then = easing.after_tightening(policy, since_change_s, rules.easing)
    else:
        waits_s = easing.waits_s(revised, rules.easing)
        then = easing.after_easing(policy, rules.easing)
    if since_change_s < waits_s:
        return Steered(policy, SteerReason.TOO_SOON, easing)
    return Steered(revised, reason, then)


def _wanted(
    policy: ClusterPolicy,
    burns: Mapping[Tier, TierBurn],
    load: FleetLoad,
    rules: SteeringRules,
    tiers: TierSet,
) -> tuple[dict[str, Any], SteerReason]:
    """What to change in the policy, if time allows, and why; nothing is an empty mapping."""
    upper = tiers.names[:-1] or tiers.names
    at_risk = [tier for tier in upper if burns[tier].at_risk(rules)]
    is_idle, are_calm = load is FleetLoad.IDLE, True
    for tier in upper:
        if are_calm and policy.shed_level(tier) > 0:
            return {"shed": _shifted(policy, tier, -rules.step)}, SteerReason.HIGHER_TIERS_CALM
        if tier in at_risk and not is_idle:
            if load is not FleetLoad.LOADED:
                return {}, SteerReason.NOT_FOR_LOAD
            changes = _more_for(tier, policy, rules, tiers)
            of_top = tier == tiers.top
            reason = SteerReason.TOP_TIER_AT_RISK if of_top else SteerReason.LOWER_TIER_AT_RISK
            return changes, reason if changes else SteerReason.EXHAUSTED
        are_calm = are_calm and (is_idle or burns[tier].is_calm)
    if not are_calm:
        return {}, SteerReason.UNDECIDED
    if changes := _less_of_all(policy, rules, tiers):
        return changes, SteerReason.ALL_CALM
    return {}, SteerReason.NOT_FOR_LOAD if at_risk else SteerReason.NOTHING_TO_DO


def _more_for(tier: Tier, policy: ClusterPolicy, rules: SteeringRules, tiers: TierSet) -> dict[str, Any]:
    """One step towards more room for a tier."""
    changes: dict[str, Any] = {}
    for lower in tiers.sheddable:
        max_level = 1.0 if lower == tiers.lowest else rules.max_shed
        if tiers.rank(lower) < tiers.rank(tier) and policy.shed_level(lower) < max_level:
            changes["shed"] = _shifted(policy, lower, rules.step, max_level)
            break
    if tier == tiers.top and policy.reserved < rules.max_reserved:
        changes["reserved"] = _tidy(min(rules.max_reserved, policy.reserved + rules.reserve_step))
    return changes


def _less_of_all(policy: ClusterPolicy, rules: SteeringRules, tiers: TierSet) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if policy.shed_level(tiers.lowest) > 0:
        changes["shed"] = _shifted(policy, tiers.lowest, -rules.step)
    if policy.reserved > 0:
        changes["reserved"] = _tidy(max(0.0, policy.reserved - rules.reserve_step))
    return changes


def _shifted(policy: ClusterPolicy, tier: Tier, by: float, max_level: float = 1.0) -> dict[Tier, float]:
    level = _tidy(min(max_level, max(0.0, policy.shed_level(tier) + by)))
    return {**policy.shed, tier: level}


def _tidy(fraction: float) -> float:
    """Without the rounding errors of repeated additions, so that what goes up comes down to 0."""
    return round(fraction, 6)
