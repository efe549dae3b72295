"""Which requests are let in for what they will teach, although they are predicted to be late.

Owns the rule and when each tenant last had one let in. Pure, like `router.core`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from router.fleet.queue_forecast import prospect
from router.fleet.view import FleetView
from router.placement.policies import Choice, NewPrefill, queued
from router.promises import Inquiry, Promises, tells_the_way
from slo.tiers import weight_of

PROBE_EVERY_S: Final = 5.0
"""So often a request of a tenant is let in that only what has been learned says will be late."""


class Probes:
    """Lets in a request of a tenant now and then that is late by nothing but what has been learned.

    What is refused teaches nothing: one slow first token, a few slow passes, or a few texts of unusually many
    tokens, would have all others refused for good.

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

    def lets_in(self, inquiry: Inquiry, choice: Choice, memory_s: float, wait_s: float) -> Choice | None:
        """What is expected of a request that is late and is let in, which counts then; None when it is not.

        Args:
            inquiry: The request.
            choice: The prefill replica that suits it best, and what is expected there.
            memory_s: Seconds until decode has memory for it.
            wait_s: Those of them for which its first token waits after its prefill.
        """
        request, now_s = inquiry.request, inquiry.now_s
        let_in_s = self._let_in_s.get(request.tenant, -math.inf)
        if now_s - let_in_s < PROBE_EVERY_S:
            return None
        first = self._goes_first(inquiry, choice, memory_s)
        if first is None or not tells_the_way(request, first, wait_s):
            return None
        self._remember(request.tenant, now_s)
        return first

    def _goes_first(self, inquiry: Inquiry, choice: Choice, memory_s: float) -> Choice | None:
        """What is expected of a request that goes first, and is in time if nothing had been learned; or None.

        Its replica is idle, or stops for it what runs there.
        """
        replica, now_s, learned = choice.replica, inquiry.now_s, choice.replica.predictor
        work = replica.outstanding(now_s)
        if replica.jobs and (work.stops_at_s is None or self._promises.awaits_stop(replica.replica_id)):
            return None
        tokens, handoff_s = self._view.unlearned_tokens(inquiry.request), learned.handoff_s
        predictor = min((learned, replica.unlearned or learned), key=lambda one: one.prefill_s(tokens))
        newcomer, as_before = replace(inquiry.newcomer, tokens=tokens), replace(replica, predictor=predictor)
        unlearned = replace(inquiry, newcomer=newcomer, cached={}, prefill=(as_before,))
        terms = self._promises.terms(unlearned, memory_s)
        learned_s = max(0.0, self._promises.path_s(inquiry.request, handoff_s) - handoff_s)
        if not replica.jobs:
            end_s = min(choice.end_s, now_s + predictor.prefill_s(tokens))
            return choice if end_s <= terms.latest_s + learned_s else None
        weight = weight_of(replica.weights, inquiry.newcomer.tier)
        prefill = NewPrefill(inquiry.tokens, terms.deadline_s + learned_s, weight, inquiry.cached)
        own_s = prefill.own_s(replica)
        asked = queued(prefill, min(own_s, predictor.prefill_s(tokens)), now_s)
        found = prospect(work, asked, value_before=0.0)
        if not found.is_on_time or found.start_s != work.stops_at_s:
            return None
        return replace(choice, start_s=found.start_s, end_s=found.start_s + own_s, stops=replica.running)

    def _remember(self, tenant: str, now_s: float) -> None:
        """Whoever may have another let in is forgotten for it: there may be any number of tenants."""
        self._let_in_s.pop(tenant, None)
        self._let_in_s[tenant] = now_s
        while now_s - self._let_in_s[oldest := next(iter(self._let_in_s))] >= PROBE_EVERY_S:
            del self._let_in_s[oldest]
