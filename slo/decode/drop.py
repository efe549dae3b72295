"""Which streams a decode replica under pressure may end for good, and which have waited for long enough.

Only what was promised nothing may be: streams without any objective, of a tier that has none and may be shed,
never of the top tier. Owns that, and the limit on how long such a stream waits for memory that was taken from
it. That its memory is taken for a higher tier once more than anybody's may be is noticed where victims are
chosen, see `slo.decode.victims`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from slo.decode.restore import Parked
from slo.request import RequestContext
from slo.tiers import Tier, TierPolicy, TierSet


def droppable_tiers(tiers: TierSet) -> frozenset[Tier]:
    """The tiers that promise nothing and may be shed."""
    return frozenset(tier for tier in tiers.sheddable if _promises_nothing(tiers[tier]))


def may_be_dropped(context: RequestContext, droppable: Container[Tier]) -> bool:
    """Whether a request may be ended for good: nor has it an objective of its own.

    An objective for the whole answer sets a budget for its first token.
    """
    return context.tier in droppable and context.ttft_budget_s is None and context.tpot_s is None


def overdue(parked: Iterable[Parked], after_s: float, now_s: float) -> list[Parked]:
    """Those that may be dropped and have waited for their memory for longer than `after_s`."""
    return [one for one in parked if one.may_drop and not one.is_newcomer and now_s - one.since_s > after_s]


def _promises_nothing(policy: TierPolicy) -> bool:
    promised = (policy.ttft_s, policy.ttft_scale, policy.tpot_s, policy.e2e_s)
    return all(one is None for one in promised)
