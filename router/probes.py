"""Which requests are let in for what they will teach, although they are predicted to be late.

Owns the rule and when each tenant last had one let in. Pure, like `router.core`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from router.fleet.view import FleetView
from router.placement.policies import Choice
from router.promises import Inquiry, Promises, tells_the_way

PROBE_EVERY_S: Final = 5.0
"""So often a request of a tenant is let in that only what has been learned says will be late."""


class Probes:
    """Lets in a request of a tenant now and then that is late by nothing but what has been learned.

    What is refused teaches nothing: one slow first token, or a few texts of unusually many tokens, would
    have all others refused for good.

    Args:
        view: Knows how long a prompt would be if nothing had been learned of its tenant's texts.
        promises: Of the requests.
    """

    def __init__(self, view: FleetView, promises: Promises) -> None:
        self._view = view
        self._promises = promises
        self._let_in_s: dict[str, float] = {}
        """When a request of a tenant was last let in, if that was lately; the oldest first."""

    def __len__(self) -> int:
        """How many tenants it remembers."""
        return len(self._let_in_s)

    def lets_in(self, inquiry: Inquiry, choice: Choice, memory_s: float, wait_s: float) -> bool:
        """Whether a request that is late is let in; then it counts.

        Args:
            inquiry: The request.
            choice: The prefill replica that suits it best, and what is expected there.
            memory_s: Seconds until decode has memory for it.
            wait_s: Those of them for which its first token waits after its prefill.
        """
        request, now_s = inquiry.request, inquiry.now_s
        let_in_s = self._let_in_s.get(request.tenant, -math.inf)
        if now_s - let_in_s < PROBE_EVERY_S or not tells_the_way(request, choice, wait_s):
            return False
        if self._is_late_anyway(inquiry, choice, memory_s):
            return False
        self._remember(request.tenant, now_s)
        return True

    def _is_late_anyway(self, inquiry: Inquiry, choice: Choice, memory_s: float) -> bool:
        """Whether a request would be late if nothing had been learned."""
        predictor = choice.replica.predictor
        tokens, handoff_s = self._view.unlearned_tokens(inquiry.request), predictor.handoff_s
        newcomer = replace(inquiry.newcomer, tokens=tokens)
        unlearned = replace(inquiry, newcomer=newcomer, cached={}, prefill=(choice.replica,))
        terms = self._promises.terms(unlearned, memory_s)
        latest_s = terms.latest_s + max(0.0, self._promises.path_s(inquiry.request, handoff_s) - handoff_s)
        return min(choice.end_s, inquiry.now_s + predictor.prefill_s(tokens)) > latest_s

    def _remember(self, tenant: str, now_s: float) -> None:
        """Whoever may have another let in is forgotten for it: there may be any number of tenants."""
        self._let_in_s.pop(tenant, None)
        self._let_in_s[tenant] = now_s
        while now_s - self._let_in_s[oldest := next(iter(self._let_in_s))] >= PROBE_EVERY_S:
            del self._let_in_s[oldest]
