"""What was admitted and waits for prefill: by class, by tenant, and who has waited longest.

Owns the account. How long a class's queue may be is decided in `slo.admission.controller`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from slo.admission.parts import excess
from slo.request import JobId
from slo.tiers import Tier


class Waiting(NamedTuple):
    """A request that waits for its prefill.

    Attributes:
        is_asked: Whether its work counts as asked for here, at that time.
    """

    tier: Tier
    tenant: str
    work_s: float
    admitted_s: float
    is_asked: bool = True


class Backlog:
    """Predicted seconds of prefill that were admitted and have not been served.

    Args:
        tiers: All classes.
        weight: Of a tenant, relative to the others of its class.
    """

    def __init__(self, tiers: Iterable[Tier], weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._waiting: dict[Tier, dict[JobId, Waiting]] = {tier: {} for tier in tiers}
        self._tier_of: dict[JobId, Tier] = {}
        self._work_s: dict[Tier, dict[str, float]] = {tier: {} for tier in self._waiting}
        self._requests: dict[Tier, dict[str, int]] = {tier: {} for tier in self._waiting}
        self._whole_s = dict.fromkeys(self._waiting, 0.0)

    def __contains__(self, job_id: JobId) -> bool:
        """Whether a request waits."""
        return job_id in self._tier_of

    def add(self, job_id: JobId, request: Waiting) -> None:
        """A request waits from now on; what was known of it before, from its replica, holds no longer."""
        self.remove(job_id)
        tier, tenant = request.tier, request.tenant
        self._waiting[tier][job_id], self._tier_of[job_id] = request, tier
        self._work_s[tier][tenant] = self._work_s[tier].get(tenant, 0.0) + request.work_s
        self._requests[tier][tenant] = self._requests[tier].get(tenant, 0) + 1
        self._whole_s[tier] += request.work_s

    def remove(self, job_id: JobId) -> Waiting | None:
        """A request waits no more; None when it did not."""
        if (tier := self._tier_of.pop(job_id, None)) is None:
            return None
        request = self._waiting[tier].pop(job_id)
        work_s, requests, tenant = self._work_s[tier], self._requests[tier], request.tenant
        requests[tenant] -= 1
        work_s[tenant] = max(0.0, work_s[tenant] - request.work_s)
        if requests[tenant] == 0:
            del requests[tenant], work_s[tenant]
        self._whole_s[tier] = max(0.0, self._whole_s[tier] - request.work_s) if requests else 0.0
        return request

    def seconds(self, tier: Tier) -> float:
        """What waits of a class, in seconds of the fastest replica."""
        return self._whole_s[tier]

    def oldest(self, tier: Tier) -> Waiting | None:
        """Who of a class has waited longest; None when nobody waits."""
        return next(iter(self._waiting[tier].values()), None)

    def excess_s(self, tier: Tier, tenant: str, longest_s: float, limit_s: float, per_s: float) -> float:
        """How long a tenant has to wait until it may lengthen its class's queue; at most 0 when it may now.

        Args:
            tier: The class.
            tenant: Whose request comes.
            longest_s: How long the queue may take; see `slo.admission.parts.excess`.
            limit_s: How long it may take at most.
            per_s: How much of it is done in a second.
        """
        if (over_s := self._whole_s[tier] / per_s - longest_s) <= 0:
            return over_s
        return excess(self._work_s[tier], tenant, longest_s * per_s, limit_s * per_s, self._weight) / per_s
