"""The section `tiers` of a file: the default tiers with other settings, or a set of tiers of one's own.

Owns what holds in every such section. A deployment's settings of a tier are `deployments.config.tiers`'s.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import Field

from slo.files.strict_yaml import ObjectiveMs, Positive, Section, nearest
from slo.tiers import DEFAULT_TIERS, Tier, TierPolicy, TierSet

_UNSET: Final = TierPolicy(ttft_s=None, tpot_s=None, sheddable=True, weight=1.0)
"""A tier of one's own of which nothing is said."""


class TierSection(Section):
    """One tier. What is not given is as in the default set; of a tier of one's own, as said here."""

    rank: int | None = Field(
        None, description="Order of value, the highest first; by default the order in the file."
    )
    default: bool = Field(default=False, description="Whether it serves requests that ask for no tier.")
    tpot_ms: ObjectiveMs | None = Field(None, description="Time per output token, milliseconds.")
    sheddable: bool = Field(
        default=_UNSET.sheddable, description="May be refused when its deadline cannot be met."
    )
    weight: Positive = Field(
        _UNSET.weight, description="Value of one request on time, relative to other tiers."
    )
    share: Annotated[float, Field(ge=0, le=1)] = Field(
        _UNSET.share, description="Fraction of prefill time that its requests get when they want it."
    )

    def over(self, policy: TierPolicy) -> TierPolicy:
        """`policy` with what is given here."""
        names = self.model_fields_set & {"sheddable", "weight", "share"}
        changes: dict[str, Any] = {name: getattr(self, name) for name in names}
        if "tpot_ms" in self.model_fields_set:
            changes["tpot_s"] = None if self.tpot_ms is None else self.tpot_ms / 1e3
        return replace(policy, **changes)


def tier_set(given: Mapping[Tier, TierSection]) -> TierSet:
    """The tiers that a file describes.

    When all names are of the default set, the default tiers keep what is not given. Any other name makes it a
    set of one's own, which has the tiers that are given and no others.

    Raises:
        ValueError: when ranks or the default tier are unclear, or `TierSet` refuses it.
    """
    defaults = [tier for tier, section in given.items() if section.default]
    if len(defaults) > 1:
        raise ValueError(f"one tier is the default, not {' and '.join(defaults)}")
    if given.keys() <= DEFAULT_TIERS.clients.keys():
        sections = {tier: given.get(tier, TierSection()) for tier in DEFAULT_TIERS.names}
        clients = {tier: section.over(DEFAULT_TIERS[tier]) for tier, section in sections.items()}
        return TierSet(_ranked(clients, sections), *(defaults or [DEFAULT_TIERS.default]))
    if not defaults:
        unknown = next(tier for tier in given if tier not in DEFAULT_TIERS.names)
        raise ValueError(
            f"there is no tier {unknown!r}; {nearest(unknown, DEFAULT_TIERS.names)} "
            "(tiers of your own: mark the one that serves requests without a tier with default: true)"
        )
    return TierSet(_ranked({tier: section.over(_UNSET) for tier, section in given.items()}, given), *defaults)


def _ranked(
    clients: Mapping[Tier, TierPolicy], sections: Mapping[Tier, TierSection]
) -> dict[Tier, TierPolicy]:
    """The tiers by their ranks, the highest first; as they come if none has any."""
    ranks = {tier: section.rank for tier, section in sections.items() if section.rank is not None}
    if not ranks:
        return dict(clients)
    if len(ranks) < len(clients):
        without = next(tier for tier in clients if tier not in ranks)
        raise ValueError(f"tier {without!r} has no rank; give one to every tier, or to none")
    if len(set(ranks.values())) < len(ranks):
        raise ValueError("two tiers have the same rank")
    return {tier: clients[tier] for tier in sorted(clients, key=ranks.__getitem__, reverse=True)}
