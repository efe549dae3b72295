"""What a queue that goes by deadlines owes to those that it would leave behind.

Owns who leads the queue by right, and by whom a lead may be stopped; keeps the replica's account of what was
served (`slo.queue.shares`). Among what is late or has no deadline, the order follows the effective tier
(`slo.queue.ageing`).

No class starves. The head of a class, its oldest waiting request, leads in two steps if the class has had
less than its share:

- After `starvation_timeout_s` it leads the queue, but for prefills of a higher worth that are on time; only
  those stop it.
- After twice that it leads before all other classes, and none of them stops it.

The right is the class's. Its own requests that are on time go before its head and may stop it: a head that is
late anyway could only make them late too, and be followed by more of the kind.

A class leads for at most its share `s` of the time (`slo.queue.shares`), and with heads that have missed
their deadlines for at most `TARDY_PART` of that: they are answered, but they take little from those that can
still be on time. So the head starts within `2 * starvation_timeout_s + r` seconds of its arrival or, if that
is later, within `w / s + r` of the start of the head before it, `w / (TARDY_PART * s) + r` if that one was
late: `w` is its work, of which a pass that was held up counts for `MOST_OF_PREDICTED` times its prediction,
`r` what remains of the running step, one lead of each other class, and what is on time of its own. In return,
the classes above lose at most `s` of any long span of time, and nothing while nobody has waited for that
long. A class that has its share is not starving, though an old request of it that is late may be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from slo.queue.ageing import Ageing, weight_at
from slo.queue.prefill import Prefill
from slo.queue.shares import FairnessState, ShareAccount
from slo.tiers import Tier, TierSet

STARVATION_TIMEOUT_S: Final = 30.0
_AGEING: Final = Ageing()
TARDY_PART: Final = 0.1
"""Of its share, how much a class leads with requests that are late anyway."""
MOST_OF_PREDICTED: Final = 5.0
"""A pass counts as a lead for at most so many times its predicted time.

