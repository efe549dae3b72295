"""Whether a class has had less than its share of prefill, over minutes.

Owns that account, of what was admitted. What arrives in seconds is `slo.admission.demand`'s: there one prompt
that takes long is more than the share of a class that sends nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from slo.tiers import Tier

OVER_S: Final = 300.0
"""What a class left of its share is remembered for so long, and so is what it had above it."""


class ShareCredit:
    """Grows with the share of a class, and falls by what is admitted.

    As long as there is some, the next request is within the share, if that is as much in the time that is
    remembered: it is paid back before another one is. So a class that asks for no more than its share has
    all of it, and one that asks for more has no more by this.

    Args:
        shares: Of each class; one without a share has no credit.
    """

    def __init__(self, shares: Mapping[Tier, float]) -> None:
        self._accounts = {tier: _Account(share) for tier, share in shares.items() if share > 0}

    def covers(self, tier: Tier, work_s: float, capacity: float, now_s: float) -> bool:
        """Whether a request of a class is within its share of what the fleet can do in a second."""
        account = self._accounts.get(tier)
        if account is None:
            return False
        account.passed(capacity, now_s)
        if capacity <= 0:
            return False
        account.per_s = account.share * capacity
        return account.credit_s >= 0 and work_s <= OVER_S * account.per_s

    def passed(self, capacity: float, now_s: float) -> None:
        """Until now the fleet could do so much in a second; it may be another amount from now on."""
        for account in self._accounts.values():
            if account.at_s < math.inf:
                account.passed(capacity, now_s)

    def admitted(self, tier: Tier, work_s: float) -> None:
        """A request was admitted."""
        if (account := self._accounts.get(tier)) is not None and account.per_s > 0:
            account.credit_s = max(account.credit_s - work_s / account.per_s, -OVER_S)

    def withdrawn(self, tier: Tier, work_s: float) -> None:
        """What was admitted is not prefill's to do after all."""
        if (account := self._accounts.get(tier)) is not None and account.per_s > 0:
            account.credit_s += work_s / account.per_s


@dataclass(slots=True)
class _Account:
    """Of one class: its share of a second, in work, and for how long it may have, or has had, all of that.

    In seconds, so that what is remembered is as long whatever the fleet could do then.
    """

    share: float
    per_s: float = 0.0
    credit_s: float = 0.0
    at_s: float = math.inf

    def passed(self, capacity: float, now_s: float) -> None:
        """Count the time until now, in which the fleet could do so much: nobody has a share of nothing."""
        if capacity > 0:
            self.credit_s = min(OVER_S, self.credit_s + max(0.0, now_s - self.at_s))
        self.at_s = now_s