Predictions are corrected by up to this factor (`slo.predict.prediction_error.MAX_CORRECTION`), so a slow
replica stays within it. What takes longer was held up, by a frozen process say, and the class has not had
that time: multiplied by `1 / (TARDY_PART * share)`, half a minute of it would keep the class from leading for
half an hour."""
_AT_ONCE: Final = 2


class Boost(NamedTuple):
    """The right of a prefill to run before more urgent ones.

    Attributes:
        tier: The class whose right it is.
        guard: The weight above which a prefill on time of another class goes before it and may stop it;
            infinite for none.
        counts: How many times its seconds count against the share of its class.
    """

    tier: Tier
    guard: float
    counts: float = 1.0


class PassServed(NamedTuple):
    """The part of a request in a forward pass: its class, its seconds, and when the pass ended."""

    tier: Tier
    seconds: float
    ended_s: float


class FairnessRule:
    """What follows from who has had how much.

    Args:
        tiers: Share, weight and rank of each tier.
        starvation_timeout_s: How long the head of a class below its share waits before it leads; twice as
            long, and it is stopped by nobody. Infinite: never.
        standing: Who has had how much.
    """

    def __init__(self, tiers: TierSet, starvation_timeout_s: float, standing: FairnessState) -> None:
        self._tiers = tiers
        self._starvation_timeout_s = starvation_timeout_s
        self.standing = standing

    def at(self, state: FairnessState) -> FairnessRule:
        """The same rule for a published state."""
        return FairnessRule(self._tiers, self._starvation_timeout_s, state)

    def share(self, tier: Tier) -> float:
        """Which part of the time a tier that may starve is entitled to; above 0."""
        return self._tiers[tier].share

    def boosts(self, prefills: Sequence[Prefill], now_s: float) -> list[tuple[Prefill, Boost]]:
        """The heads of classes that have the right to lead."""
        since_s = now_s - self._starvation_timeout_s
        old = [prefill for prefill in prefills if prefill.arrived_s < since_s]
        if not old:
            return []
        heads: dict[Tier, Prefill] = {}
        for prefill in old:
            head = heads.get(prefill.tier)
            if head is None or prefill.arrived_s < head.arrived_s:
                heads[prefill.tier] = prefill
        entitled = ((head, self.boost_of(head, now_s)) for head in heads.values())
        return [(head, boost) for head, boost in entitled if boost is not None]

    def boost_of(self, prefill: Prefill, now_s: float) -> Boost | None:
        """By what right a prefill has the replica if it runs now; None when by its deadline alone."""
        starvation_timeout_s, tier = self._starvation_timeout_s, prefill.tier
        waited_s = now_s - prefill.arrived_s
        if waited_s <= starvation_timeout_s or not self.standing.is_paced(tier, now_s):
            return None
        if self.standing.deficit(tier) <= 0:
            return None
        guard = math.inf
        if waited_s <= _AT_ONCE * starvation_timeout_s:
            guard = self._aged_weight(tier, waited_s)
        is_late = now_s + prefill.remaining_s > prefill.deadline_s
        return Boost(tier, guard, 1.0 / TARDY_PART if is_late else 1.0)

    def worth(self, prefill: Prefill, now_s: float) -> float:
        """What the memory of a prefill may be taken for only by who weighs as much.

        Its weight or, for as long as its class has had less than its share, what it has come to be worth by
        waiting, and more than anybody weighs once none stops it. It leads for a chunk at a time, and would
        have to start over before its class may lead again.
        """
        waited_s = now_s - prefill.arrived_s
        if waited_s <= self._starvation_timeout_s or self.standing.deficit(prefill.tier) <= 0:
            return prefill.weight
        if waited_s > _AT_ONCE * self._starvation_timeout_s:
            return math.nextafter(max(self._tiers.weights.values()), math.inf)
        return max(prefill.weight, self._aged_weight(prefill.tier, waited_s))

    def _aged_weight(self, tier: Tier, waited_s: float) -> float:
        return weight_at(_AGEING.effective_tier(self._tiers, tier, waited_s), self._tiers)

    def boosted(
        self, ordered: Sequence[Prefill], boosts: Sequence[tuple[Prefill, Boost]], start_s: float
    ) -> list[Prefill]:
        """The queue with the boosted prefills in their places.

        The first of the queue can start at `start_s`.
        """
        leading = {head.job_id for head, _ in boosts}
        queue = [prefill for prefill in ordered if prefill.job_id not in leading]
        start_s += sum(head.remaining_s for head, boost in boosts if boost.guard == math.inf)
        # The one with the highest guard, and of several the oldest, is put in last and so goes first.
        for head, boost in sorted(boosts, key=lambda one: (one[1].guard, -one[0].arrived_s)):
            others_s = start_s - head.remaining_s if boost.guard == math.inf else start_s
            queue = _behind_those_before(head, boost.guard, queue, others_s)
        return queue

    def by_effective_tier(self, prefills: Sequence[Prefill], now_s: float) -> list[Prefill]:
        """Those that are late or have no deadline: the stopped ones, then by effective tier, then by age."""
        deficits = {tier: self.standing.deficit(tier) for tier in {prefill.tier for prefill in prefills}}

        def key(prefill: Prefill) -> tuple[bool, float, float]:
            tier = prefill.tier
            level = _AGEING.effective_tier(self._tiers, tier, now_s - prefill.arrived_s, deficits[tier])
            return prefill.preemptions == 0, -level, prefill.arrived_s

        return sorted(prefills, key=key)


class Fairness(FairnessRule):
    """The rule with one replica's running account.

    Args:
        tiers: Share, weight and rank of each tier.
        starvation_timeout_s: See `FairnessRule`.
    """

    def __init__(self, tiers: TierSet, starvation_timeout_s: float = STARVATION_TIMEOUT_S) -> None:
        self.account = ShareAccount({tier: policy.share for tier, policy in tiers.items()})
        super().__init__(tiers, starvation_timeout_s, self.account.state())

    def step_ended(
        self,
        tokens: Mapping[Tier, int],
        seconds: float,
        now_s: float,
        boost: Boost | None = None,
        predicted_s: float = math.inf,
    ) -> None:
        """A forward pass has ended or stopped; its time is split among its members by their tokens.

        `boost` is the right by which it was issued, if not by deadlines alone; `predicted_s` what the whole
        pass was expected to take, infinite for not known.
        """
        total = sum(tokens.values())
        at_most_s = min(seconds, MOST_OF_PREDICTED * predicted_s)
        for tier, count in tokens.items():
            counts = boost.counts if boost is not None and boost.tier == tier else 0.0
            lead_s = counts * (at_most_s * count / total)
            self.account.served(tier, seconds * count / total, now_s, lead_s=lead_s)
        self.standing = self.account.state()

    def work_lost(self, passes: Iterable[PassServed]) -> None:
        """What these passes have computed of a request is dropped: its class has not had them after all."""
        for served in passes:
            self.account.lost(*served)
        self.standing = self.account.state()


def _behind_those_before(
    boost: Prefill, guard: float, queue: Sequence[Prefill], start_s: float
) -> list[Prefill]:
    """The queue with a boosted prefill before all but those on time of its class or of more than `guard`."""
    before: list[Prefill] = []
    after: list[Prefill] = [boost]
    for prefill in queue:
        on_time = start_s + prefill.remaining_s <= prefill.deadline_s < math.inf
        goes_before = on_time and (prefill.weight > guard or prefill.tier == boost.tier)
        (before if goes_before else after).append(prefill)
    return before + after
